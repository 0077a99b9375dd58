"""Every case of the conformance set, through every path of the library."""

import pytest
import torch
from torch import nn

from sordino.audit import CASES, ConformanceFailure, EngineLibrary, FitLibrary, NotSupported, library_paths
from sordino.audit.conformance.framework import Case

QUICK = {"engine", "fit"}
PAIRS = [
    pytest.param(path, name, id=f"{path}: {name}", marks=() if path in QUICK else pytest.mark.slow)
    for path in library_paths()
    for name in CASES
]


@pytest.fixture(autouse=True)
def _no_compiled_leftovers():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("path", "name"), PAIRS)
def test_a_case_comes_out_as_it_should(path, name):
    found = CASES[name].run(library_paths()[path])
    assert found.passed, found
    if CASES[name].expects == "refusal":
        # A loss that sees one record at a time couples nothing.
        harmless = {"right"} if path == "fit, one by one" else set()
        assert found.verdict in {"refused", "not offered"} | harmless, "ours refuses what could be harmless by luck"


def test_every_way_of_computing_has_a_path():
    assert {"engine", "engine, secure noise", "fit", "fit, secure noise", "fit, low_memory", "fit, compiled"} <= set(
        library_paths()
    )


@pytest.mark.parametrize("memory", ["low_memory", "groupwise", "two_pass"])
def test_where_memory_is_spared_sums_are_computed_and_not_refused(memory):
    found = CASES["exact: one row of position ids for all records"].run(library_paths()[f"fit, {memory}"])
    assert found.verdict == "right"


def verdict(check, *, expects="right"):
    return Case(name="one", expects=expects, check=check).run(EngineLibrary())


def raises(error):
    def check(library):
        raise error

    return check


def test_what_goes_wrong_in_a_case_is_told_apart():
    refusal = EngineLibrary().refusals[0]("no")
    assert verdict(lambda _: None).passed
    assert verdict(raises(ConformanceFailure("2 C"))).description == "2 C"
    assert not verdict(raises(ConformanceFailure("2 C")), expects="refusal").passed
    assert not verdict(raises(refusal)).passed
    assert verdict(raises(refusal), expects="either").passed
    assert verdict(raises(ValueError("x")), expects="refusal").description == "crash: ValueError"
    assert verdict(raises(NotSupported())).passed


class Unclipped(FitLibrary):
    """Adds gradients up as they are."""

    def clipped_sum(self, model, batch, loss, *, max_grad_norm):
        (len(batch[0]) * loss.mean(model, batch)).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]


def test_a_library_that_does_not_clip_fails_every_case_that_measures_the_sum():
    measured = [
        case
        for name, case in CASES.items()
        if name.startswith(("a record replaced", "a large record", "exact: a layer", "exact: two branches"))
    ]
    assert len(measured) > 9
    assert not any(case.run(Unclipped()).passed for case in measured)


def test_a_loop_of_ones_own_is_not_offered_by_fit():
    with pytest.raises(NotSupported):
        FitLibrary().make_private(nn.Linear(1, 1), [])
