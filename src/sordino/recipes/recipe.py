"""A recipe: everything from raw records to a model, in one charge and one run folder.

Preprocessing that looks at records (components, a covariance) and training are stages of one composition: what they
cost together is known before a record is read, is charged to the ledger once, and every charge is a line of one
transcript, so that `sordino report` and `sordino verify` speak about the whole.

How to add one: a file of this package with a function and a `Recipe`, and a line in `RECIPES`. ::

    def _prepare(task: RecipeTask) -> PreparedRecipe:    # public facts only; no record is here yet
        moments = PrivateSecondMoment(...)               # spends a share of task.epsilon
        plan = Plan(...)                                 # the rest
        stages = (
            Stage(name="covariance", charges=(moments.event(),), settings={"share": 0.3}),
            training_stage(plan, settings={"learning_rate": 2.0}),
        )
        return PreparedRecipe(stages=stages, fit=lambda records, payment: _fit(...), training={...})

    def _fit(..., records: Records, payment: StageCharger) -> FittedModule:
        payment.charge(moments.event())                  # charge, then read
        matrix = PrivateSecondMoment(..., rng=payment.rng).release(rows)
        return fitted_module(module, data, payment, plan, optimizer=..., inputs=...)    # charges step by step

    SCATTER = Recipe(name="scatter", description="…", prepare=_prepare, …)

`training_stage`, `fitted_module` and the models are in `stages.py`. An estimator of `sordino.estimators` is a stage by
``stage = estimator_stage(estimator, columns, name="…")``; in `fit` call ``charge_stage(stage, payment)``, then
``estimator.fit(rows, labels)`` without a ledger of its own, and return ``FittedEstimator(estimator=…, rows=…)``. A
model is anything with `logits` and `tensors`. Import what the base installation lacks inside functions.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from scipy.special import softmax

from sordino import accounting, checks
from sordino.data import DatasetSplits, Records
from sordino.data.schema import Schema
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, NoOp, PoissonSampled, compose, describe_sampling, to_dict
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


# ----------------------------------------------------------------------------------------------------------------------
# Features of records, kept for a block of code and never in an object that a fit returns.
#
# Features of a record are as private as the record. They are slow to make and asked for several times in one fit, so
# they are kept while a block runs; the fitted model holds the map from records to features only.
# ----------------------------------------------------------------------------------------------------------------------


_T = TypeVar("_T")
_CACHE: ContextVar[dict[Hashable, Any] | None] = ContextVar("features of records", default=None)


@contextmanager
def feature_cache() -> Iterator[None]:
    """Keep features of records until the block ends: inside it, those of a record are made once.

    When: around several fits or predictions of recipes on the same records. A block within another one shares its
    features. `Recipe.fit` is such a block by itself.

    Example:
        >>> with feature_cache():
        ...     pass  # pipeline.fit(dataset, …), then fitted.accuracy(dataset.test) and fitted.predict(dataset.test)
    """
    if _CACHE.get() is not None:
        yield
        return
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def kept_here(name: Hashable, make: Callable[[], _T]) -> _T:
    """What `make` gave for this name in the open block; made again, and kept nowhere, outside of one."""
    cache = _CACHE.get()
    if cache is None:
        return make()
    if name not in cache:
        cache[name] = make()
    return cache[name]


def once_a_block(name: Hashable, records: Records, make: Callable[[], _T]) -> _T:
    """What `make` gives for this `Records` object, which it depends on alone; made once in a block."""
    made: WeakKeyDictionary[Records, _T] = kept_here(("records", name), WeakKeyDictionary)
    if records not in made:
        made[records] = make()
    return made[records]


# ----------------------------------------------------------------------------------------------------------------------
# How stages of a pipeline are paid for: planned before a record is read, charged one by one, in order.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a pipeline that reads records.

    Args:
        name: what it releases, in a word or two: "components", "covariance", "training".
        charges: one event for each charge, in order; a training has one a step.
        settings: public facts for plan.json: plain JSON types.
    """

    name: str
    charges: tuple[Event, ...]
    settings: Mapping[str, object] = field(default_factory=dict)

    def describe(self) -> str:
        """The stage in a line: how many charges, of what noise.

        Example:
            >>> Stage(name="components", charges=(Gaussian(noise_multiplier=7.0),)).describe()
            'components: 1 charge, noise multiplier 7'
        """
        noises = [noise for event in self.charges if (noise := _noise_multiplier(event)) is not None]
        count = f"{len(self.charges):,} {'charge' if len(self.charges) == 1 else 'charges'}"
        if not noises:
            return f"{self.name}: {count}"
        spread = f"{min(noises):.4g}" if min(noises) == max(noises) else f"{min(noises):.4g} to {max(noises):.4g}"
        return f"{self.name}: {count}, noise multiplier {spread}"

    def to_dict(self) -> dict[str, object]:
        """The stage as JSON types, equal charges in a row counted."""
        return {"name": self.name, "charges": counted(self.charges), "settings": dict(self.settings)}


