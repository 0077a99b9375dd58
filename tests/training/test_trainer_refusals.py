from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from sordino.errors import CoupledRecords, InvalidArgument, LossShapeError, PrivacyError, UncapturedParameter
from sordino.randomness import KeyedRNG
from sordino.training.fit import fit
from sordino.training.plan import PerformanceOptions, Plan

PLAN = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=2, expected_batch_size=5.0, delta=1e-5)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data() -> tuple[Tensor, Tensor]:
    return torch.arange(40.0).view(10, 4) / 40, torch.arange(10) % 2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def refused(model: nn.Module, loss: Callable[..., Tensor], error: type[Exception]) -> str:
    """The refusal's text; nothing of the model may have changed."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error) as caught:
        fit(model, loss, data(), PLAN, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: F.cross_entropy(m(x), y),
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")[:, None],
        lambda m, x, y: m(x),
    ],
)
def test_a_loss_that_is_not_one_value_per_record_is_refused(loss: Callable[..., Tensor]) -> None:
    assert "per record" in refused(net(), loss, LossShapeError)


def test_a_loss_that_loses_records_is_refused() -> None:
    refused(net(), lambda m, x, y: losses(m, x, y)[1:], LossShapeError)


def test_a_model_that_centres_its_batch_is_refused() -> None:
    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    refused(nn.Sequential(Centered(), net()), losses, CoupledRecords)


def test_batch_normalisation_is_refused() -> None:
    refused(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), losses, PrivacyError)


def test_a_weight_penalty_in_the_loss_is_refused_by_a_capture_and_a_part_of_every_record_alone() -> None:
    def penalized(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(m, x, y) + sum(p.square().sum() for p in m.parameters())

    with pytest.raises(UncapturedParameter):
        fit(net(), penalized, data(), PLAN, progress=False, performance=PerformanceOptions(gradients="captured"))
    assert fit(net(), penalized, data(), PLAN, progress=False).gradients == "one-by-one"


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises((InvalidArgument, PrivacyError)):
        fit(net().requires_grad_(False), losses, data(), PLAN, progress=False)


def test_a_second_run_with_the_same_randomness_is_refused() -> None:
    rng = KeyedRNG()
    fit(net(), losses, data(), PLAN, rng=rng, progress=False)
    with pytest.raises(InvalidArgument, match="fresh"):
        fit(net(), losses, data(), PLAN, rng=rng, progress=False)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="model's parameters"):
        fit(net(), losses, data(), PLAN, optimizer=torch.optim.SGD(net().parameters(), lr=1.0), progress=False)


def test_lbfgs_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="LBFGS"):
        fit(net(), losses, data(), PLAN, optimizer=torch.optim.LBFGS, progress=False)


def test_a_schedule_that_looks_at_losses_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ReduceLROnPlateau"):
        fit(net(), losses, data(), PLAN, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau, progress=False)


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net().parameters(), lr=1.0))
    with pytest.raises(InvalidArgument, match="optimizer's"):
        fit(net(), losses, data(), PLAN, scheduler=other, progress=False)


def test_another_optimizer_can_not_step_the_model_meanwhile() -> None:
    model = net()
    stranger = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(PrivacyError, match="another optimizer"):
        fit(model, losses, data(), PLAN, on_step=lambda _: stranger.step(), progress=False)
    stranger.step()


def test_tensors_of_different_lengths_are_refused() -> None:
    x, y = data()
    with pytest.raises(InvalidArgument, match="one length"):
        fit(net(), losses, (x, y[1:]), PLAN, progress=False)


def test_data_that_can_only_be_iterated_are_refused() -> None:
    class Stream(IterableDataset[object]):
        def __iter__(self) -> Iterator[object]:
            return iter(())

    with pytest.raises(InvalidArgument, match="map-style"):
        fit(net(), losses, Stream(), PLAN, progress=False)


def test_refusals_about_the_loss_do_not_tell_how_many_records_were_drawn() -> None:
    def late(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        # No synthetic record has this feature, and no comparison of tensors tells of it.
        value = losses(m, x, y)
        return value[1:] if 7.0 in x[:, 0].tolist() else value

    x, y = data()
    x[:, 0] = 7
    plan = replace(PLAN, sample_rate=1.0)
    with pytest.raises(LossShapeError) as caught:
        fit(net(), late, (x, y), plan, progress=False)
    assert not any(character.isdigit() for character in str(caught.value))


class Initialized(nn.Module):
    """Writes its bias once, from the batch that comes after a number of calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.layer, self.calls, self.after = nn.Linear(4, 2), 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.after + 1:
            self.layer.bias.data.copy_(x.detach().mean(0)[:2])
        return self.layer(x)


@pytest.mark.parametrize("after", [0, 3])
def test_a_model_that_stores_records_is_refused_and_put_back(after: int) -> None:
    assert refused(Initialized(after), losses, CoupledRecords)


def test_a_model_that_stores_real_records_only_is_found_in_its_first_steps() -> None:
    class Ordinary(Initialized):
        def forward(self, x: Tensor) -> Tensor:
            # Synthetic features are never exactly the data's.
            if len(x) and bool((x[0] == torch.arange(40.0).view(10, 4) / 40).all(1).any()):
                self.layer.bias.data.copy_(x.detach().mean(0)[:2])
            return self.layer(x)

    assert "bias" in refused(Ordinary(0), losses, CoupledRecords)
