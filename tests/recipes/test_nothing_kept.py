"""What a pipeline returns and writes holds nothing of single records, nor of their features."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from leftovers import RECORDS, found_in, found_in_folder, leaves, marked
from sordino.data import DatasetSplits, Records
from sordino.data.readers import ADULT_SCHEMA
from sordino.errors import DataUnavailable
from sordino.recipes import RECIPES, Recipe, feature_cache, get_recipe, network_recipes
from sordino.recipes.models import wide_resnet
from sordino.recipes.recipe import once_a_block
from sordino.recipes.transfer_recipes import CachedFeatures, Head, whitened_head

# What takes minutes even on few records.
SLOW = {"efficientnet", "lora", "patches", "scatter", "tanh-cnn", "wrn", "wrn-fast"}


def records_for(name):
    pipeline = get_recipe(name)
    first = pipeline.data_sets[0]
    shape = {"adult": (104,), "imdb": (4096,), "cifar10": (3, 32, 32)}.get(first, (1, 28, 28))
    rows = np.abs(marked(int(np.prod(shape)), seed=5)).reshape(RECORDS, *shape)
    texts = tuple(f"review {k} says Zq{k:03d}x about a film" for k in range(RECORDS)) if pipeline.reads_texts else None
    classes = 10 if len(shape) == 3 else 2
    labels = np.arange(RECORDS) % classes
    data = DatasetSplits(
        name="mine",
        train=Records(rows, labels, texts),
        test=None,
        labels=tuple(map(str, range(classes))),
        public=False,
        source="made up",
        license="none",
        schema=ADULT_SCHEMA if first == "adult" else None,
    )
    return pipeline, data, [f"Zq{k:03d}x" for k in range(RECORDS)] if texts else []


@pytest.fixture
def small_networks(monkeypatch):
    """Recipes for a GPU take two steps with a small network: theirs take up to 2500, with 10 GB of memory and more."""
    whole = network_recipes.build_network

    def build_network(**_):
        return replace(whole(steps=2, views=2, microbatch=64), build=partial(wide_resnet, depth=10, width=1))

    monkeypatch.setattr(network_recipes, "build_network", build_network)


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RECIPES])
def test_a_fitted_pipeline_holds_no_record(name, tmp_path):
    pipeline, data, texts = records_for(name)
    try:
        fitted = pipeline.fit(data, epsilon=8.0, delta=1e-3, run_folder=tmp_path / "run")
    except DataUnavailable as refusal:
        pytest.skip(str(refusal))
    fitted.predict(data.train)
    rows = data.train.features
    assert found_in(fitted, rows, texts) == []
    assert found_in_folder(tmp_path, rows, texts) == []
    gone = weakref.ref(data.train)
    del data
    gc.collect()
    assert gone() is None, "the records themselves are kept somewhere"


class Means:
    """A frozen public model of a test."""

    def __call__(self, records):
        return torch.from_numpy(records.features).mean((2, 3)) + 0.1


def head_alone():
    """A pipeline with a private head on the features of a frozen model."""
    return Recipe(
        name="head",
        description="head",
        data_sets=("mine",),
        prepare=lambda task: whitened_head(
            task, Head(), columns=3, rows=lambda: CachedFeatures(Means(), settings="means"), model="means"
        ),
        constants="none",
        chosen_on=(),
        guarantee="all of it",
    )


def test_a_fitted_head_on_a_frozen_model_holds_no_features(tmp_path, monkeypatch):
    monkeypatch.delenv("SORDINO_FEATURES", raising=False)
    _, data, _ = records_for("patches")
    fitted = head_alone().fit(data, epsilon=8.0, delta=1e-3, run_folder=tmp_path / "run")
    fitted.predict(data.train)
    features = data.train.features.mean(axis=(2, 3)) + np.float32(0.1)
    half = features.astype(np.float16)
    for private in (data.train.features, features, half):
        assert found_in(fitted, private) == []
        assert found_in_folder(tmp_path, private) == []
    assert not any(row.tobytes() in leaf for row in half for leaf in held_bytes(fitted))


def held_bytes(thing):
    for _, leaf in leaves(thing):
        if isinstance(leaf, np.ndarray):
            yield leaf.tobytes()
        elif isinstance(leaf, bytes):
            yield leaf


def test_features_are_made_once_in_a_block_and_kept_nowhere_else():
    _, data, _ = records_for("patches")
    asked = []
    with feature_cache():
        for _ in range(2):
            once_a_block("rows", data.train, lambda: asked.append("in") or torch.ones(3))
        with feature_cache():
            once_a_block("rows", data.train, lambda: asked.append("in") or torch.ones(3))
            once_a_block("others", data.train, lambda: asked.append("others") or torch.ones(3))
    once_a_block("rows", data.train, lambda: asked.append("after") or torch.ones(3))
    once_a_block("rows", data.train, lambda: asked.append("after") or torch.ones(3))
    assert asked == ["in", "others", "after", "after"]
