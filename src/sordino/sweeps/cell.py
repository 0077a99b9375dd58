"""One cell of a sweep: data, settings, plan, and what that guarantees; all of it is known before any data (floor 6)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from sordino import accounting
from sordino.clipping import Clipping, ProjectedClipping, QuantileClipping, clipping_called
from sordino.data import DataSet, Records, load
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, compose
from sordino.sweeps.settings import Settings, Value
from sordino.training import Plan

__all__ = ["Cell", "DataSource", "canonical", "ignores"]

_FORMAT = 1
_NOISE = ("noise_multiplier", "target_epsilon")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """The public data of a sweep, by name; nothing is read before `load`.

    Args:
        name: a named set, or the path of a file that was declared public.
        records: how many training records are used, the first ones of the set.
        test: path of a test file, for a file.
        schema: path of its schema, for a file.
    """

    name: str
    records: int
    test: str | None = None
    schema: str | None = None

    def load(self) -> DataSet:
        """The records; sweeps exist for public data alone, so the set is marked public."""
        schema = None if self.schema is None else Path(self.schema)
        dataset = load(self.name, schema=schema, test=self.test)
        if dataset.test is None or not len(dataset.test):
            raise InvalidArgument("test must be declared: a file of the same form to measure on. Add it to [data].")
        if len(dataset.train) < self.records:
            raise InvalidArgument(
                f"records must be at most the {len(dataset.train)} training records, got {self.records}. Lower it."
            )
        train = dataset.train
        kept = Records(features=train.features[: self.records], labels=train.labels[: self.records])
        return replace(dataset, train=kept, public=True)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: where its numbers come from is all in `settings`, and `key` tells two cells apart.

    Args:
        settings: everything that is trained.
        source: the data.
        told: what the grid says of this cell, for a reader.
        values: everything that the file says of it, as it is written there.
    """

    settings: Settings
    source: DataSource
    told: Mapping[str, Value]
    values: Mapping[str, Value]

    @cached_property
    def key(self) -> str:
        """A fingerprint of data and settings: a cell that was changed has another one and is run anew."""
        body = {"format": _FORMAT, "data": asdict(self.source), "settings": asdict(self.settings)}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def words(self) -> str:
        """What the grid says of the cell."""
        return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in self.told.items())

    @property
    def is_private(self) -> bool:
        """Whether a guarantee stands behind the cell: there is clipping and there is noise."""
        return self.settings.arm == "private"

    @cached_property
    def plan(self) -> Plan:
        """The plan. Without noise its noise multiplier is 0; without clipping it only says how much noise there is."""
        told = self.settings
        draft = Plan(
            noise_multiplier=told.noise_multiplier or 0.0,
            max_grad_norm=told.max_grad_norm,
            sample_rate=told.batch_size / self.source.records,
            steps=told.steps,
            expected_batch_size=told.batch_size,
            delta=told.delta,
            dataset_size_is_public=True,
            clipping=_clipping(told, 0.0),
        )
        if told.arm in ("neither", "clipping without noise") or told.target_epsilon is None:
            return replace(draft, clipping=_clipping(told, told.noise_multiplier or 0.0))
        multiplier = accounting.calibrate_noise_multiplier(
            lambda noise: self._with(replace(draft, noise_multiplier=noise).event()),
            target_epsilon=told.target_epsilon,
            target_delta=told.delta,
            relation=draft.neighboring_relation,
        )
        return replace(draft, noise_multiplier=multiplier, clipping=_clipping(told, multiplier))

    @property
    def pca_event(self) -> Event | None:
        """What the private components cost, or None."""
        return Gaussian(noise_multiplier=self.settings.pca_noise_multiplier) if self.settings.pca else None

    def _with(self, event: Event) -> Event:
        return event if self.pca_event is None else compose([self.pca_event, event])

    def event(self, steps: int | None = None) -> Event:
        """Components and the first `steps` steps, or all of them."""
        return self._with(self.plan.event(steps))

    def guarantee(self, steps: int | None = None) -> Guarantee | None:
        """What the cell would guarantee on private records if its settings were fixed beforehand; None: nothing."""
        if not self.is_private:
            return None
        found = self.plan.guarantee(steps=steps)
        if self.pca_event is None:
            return found
        spent = accounting.epsilon(self.event(steps), found.delta, relation=found.relation)
        return replace(found, epsilon=spent.upper, accountant=spent.accountant)

    @cached_property
    def epsilon(self) -> float | None:
        """ε of the cell, or None where nothing is guaranteed."""
        found = self.guarantee()
        return None if found is None else found.epsilon

    def value(self, name: str) -> Value | None:
        """The cell's value on an axis; None where the axis means nothing to it."""
        told = self.settings
        if ignores(told, name):
            return None
        if name in ("epochs", "decay_epochs", "recipe"):
            return self.values.get(name)
        if name == "noise_multiplier":
            return float(self.plan.at(0).noise_multiplier)
        found: Value | None = getattr(told, name)
        return found


def ignores(settings: Settings, name: str) -> bool:
    """Whether the setting `name` has no part in what is trained."""
    match settings.arm:
        case "neither":
            return name in (*_NOISE, "max_grad_norm", "clipping", "projections", "quantile")
        case "clipping without noise":
            return name in _NOISE
        case "noise without clipping":
            return name in ("clipping", "projections", "quantile")
        case _:
            return False


def canonical(settings: Settings) -> Settings:
    """The settings with everything that has no part set to its default, so that equal trainings are one cell."""
    defaults = {
        "noise_multiplier": None,
        "target_epsilon": None,
        "max_grad_norm": 1.0,
        "clipping": "flat",
        "projections": 0,
        "quantile": 0.5,
    }
    return replace(settings, **{name: value for name, value in defaults.items() if ignores(settings, name)})


def _clipping(told: Settings, noise_multiplier: float) -> Clipping:
    if told.projections:
        return ProjectedClipping(projections=told.projections)
    if told.clipping == "quantile":
        # A twentieth of the batch is usual; the counts may not cost more than the gradient.
        count_noise = max(told.batch_size / 20, noise_multiplier)
        return QuantileClipping(quantile=told.quantile, count_noise=count_noise)
    return clipping_called(told.clipping)


def _shown(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
