"""Events in words (floor 0, on top of the events): what a guarantee says about how batches were drawn."""

from dataclasses import fields

from sordino.events import (
    Composed,
    Event,
    FixedSizeSampled,
    GaussianMixture,
    NoPrivacy,
    Nothing,
    Parallel,
    PoissonSampled,
    SelfComposed,
    ShuffledEpochs,
)

__all__ = ["sampling_words"]


def sampling_words(event: Event) -> str:
    """How the batches of an event were drawn, as it is written in a guarantee; "none" when no data were touched.

    Example:
        >>> from sordino.events import Gaussian
        >>> sampling_words(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))
        'Poisson sampling at rate 0.01'
    """
    return " and ".join(dict.fromkeys(_samplings(event))) or "none"


def _samplings(event: Event) -> list[str]:
    match event:
        case Nothing() | NoPrivacy():
            return []
        case SelfComposed():
            return _samplings(event.event) if event.count else []
        case Composed() | Parallel():
            return [words for part in event.events for words in _samplings(part)]
        case PoissonSampled():
            return [f"Poisson sampling at rate {event.sample_rate:.6g}"]
        case FixedSizeSampled():
            return [f"fixed-size batches of {event.size} out of {event.population}"]
        case GaussianMixture():
            return ["random participation as stated"]
        case ShuffledEpochs():
            return ["shuffled epochs without amplification"]
    if any(isinstance(getattr(event, item.name), Event) for item in fields(event)):
        # Some other way of sampling an inner event: named as its JSON names it.
        return [event.kind.replace("_", " ")]
    return ["full batches"]
