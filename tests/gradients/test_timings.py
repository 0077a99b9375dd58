"""Kernels chosen by the clock: remembered, exact, and never a reason to fail."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sordino.gradients import GradientCapture, KernelTimings


class _Reshaped(nn.Module):
    """A linear map at every position, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Conv2d(3, 5, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).flatten(1).square().sum(1)


def _norms_and_sums(model: nn.Module, x: torch.Tensor, timings: KernelTimings | None) -> tuple[torch.Tensor, ...]:
    capture = GradientCapture(model, timings=timings)
    try:
        capture.start(len(x))
        model(x).sum().backward()
        norms = capture.squared_norms()
        sums: dict[nn.Parameter, torch.Tensor] = {}
        capture.add_weighted_sums(1 / norms.sqrt(), sums)
        return norms, *(sums[parameter] for parameter in model.parameters())
    finally:
        capture.detach()


def test_timed_kernels_give_the_same_gradients_and_are_remembered(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, file = _Reshaped(), torch.randn(10, 3, 4, 6), tmp_path / "cache" / "kernels.json"
    expected = _norms_and_sums(model, x, None)
    for _ in range(2):
        found = _norms_and_sums(model, x, KernelTimings(file))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    kept = json.loads(file.read_text())
    assert [name.split()[5] for name in sorted(kept)] == ["Conv2d", "linear"]
    assert set(kept.values()) <= {"ghost", "stored", "norm_only"}
    # Neither the number of records nor anything from them is kept.
    assert "records" not in file.read_text()


@pytest.mark.parametrize("kernel", ["ghost", "stored", "norm_only"])
def test_the_kept_choice_is_the_one_that_is_taken(tmp_path: Path, kernel: str) -> None:
    torch.manual_seed(0)
    model, x, file = _Reshaped(), torch.randn(10, 3, 4, 6), tmp_path / "kernels.json"
    expected = _norms_and_sums(model, x, KernelTimings(file))
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), kernel)))
    found = _norms_and_sums(model, x, KernelTimings(file))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_fastest_attempt_wins(tmp_path: Path) -> None:
    tried: list[str] = []

    def attempt(kernel: str) -> None:
        tried.append(kernel)
        left = torch.ones(1200 if kernel == "ghost" else 2, 1200)
        (left @ left.t()).sum().item()

    timings = KernelTimings(tmp_path / "kernels.json")
    costs = {"ghost": 1.0, "stored": 2.0, "norm_only": 50.0}
    chosen = [timings.fastest("made up", {"width": 3}, costs, attempt, like=torch.ones(1)) for _ in range(2)]
    assert chosen == ["stored", "stored"]
    # The second time nothing is tried; what the cost model holds for hopeless never is.
    assert set(tried) == {"ghost", "stored"}
    assert len(tried) == 8


def test_no_record_is_timed(tmp_path: Path) -> None:
    # Values that a kernel would have to compute again, and sizes of batches, leave the same choices' names.
    torch.manual_seed(0)
    model, kept = _Reshaped(), []
    for number, x in enumerate((torch.randn(3, 3, 4, 6), 1e-30 * torch.randn(17, 3, 4, 6))):
        file = tmp_path / f"{number}.json"
        _norms_and_sums(model, x, KernelTimings(file))
        kept.append(set(json.loads(file.read_text())))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "unheard of"}'])
def test_a_broken_cache_is_measured_again(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(text)
    torch.manual_seed(0)
    norms, *_ = _norms_and_sums(_Reshaped(), torch.randn(8, 3, 4, 6), KernelTimings(file))
    assert bool((norms > 0).all())


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    norms, *_ = _norms_and_sums(_Reshaped(), torch.randn(8, 3, 4, 6), KernelTimings(tmp_path / "file" / "kernels.json"))
    assert bool((norms > 0).all())
