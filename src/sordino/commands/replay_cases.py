"""The public paths of this library, as pipelines for `sordino audit replay`: training, engine, every estimator."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from sordino.randomness import KeyedRNG

Table = tuple[np.ndarray, np.ndarray]
_CLASSES = ("no", "yes", "maybe")
_DECLARED: dict[str, object] = {
    "epsilon": 3.0,
    "delta": 1e-5,
    "data_norm": 2.0,
    "classes": _CLASSES,
    "bounds": (-2.0, 2.0),
    "target_bounds": (-1.0, 3.0),
    "max_iter": 3,
    "n_estimators": 3,
    "dataset_size": 24,
    "batch_size": 12,
    "epochs": 3.0,
    "random_state": 1,
    "reproducible": True,
}
_SEARCH: dict[str, Any] = {name: _DECLARED[name] for name in ("epsilon", "delta", "random_state", "reproducible")}
_METHODS: dict[str, tuple[str, ...]] = {
    "LogisticRegression": ("objective", "output", "dp-gd", "dp-sgd"),
    "LinearSVC": ("objective", "output"),
    "LinearRegression": ("objective", "output", "adassp", "sufficient-statistics"),
    "Ridge": ("adassp", "sufficient-statistics"),
}
# One takes another estimator and a grid and has a case of its own; the other learns nothing.
_APART = {"MinMaxScaler", "PrivateGridSearch"}


@dataclass(frozen=True, kw_only=True)
class ReplayCase:
    """One pipeline with data made for it.

    Args:
        name: of the path.
        pipeline: (features [n, 3], labels [n] of 0, 1, 2) ↦ all that is released.
        data: D.
        neighbors: D with one record more or less, among them a huge and a broken one.
    """

    name: str
    pipeline: Callable[[Table], object]
    data: Table
    neighbors: tuple[Table, ...]


def cases() -> Iterable[ReplayCase]:
    """Every public path, estimators by discovery."""
    import sordino.estimators as room

    data = _synthetic(24)
    neighbors = tuple(_neighbors(data))
    pipelines: dict[str, Callable[[Table], object]] = {
        **{name: partial(_trained, **options) for name, options in _fits().items()},
        "evaluation on private records": _evaluated,
        "engine": _engine,
        "PrivateGridSearch": _grid_search,
        "PrivateGridSearch, pipeline": _pipeline_search,
        "PrivateRandomSearch": _random_search,
        "describe": _described,
        **{f"TableSynthesizer, {method}": _synthesizer(method) for method in ("aim", "mst", "independent")},
    }
    for name in room.__all__:
        if name not in _APART:
            for method in _METHODS.get(name, (None,)):
                label = name if method is None else f"{name}, {method}"
                pipelines[label] = _estimator(getattr(room, name), method)
    for name, pipeline in pipelines.items():
        yield ReplayCase(name=name, pipeline=pipeline, data=data, neighbors=neighbors)


def _synthetic(count: int) -> Table:
    stream = KeyedRNG(seed=5, reproducible=True).stream("replay cases", step=0)
    features = 2 * stream.uniform(3 * count).reshape(count, 3) - 1
    return features, (stream.integers64(count) % np.uint64(3)).astype(np.int64)


def _neighbors(data: Table) -> Iterable[Table]:
    features, labels = data
    for row in ([0.3, -0.9, 0.1], [1e30, -1e30, 1e30], [np.nan, 0.0, 0.0]):
        yield np.vstack([features, row]), np.append(labels, 1)
    # The last record: the positions of all others stay.
    yield features[:-1], labels[:-1]


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────


def _network():
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def _tensors(table: Table):
    import torch

    return torch.from_numpy(table[0]).float(), torch.from_numpy(table[1])


def _trained(table: Table, **options: object) -> object:
    import torch
    from torch.nn import functional as F

    from sordino.training.fit import fit
    from sordino.training.plan import Plan

    given = {"noise_multiplier": 1.5, "max_grad_norm": 0.7, "sample_rate": 0.5, "steps": 6, "delta": 1e-5}
    plan = Plan(**(given | {"expected_batch_size": 12.0} | options))  # pyright: ignore[reportArgumentType]

    def losses(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    key = KeyedRNG(seed=2, reproducible=True)
    result = fit(_network(), losses, _tensors(table), plan, rng=key, progress=False)
    return result.model, result.guarantee, result.released_losses


def _fits() -> dict[str, dict[str, object]]:
    """Options of the plans that `fit` follows."""
    from sordino.clipping import QuantileClipping
    from sordino.mechanisms.correlated import CyclicPoisson, optimize_banded
    from sordino.training.correlated_noise import CorrelatedNoise
    from sordino.training.noisy_releases import LossRelease

    noise = CorrelatedNoise(
        strategy=optimize_banded(2, steps=6), participation=CyclicPoisson(groups=2, sample_rate=0.5)
    )
    return {
        "fit": {},
        "fit, correlated noise": {"correlated_noise": noise},
        "fit, secure noise": {"secure_mode": True},
        "fit, bounds at a quantile": {"clipping": QuantileClipping(count_noise=4.0)},
        "fit, a loss curve": {"loss_release": LossRelease(max_loss=1.5, budget_fraction=0.2)},
        "fit, a loss curve and bounds at a quantile": {
            "loss_release": LossRelease(max_loss=1.5),
            "clipping": QuantileClipping(count_noise=6.0),
        },
    }


def _evaluated(table: Table) -> object:
    from sordino.report import measure_private_utility

    def predictions() -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
        scores = np.abs(table[0]) + 0.1
        with np.errstate(all="ignore"):
            chances = scores / scores.sum(axis=1, keepdims=True)
        return chances, table[1], {"sign": ["+" if row[0] > 0 else "-" for row in table[0]]}

    key = KeyedRNG(seed=4, reproducible=True)
    return measure_private_utility(predictions, classes=_CLASSES, groups={"sign": ("+", "-")}, epsilon=1.0, rng=key)


def _engine(table: Table) -> object:
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from sordino.training.engine import PrivacyEngine

    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = PrivacyEngine(seed=3, reproducible=True)
    # The dataset's size is declared: the loader of every neighbor asks for the same rate and batch.
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(*_tensors(table)), batch_size=12),
        noise_multiplier=1.5,
        max_grad_norm=0.7,
        sample_rate=0.5,
        expected_batch_size=12.0,
    )
    for _ in range(2):
        for batch in loader:
            x, y = cast("Sequence[torch.Tensor]", batch)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    engine.detach()
    return dict(model.state_dict())


# ── estimators ──────────────────────────────────────────────────────────────────────────────────────────────


def _estimator(kind: type, method: str | None) -> Callable[[Table], object]:
    names = kind().get_params()
    given = {key: value for key, value in _DECLARED.items() if key in names}
    given |= {} if method is None else {"method": method}
    if "module" in names:
        given["module"] = _network_of

    def pipeline(table: Table) -> object:
        features, labels = table
        targets = np.array(_CLASSES)[labels] if "classes" in names else np.array([-1.0, 0.7, 3.0])[labels]
        fitted = kind(**given).fit(features, targets)
        return {name: value for name, value in vars(fitted).items() if name.endswith("_")}

    return pipeline


def _searched() -> tuple[Any, dict[str, list[object]]]:
    """An estimator and settings to choose from."""
    from sordino.estimators import GaussianNB

    return GaussianNB(bounds=(-2.0, 2.0), classes=_CLASSES), {"bounds": [(-2.0, 2.0), (-1.0, 1.0)]}


def _grid_search(table: Table) -> object:
    from sordino.estimators import PrivateGridSearch

    found = PrivateGridSearch(*_searched(), **_SEARCH).fit(table[0], np.array(_CLASSES)[table[1]])
    return found.best_params_, vars(found.best_estimator_)["events_"]


def _pipeline_search(table: Table) -> object:
    from sklearn.pipeline import Pipeline

    from sordino.estimators import PCA, GaussianNB, PrivateGridSearch, StandardScaler

    pipeline = Pipeline(
        [
            ("scale", StandardScaler(bounds=(-2.0, 2.0))),
            ("pca", PCA(2, data_norm=2.0)),
            ("model", GaussianNB(bounds=(-2.0, 2.0), classes=_CLASSES)),
        ]
    )
    search = PrivateGridSearch(pipeline, {"pca": [PCA(1, data_norm=2.0), "passthrough"]}, **_SEARCH)
    found = search.fit(table[0], np.array(_CLASSES)[table[1]])
    return found.best_index_, found.best_estimator_.named_steps["model"].theta_


def _random_search(table: Table) -> object:
    from sordino.tuning import PrivateRandomSearch

    found = PrivateRandomSearch(*_searched(), mean=3.0, **_SEARCH).fit(table[0], np.array(_CLASSES)[table[1]])
    return found.best_params_


def _schema():
    from sordino.data import CategoricalColumn, NumericColumn, Schema

    columns = (
        NumericColumn(name="a", low=-1.0, high=1.0),
        NumericColumn(name="b", low=-1.0, high=0.5),
        CategoricalColumn(name="sign", categories=("-", "+")),
    )
    return Schema(columns=columns, target="y", labels=_CLASSES[:2])


def _columns(table: Table) -> dict[str, object]:
    features, labels = table
    signs = ["+" if value > 0 else "-" if value > -0.5 else "" for value in features[:, 2].tolist()]
    return {"a": features[:, 0], "b": features[:, 1], "sign": signs, "y": np.array(_CLASSES)[labels]}


def _synthesizer(method: str) -> Callable[[Table], object]:
    def pipeline(table: Table) -> object:
        from sordino.synthesis import TableSynthesizer

        fitted = TableSynthesizer(schema=_schema(), method=method, bins=2, **_SEARCH).fit(_columns(table))
        return fitted.measured_, fitted.releases_, fitted.sample(10).to_pydict()

    return pipeline


def _described(table: Table) -> object:
    from sordino.description import TableDescriber

    describer = TableDescriber(schema=_schema(), bins=2, cross=(("a", "sign"), ("y", "b")), **_SEARCH)
    return describer.fit(_columns(table)).description_


def _network_of(columns: int, outputs: int):
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(columns, outputs)
