"""Events are plain, frozen, and survive JSON."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InvalidArgument
from sordino.events import (
    Composed,
    Gaussian,
    Laplace,
    NonPrivate,
    NoOp,
    PoissonSampled,
    SampledWithoutReplacement,
    SelfComposed,
    compose,
    from_dict,
    from_json,
    to_dict,
    to_json,
)

noise = st.floats(0, 1e6)
base_events = st.one_of(
    st.builds(Gaussian, noise_multiplier=noise),
    st.builds(Laplace, noise_multiplier=noise),
    st.just(NoOp()),
    st.builds(NonPrivate, reason=st.text(max_size=5)),
)
all_events = st.recursive(
    base_events,
    lambda inner: st.one_of(
        st.builds(PoissonSampled, sample_rate=st.floats(0, 1), event=inner),
        st.builds(SampledWithoutReplacement, dataset_size=st.just(10), sample_size=st.integers(0, 10), event=inner),
        st.builds(SelfComposed, event=inner, count=st.integers(0, 10**7)),
        st.lists(inner, max_size=3).map(lambda parts: Composed(events=tuple(parts))),
    ),
    max_leaves=5,
)


@given(all_events)
def test_json_gives_the_same_event_back(event):
    assert from_json(to_json(event)) == event
    assert from_dict(to_dict(event)) == event
    assert "\n" not in to_json(event)


@given(st.lists(base_events, max_size=6))
def test_compose_keeps_every_event_in_order(parts):
    whole = compose(parts)
    items = whole.events if isinstance(whole, Composed) else (whole,)
    unfolded = []
    for item in items:
        unfolded += [item.event] * item.count if isinstance(item, SelfComposed) else [item]
    assert unfolded == (parts or [NoOp()])


def test_events_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gaussian(noise_multiplier=1.0).noise_multiplier = 2.0


@pytest.mark.parametrize(
    "build",
    [
        lambda: Gaussian(noise_multiplier=float("nan")),
        lambda: Gaussian(noise_multiplier=-1.0),
        lambda: Laplace(noise_multiplier=float("inf")),
        lambda: PoissonSampled(sample_rate=1.5, event=NoOp()),
        lambda: PoissonSampled(sample_rate=float("nan"), event=NoOp()),
        lambda: SelfComposed(event=NoOp(), count=-1),
        lambda: SelfComposed(event=NoOp(), count=1.0),
        lambda: SampledWithoutReplacement(dataset_size=3, sample_size=4, event=NoOp()),
    ],
)
def test_impossible_events_are_refused(build):
    with pytest.raises(InvalidArgument):
        build()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"kind": "unheard_of"}',
        '{"kind": "gaussian"}',
        '{"kind": "gaussian", "noise_multiplier": 1.0, "sigma": 2.0}',
        '{"kind": "gaussian", "noise_multiplier": -1.0}',
    ],
)
def test_malformed_json_is_refused(text):
    with pytest.raises(InvalidArgument):
        from_json(text)
