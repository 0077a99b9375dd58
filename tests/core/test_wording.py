import pytest

from sordino.events import (
    Composed,
    Gaussian,
    NonPrivate,
    NoOp,
    PoissonSampled,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    ShuffledEpochs,
    describe_sampling,
)

NOISE = Gaussian(noise_multiplier=1.0)
POISSON = PoissonSampled(sample_rate=0.01, event=NOISE)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (NoOp(), "none"),
        (NonPrivate(reason="x"), "none"),
        (SelfComposed(event=POISSON, count=0), "none"),
        (NOISE, "full batches"),
        (POISSON, "Poisson sampling at rate 0.01"),
        (SelfComposed(event=POISSON, count=9), "Poisson sampling at rate 0.01"),
        (SampledWithoutReplacement(dataset_size=10, sample_size=2, event=NOISE), "fixed-size batches of 2 out of 10"),
        (ShuffledEpochs(epochs=1, steps_per_epoch=2, event=NOISE), "shuffled epochs without amplification"),
        (SampledWithReplacement(dataset_size=10, sample_size=2, event=NOISE), "sampled with replacement"),
        (Composed(events=(POISSON, NOISE, POISSON)), "Poisson sampling at rate 0.01 and full batches"),
    ],
)
def test_every_way_of_sampling_has_its_words(event, words):
    assert describe_sampling(event) == words