def _noise_multiplier(event: Event) -> float | None:
    inner = event.event if isinstance(event, PoissonSampled) else event
    return inner.noise_multiplier if isinstance(inner, Gaussian) else None


def counted(events: Sequence[Event]) -> list[dict[str, object]]:
    """Events in order as JSON types, equal ones in a row with their count."""
    return [{"event": to_dict(event), "count": len(list(equal))} for event, equal in groupby(events)]


def _composed(events: Sequence[Event]) -> Event:
    return compose([event for event in events if not isinstance(event, NoOp)])


@dataclass(kw_only=True, eq=False)
class StageCharger:
    """What a pipeline's stages are given to pay with. Charge first, read records then.

    It is a transcript for `sordino.fit`: pass it as ``transcript=``, and every step is charged.

    Guarantee: nothing but the planned events, in their order, can be charged; an unplanned one raises, so a stage
    that pays before it reads can't read more than was planned.

    Args:
        planned: all charges in order.
        rng: the one key of the run; pass it to every stage.
        progress: whether stages may show steps and time.
        run_folder: gets a line for every charge.
        receipt: the ledger's name of the charge that paid for everything.
        epsilon: of everything; it stands in the last line.
    """

    planned: Sequence[Event] = field(kw_only=False)
    rng: KeyedRNG
    progress: bool = False
    run_folder: RunFolder | None = None
    receipt: str | None = None
    epsilon: float | None = None
    _charged: int = field(default=0, init=False)

    def charge(self, event: Event) -> None:
        """Pay for `event`, which is about to happen."""
        number = self._charged
        if number >= len(self.planned) or self.planned[number] != event:
            raise InvalidArgument(
                f"event must be charge {number} of the {len(self.planned)} that were planned, got another one. "
                "A stage charges what `PreparedRecipe.stages` says, in that order."
            )
        self._charged += 1
        if self.run_folder is not None:
            epsilon = self.epsilon if self.complete else None
            self.run_folder.append(step=number, event=event, epsilon=epsilon, charge=self.receipt)

    def append(self, *, step: int, event: Event, epsilon: float) -> None:  # noqa: ARG002 (they count one stage only)
        """What `sordino.fit` calls before each step."""
        self.charge(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """What has been charged, one event a charge."""
        return tuple(self.planned[: self._charged])

    @property
    def event(self) -> Event:
        """The composition of what has been charged."""
        return _composed(self.events)

    @property
    def complete(self) -> bool:
        """Whether all that was planned was charged."""
        return self._charged == len(self.planned)


# ----------------------------------------------------------------------------------------------------------------------
# The run folder around a pipeline's stages, what it says, and the seed.
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _close_at_the_end(folder: RunFolder | None) -> Iterator[None]:
    """Close the folder at the end; after a failure before the first charge nothing is left of it."""
    if folder is None:
        yield
        return
    try:
        yield
    except BaseException:
        folder.close()
        if not any(folder):
            shutil.rmtree(folder.path)
        raise
    folder.close()


@contextlib.contextmanager
def seeded_torch_rng(rng: KeyedRNG) -> Iterator[None]:
    """Initial weights come from torch's generator; a repeatable run repeats them too."""
    if not rng.reproducible or rng.seed is None:
        yield
        return
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed % 2**63)
        yield


# ----------------------------------------------------------------------------------------------------------------------
# What a pipeline knows before it sees a record, and what it makes of that.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecipeTask:
    """What a pipeline knows before it sees a record: public facts and the budget.

    Args:
        data: name of the dataset.
        shape: shape of one record's features.
        classes: number of classes.
        dataset_size: number of training records, treated as public.
        schema: the declared schema of a table, or None.
        epsilon: the target for all stages together; None with a setting that fixes the noise.
        delta: δ of all stages together.
        setting: one of the pipeline's settings, or None.
        device: where to train.
    """

    data: str
    shape: tuple[int, ...]
    classes: int
    dataset_size: int
    schema: Schema | None
    epsilon: float | None
    delta: float
    setting: str | None = None
    device: str = "cpu"

    @property
    def target(self) -> float:
        """The target ε, for pipelines whose settings don't fix the noise."""
        return checks.positive(epsilon=self.epsilon, hint="Give a target.")


