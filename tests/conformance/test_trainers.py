"""The conformance cases through the trainers of other libraries; those that can't be said there, by name and reason."""

import importlib.util

import pytest

from conformance_trainers import ByHuggingFace, ByLightning
from sordino.audit import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NEEDS = {ByLightning: ("lightning",), ByHuggingFace: ("transformers", "accelerate")}
# Some of each kind; the others are slow together.
QUICK = {
    "a large record left out moves the sum by at most C: squared loss, three outputs",
    "a mean over each record's own tokens is exact",
    "exact: a language model tied, table first",
    "exact: two branches of a siamese model",
    "refused: a batch mean inside the model",
    "refused: a buffer that collects from records",
    "ignored tokens of one record do not change the others in a mean over all tokens",
    "refused: batch normalization",
    "targets that broadcast over the batch are refused",
}

OWN_LOOP = "the case goes from batch to batch by itself; the trainer has the loop, and its steps are the engine's"
OWN_STEP = "the case calls or leaves out backward and step; in a trainer it is the trainer that calls them"
OWN_OPTION = "the case gives options to make_private, which the trainer has under other names or not at all"
# Also tested through each trainer itself, in tests/integrations.
BESIDE = "the case goes from batch to batch by itself; tested for the trainer in tests/integrations"
CANNOT_BE_SAID = {
    "a batch that is abandoned leaves nothing to the next step": OWN_LOOP,
    "a broken record adds nothing and stops nothing": OWN_LOOP,
    "a forward pass without a backward pass adds nothing": OWN_STEP,
    "a layer frozen between steps no longer counts": OWN_LOOP,
    "a layer that is skipped in a step has nothing of the step before": OWN_LOOP,
    "a layer unfrozen between steps is exact or refused": OWN_LOOP,
    "a misspelt option is a TypeError": OWN_OPTION,
    "a noise multiplier of 1000 drowns the model in noise": BESIDE,
    "a resumed run draws new noise": BESIDE,
    "a step without a clipped backward pass raises and changes nothing": OWN_STEP,
    "an abandoned batch is charged": OWN_LOOP,
    "another optimizer over a private parameter is refused": OWN_STEP,
    "batches are drawn by Poisson sampling": OWN_LOOP,
    "chunks have the sum of the whole batch": BESIDE,
    "every step is charged": BESIDE,
    "N and N + 1 records have the same noise and divisor, bit for bit": OWN_OPTION,
    "no step holds a record twice after a loop is broken off": OWN_LOOP,
    "noise has the declared scale in every tensor": OWN_LOOP,
    "noise is fresh in every step and coordinate": OWN_LOOP,
    "one record moves the sum by at most the clipping norm": OWN_LOOP,
    "steps after the last checkpoint stay charged when a run goes on after a crash": BESIDE,
    "refused: a batch is left out for its number of records": OWN_LOOP,
    "batch_sampler= over a subset of the records trains on these alone": OWN_OPTION,
    "sampler= over a subset of the records trains on these alone": OWN_OPTION,
    "refused: the learning rate is set from the batch": OWN_LOOP,
    "refused: the weight decay is set from the batch": OWN_LOOP,
    "refused: the momentum is set from the batch": OWN_LOOP,
    "refused: a sampler whose distribution is not known": OWN_OPTION,
    "the divisor is public": OWN_OPTION,
    "the optimizer built first is private or refuses": OWN_STEP,
    "twenty records at rate 1/20 make twenty steps, the empty ones of noise alone": BESIDE,
    "two forward passes add up before clipping, the first loss first": OWN_STEP,
    "two forward passes add up before clipping, the second loss first": OWN_STEP,
    "two losses of one forward pass add up before clipping": OWN_STEP,
}
# The stock Trainer puts the whole model into training mode at every step, so that this one is refused there.
NEEDS_EVALUATION_MODE = "batch normalization in evaluation mode is exact and keeps its buffers"
PAIRS = [
    pytest.param(kind, name, id=f"{kind.name}: {name}", marks=() if name in QUICK else pytest.mark.slow)
    for kind in NEEDS
    for name in CASES
    if name not in CANNOT_BE_SAID
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_case_comes_out_as_it_should(kind, name):
    for library in NEEDS[kind]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    found = CASES[name].run(kind())
    if kind is ByHuggingFace and name == NEEDS_EVALUATION_MODE:
        assert found.verdict == "refused"
        return
    assert found.passed, found
    assert found.verdict in ({"refused"} if CASES[name].expects == "refusal" else {"right", "refused"}), found


@pytest.mark.parametrize("kind", NEEDS)
def test_what_cannot_be_said_is_listed_by_name(kind):
    assert set(CANNOT_BE_SAID) <= set(CASES)
    for name in CANNOT_BE_SAID:
        assert CASES[name].run(kind()).verdict == "not offered", name
    assert set(CASES) >= QUICK