class Predictor(Protocol):
    """What a pipeline's `fit` returns: a model of any kind."""

    def logits(self, records: Records) -> "npt.NDArray[np.floating]":
        """Scores of the classes [n, K], whose softmax are probabilities; each record by itself."""
        ...

    def tensors(self) -> "Mapping[str, Tensor]":
        """All that was learned, by name: it is written to the run folder."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRecipe:
    """A pipeline that is ready for records.

    Args:
        stages: what will be charged, in order.
        fit: (training records, payment) ↦ model. It pays before it reads.
        training: public facts for the report: model, optimizer, learning rate and the like.
        neighboring_relation: the neighboring relation of all events.
        restore: what `Predictor.tensors` gave ↦ the model again; reads no record. None for a recipe without.
    """

    stages: tuple[Stage, ...]
    fit: Callable[[Records, StageCharger], Predictor]
    training: Mapping[str, object]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    restore: "Callable[[Mapping[str, Tensor]], Predictor] | None" = None

    @property
    def charges(self) -> tuple[Event, ...]:
        """All charges in order."""
        return tuple(event for stage in self.stages for event in stage.charges)

    @property
    def event(self) -> Event:
        """Their composition."""
        return _composed(self.charges)


# ----------------------------------------------------------------------------------------------------------------------
# A pipeline: everything from raw records to a model, in one charge and one run folder.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe from raw records to a private model.

    Guarantee: what `fit` returns, and all it writes, is (ε, δ)-differentially private with the ε and δ of its
    `guarantee`, for one record added or removed (or the relation it names): all stages are composed. The number of
    training records is treated as public. The test records of a dataset are not read.

    Args:
        name: as the command line calls it.
        description: what it does, in a line.
        data_sets: named sets that it is meant for.
        prepare: public facts ↦ a pipeline ready for records.
        constants: how its constants were chosen, in a sentence.
        chosen_on: named sets whose validation parts they were chosen on.
        guarantee: what it charges, in words.
        public_inputs: public data or models that it uses in addition to the records; empty when none.
        settings: names of settings that fix the noise; ε is then what follows.
        needs: what must be installed in addition to the base, as the user types it; empty for nothing.
        reads_texts: whether records must hold their raw texts: load the dataset with ``keep_texts=True``.
    """

    name: str
    description: str
    data_sets: tuple[str, ...]
    prepare: Callable[[RecipeTask], PreparedRecipe]
    constants: str
    chosen_on: tuple[str, ...]
    guarantee: str
    public_inputs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    needs: str = ""
    reads_texts: bool = False

    def plan(
        self,
        dataset: DatasetSplits,
        *,
        epsilon: float | None = None,
        delta: float,
        setting: str | None = None,
        device: str = "cpu",
    ) -> tuple[PreparedRecipe, Guarantee]:
        """What a fit would do and guarantee; no record is read, and nothing is charged.

        Raises:
            InvalidArgument: an argument outside its range, or records of a form that the pipeline can't take.
        """
        if setting is not None:
            checks.one_of(self.settings, setting=setting)
        if (epsilon is None) == (setting is None):
            raise InvalidArgument("epsilon must be given, or a setting that fixes the noise, not both. Give one.")
        if epsilon is not None:
            checks.positive(epsilon=epsilon)
        if self.reads_texts and dataset.train.texts is None:
            raise InvalidArgument(
                f"data must hold raw texts for recipe {self.name!r}, got none. Load the dataset with keep_texts=True."
            )
        population = checks.integer(1, dataset_size=len(dataset.train))
        if checks.probability(zero=False, one=False, delta=delta) >= 1 / population:
            raise InvalidArgument(
                f"delta must be below 1 / number of records = {1 / population:.3g}, got {delta!r}. "
                "A larger one would allow the release of whole records."
            )
        task = RecipeTask(
            data=dataset.name,
            shape=dataset.train.record_shape,
            classes=dataset.num_classes,
            dataset_size=population,
            schema=dataset.schema,
            epsilon=epsilon,
            delta=delta,
            setting=setting,
            device=device,
        )
        prepared = self.prepare(task)
        stated = _guarantee(prepared.event, delta, prepared.neighboring_relation)
        if epsilon is not None and stated.epsilon > epsilon * (1 + 1e-9):
            raise InvalidArgument(f"stages must cost at most epsilon={epsilon:g} together, got more. Please report it.")
        return prepared, stated

    def fit(
        self,
        dataset: DatasetSplits,
        *,
        epsilon: float | None = None,
        delta: float,
        setting: str | None = None,
        ledger: Account | Reservation | None = None,
        run_folder: str | Path | None = None,
        rng: KeyedRNG | None = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> "FittedRecipe":
        """Fit to the training records of `dataset`.

        Guarantee: that of the pipeline. The whole is charged to the ledger before a record is read.

        Args:
            dataset: its training records, labels, name and schema; its test records are not read.
            epsilon: the target for everything; never exceeded. None with `setting`.
            delta: δ in (0, 1 / number of records).
            setting: one of `settings` instead of `epsilon`.
            ledger: the dataset's account, or a reservation on it.
            run_folder: a new folder for plan, transcript, model and guarantee.
            rng: fresh; with a chosen seed the guarantee says "not for release".
            device: where to train.
            progress: show steps and time.

        Raises:
            BudgetExceeded: it does not fit what is left of the account; no record was read.
            InvalidArgument: see `plan`.
        """
        rng = KeyedRNG() if rng is None else rng
        prepared, stated = self.plan(dataset, epsilon=epsilon, delta=delta, setting=setting, device=device)
        receipt = None
        if ledger is not None:
            note = f"recipe {self.name}"
            receipt = ledger.charge(
                prepared.event, note=note, neighboring_relation=prepared.neighboring_relation
            ).digest
        folder = None
        if run_folder is not None:
            meta = {
                **self._metadata(dataset, prepared, setting),
                "target_epsilon": epsilon,
                "reproducible": rng.reproducible,
            }
            folder = RunFolder.create(Path(run_folder), plan=self._plan(prepared, stated), meta=meta)
            # A torn line counts as one of each kind of charge.
            kinds = dict.fromkeys(event for event in prepared.charges if not isinstance(event, NoOp))
            folder.begin(key=rng.commitment, first_step=0, most=compose(list(kinds)), seeded=rng.reproducible)
        payment = StageCharger(
            prepared.charges,
            rng=rng,
            progress=progress,
            run_folder=folder,
            receipt=receipt,
            epsilon=stated.epsilon,
        )
        with _close_at_the_end(folder), seeded_torch_rng(rng), feature_cache():
            model = prepared.fit(dataset.train, payment)
            guarantee = _guarantee(payment.event, delta, prepared.neighboring_relation, seeded=rng.reproducible)
            if folder is not None:
                folder.save_model(model.tensors())
                facts = {
                    "name": self.name,
                    "setting": setting,
                    "epsilon": epsilon,
                    "delta": delta,
                    "data": dataset.name,
                    "dataset_size": len(dataset.train),
                }
                folder.write_model_description({**dataset.input_facts(), "kind": "recipe", "recipe": facts})
                folder.write_guarantee(guarantee)
        return FittedRecipe(
            pipeline=self.name,
            model=model,
            guarantee=guarantee,
            events=payment.events,
            complete=payment.complete,
            run=None if folder is None else folder.path,
        )

    def _metadata(self, dataset: DatasetSplits, prepared: PreparedRecipe, setting: str | None) -> dict[str, object]:
        """Public facts about the run. No path of this machine is among them."""
        stages = ", ".join(stage.name for stage in prepared.stages)
        return {
            "settings": self.constants,
            "tuned_on_these_data": dataset.public and dataset.name in self.chosen_on,
            "data": {
                "name": dataset.name,
                "records": len(dataset.train),
                "labels": dataset.num_classes,
                "source": dataset.source if dataset.public else "not public",
                "license": dataset.license,
                "public": dataset.public,
                "held_out_every": dataset.held_out_every,
                "public_inputs": ", ".join(self.public_inputs) or "none",
            },
            "training": {
                "recipe": self.name,
                "setting": setting,
                **prepared.training,
                "stages": "; ".join(stage.describe() for stage in prepared.stages),
            },
            "noise_arithmetic": "floating point",
            "data_accesses": {
                "preprocessing": f"Stages of the recipe, each of them charged: {stages}.",
                "normalization": "Each record by itself, or by what a charged stage released.",
                "schema": "The form of the records and the labels are declared, never taken from the records.",
                "early_stopping": "None: steps were fixed in advance.",
                "evaluation": "None by the recipe; what is measured afterwards is measured on public test records.",
                "logging": "No loss, norm or batch size is printed or stored.",
            },
            **({"composition": "The records are public: other uses need not be counted."} if dataset.public else {}),
        }

    def _plan(self, prepared: PreparedRecipe, stated: Guarantee) -> str:
        # One training is described by its own settings, which reports know; of several stages none describes the run.
        alone = prepared.stages[0].settings.get("plan") if len(prepared.stages) == 1 else None
        body = {
            **(alone if isinstance(alone, dict) else {}),
            "schema": 1,
            "recipe": self.name,
            "stages": [stage.to_dict() for stage in prepared.stages],
            "steps": len(prepared.charges),
            "delta": stated.delta,
            "neighboring_relation": prepared.neighboring_relation.value,
            "privacy_unit": stated.privacy_unit.value,
            "dataset_size_is_public": True,
            "public_inputs": list(self.public_inputs),
        }
        return json.dumps(body, indent=2, allow_nan=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedRecipe:
    """A private model with its guarantee.

    Args:
        pipeline: name of the pipeline.
        model: what was learned.
        guarantee: of everything that was learned.
        events: what was charged, one event a charge.
        complete: whether all that was planned was done; Ctrl-C ends a training early.
        run: the run folder, or None.
    """

    pipeline: str
    model: Predictor
    guarantee: Guarantee
    events: tuple[Event, ...]
    complete: bool
    run: Path | None

    def predict_proba(self, records: Records) -> "npt.NDArray[np.float64]":
        """Probabilities of the classes [n, K]."""
        return softmax(self.model.logits(records).astype(np.float64), axis=1)

    def predict(self, records: Records) -> "npt.NDArray[np.int64]":
        """The position of the likeliest class of each record [n]."""
        return self.model.logits(records).argmax(axis=1).astype(np.int64)

    def accuracy(self, records: Records) -> float:
        """Share of records, in [0, 1], that are classified right.

        Guarantee: none beyond the model's: measure on public records.
        """
        checks.integer(1, records=len(records))
        return float(np.mean(self.predict(records) == records.labels))

    def epsilon_under(self, accountant: str) -> float:
        """ε of the same events by another accountant."""
        return accounting.epsilon(
            _composed(self.events),
            self.guarantee.delta,
            neighboring_relation=self.guarantee.neighboring_relation,
            accountant=accountant,
        ).upper


def _guarantee(
    event: Event, delta: float, neighboring_relation: NeighboringRelation, *, seeded: bool = False
) -> Guarantee:
    spent = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
    caveats = ("the size of the dataset is treated as public",)
    return Guarantee(
        epsilon=spent.upper,
        delta=delta,
        accountant=spent.accountant,
        sampler=describe_sampling(event),
        neighboring_relation=neighboring_relation,
        caveats=(*caveats, FIXED_SEED_CAVEAT) if seeded else caveats,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The pipelines by name, one line each. A module is imported when its pipeline is asked for.
#
# Modules of pipelines import what the base installation lacks inside functions, so that every pipeline can be listed.
# ----------------------------------------------------------------------------------------------------------------------


RECIPES: Mapping[str, str] = {
    "adult-logistic": "sordino.recipes.network_recipes:ADULT_LOGISTIC",
    "adult-mlp": "sordino.recipes.network_recipes:ADULT_MLP",
    "efficientnet": "sordino.recipes.transfer_recipes:EFFICIENTNET",
    "efficientnet-small": "sordino.recipes.transfer_recipes:EFFICIENTNET_SMALL",
    "hashed-words": "sordino.recipes.text_recipes:HASHED_WORDS",
    "logistic-pixels": "sordino.recipes.network_recipes:LOGISTIC_PIXELS",
    "logistic-sgd": "sordino.recipes.network_recipes:LOGISTIC_SGD",
    "lora": "sordino.recipes.text_recipes:LORA",
    "minilm": "sordino.recipes.text_recipes:MINILM",
    "patches": "sordino.recipes.scattering_recipes:PATCHES",
    "pca-mlp": "sordino.recipes.network_recipes:PCA_MLP",
    "scatter": "sordino.recipes.scattering_recipes:SCATTER",
    "scatter-sgd": "sordino.recipes.scattering_recipes:SCATTER_SGD",
    "tanh-cnn": "sordino.recipes.network_recipes:TANH_CNN",
    "wrn": "sordino.recipes.network_recipes:WRN",
    "wrn-fast": "sordino.recipes.network_recipes:WRN_FAST",
}
"""Names, and where the pipelines are: ``module:NAME``."""


def get_recipe(name: str) -> Recipe:
    """The pipeline of this name.

    Raises:
        InvalidArgument: there is none.

    Example:
        >>> get_recipe("pca-mlp").public_inputs
        ()
    """
    checks.one_of(RECIPES, recipe=name)
    module, _, attribute = RECIPES[name].partition(":")
    pipeline = getattr(import_module(module), attribute)
    assert isinstance(pipeline, Recipe)
    assert pipeline.name == name
    return pipeline
