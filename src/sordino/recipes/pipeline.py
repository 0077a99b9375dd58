"""A pipeline (floor 6): everything from raw records to a model, on one bill and in one run folder.

Preprocessing that looks at records (components, a covariance) and training are stages of one composition: what they
cost together is known before a record is read, is charged to the ledger once, and every charge is a line of one
transcript, so that `sordino report` and `sordino verify` speak about the whole.

How to add one: a file in this room with a function and a `Pipeline`, and a line in `pipelines.py`. ::

    def _prepare(task: Task) -> Prepared:          # public facts only; no record is here yet
        moments = PrivateSecondMoment(...)          # spends a share of task.epsilon
        plan = Plan(...)                            # the rest
        stages = (
            Stage(name="covariance", charges=(moments.event(),), settings={"share": 0.3}),
            training_stage(plan, settings={"learning_rate": 2.0}),
        )
        return Prepared(stages=stages, fit=lambda records, payment: _fit(...))

    def _fit(..., records: Records, payment: Payment) -> FittedModule:
        payment.charge(moments.event())             # pay, then read
        matrix = PrivateSecondMoment(..., randomness=payment.randomness).release(rows)
        result = fit(model, loss, data, plan, transcript=payment, randomness=payment.randomness,
                     progress=payment.progress)     # pays step by step
        return FittedModule(module=result.model, inputs=...)

    SCATTER = Pipeline(name="scatter", words="…", prepare=_prepare, …)

`Task` and `Prepared` are in `task.py`, `Stage` and `Payment` in `payment.py`, `training_stage` and the models in
`stages.py`. An estimator of `sordino.estimators` is a stage by ``stage = estimator_stage(estimator, columns,
name="…")``; in `fit` call ``pay_for(stage, payment)``, then ``estimator.fit(rows, labels)`` without a ledger of its
own, and return ``FittedEstimator(estimator=…, rows=…)``. A model is anything with `logits` and `tensors`. Import what
the base installation lacks inside functions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sordino import accounting, checks
from sordino.data import DataSet, Records
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event, Nothing, compose
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.recipes.feature_cache import feature_cache
from sordino.recipes.payment import Payment
from sordino.recipes.pipeline_run import begun, ended, facts, seeded
from sordino.recipes.task import Predictor, Prepared, Task
from sordino.wording import sampling_words

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["FittedPipeline", "Pipeline", "Predictor", "Prepared", "Task"]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A recipe from raw records to a private model.

    Guarantee: what `fit` returns, and all it writes, is (ε, δ)-differentially private with the ε and δ of its
    `guarantee`, for one example added or removed (or the relation it names): all stages are composed. The number of
    training records is treated as public. The test records of a data set are not read.

    Args:
        name: as the command line calls it.
        words: what it does, in a line.
        data_sets: named sets that it is meant for.
        prepare: public facts ↦ a pipeline ready for records.
        constants: how its constants were chosen, in a sentence.
        chosen_on: named sets whose validation parts they were chosen on.
        guarantee: what it charges, in words.
        public_inputs: public data or models that it uses beside the records; empty when none.
        settings: names of settings that fix the noise; ε is then what follows.
        needs: what must be installed beside the base, as the user types it; empty for nothing.
        reads_texts: whether records must hold their raw texts: load the data set with ``keep_texts=True``.
    """

    name: str
    words: str
    data_sets: tuple[str, ...]
    prepare: Callable[[Task], Prepared]
    constants: str
    chosen_on: tuple[str, ...]
    guarantee: str
    public_inputs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    needs: str = ""
    reads_texts: bool = False

    def plan(
        self,
        dataset: DataSet,
        *,
        epsilon: float | None = None,
        delta: float,
        setting: str | None = None,
        device: str = "cpu",
    ) -> tuple[Prepared, Guarantee]:
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
                f"data must hold raw texts for recipe {self.name!r}, got none. Load the data set with keep_texts=True."
            )
        population = checks.integer(1, population=len(dataset.train))
        if checks.probability(zero=False, one=False, delta=delta) >= 1 / population:
            raise InvalidArgument(
                f"delta must be below 1 / number of records = {1 / population:.3g}, got {delta!r}. "
                "A larger one would allow the release of whole records."
            )
        task = Task(
            data=dataset.name,
            shape=dataset.train.record_shape,
            classes=len(dataset.labels),
            population=population,
            schema=dataset.schema,
            epsilon=epsilon,
            delta=delta,
            setting=setting,
            device=device,
        )
        prepared = self.prepare(task)
        stated = _guarantee(prepared.event, delta, prepared.relation)
        if epsilon is not None and stated.epsilon > epsilon * (1 + 1e-9):
            raise InvalidArgument(f"stages must cost at most epsilon={epsilon:g} together, got more. Please report it.")
        return prepared, stated

    def fit(
        self,
        dataset: DataSet,
        *,
        epsilon: float | None = None,
        delta: float,
        setting: str | None = None,
        ledger: Account | Reservation | None = None,
        run: str | Path | None = None,
        randomness: Randomness | None = None,
        device: str = "cpu",
        progress: bool = False,
    ) -> "FittedPipeline":
        """Fit to the training records of `dataset`.

        Guarantee: that of the pipeline. The whole is charged to the ledger before a record is read.

        Args:
            dataset: its training records, labels, name and schema; its test records are not read.
            epsilon: the target for everything; never exceeded. None with `setting`.
            delta: δ in (0, 1 / number of records).
            setting: one of `settings` instead of `epsilon`.
            ledger: the data set's account, or a reservation on it.
            run: a new folder for plan, transcript, model and guarantee.
            randomness: fresh; with a chosen seed the guarantee says "not for release".
            device: where to train.
            progress: show steps and time.

        Raises:
            BudgetExceeded: it does not fit what is left of the account; no record was read.
            InvalidArgument: see `plan`.
        """
        randomness = Randomness() if randomness is None else randomness
        prepared, stated = self.plan(dataset, epsilon=epsilon, delta=delta, setting=setting, device=device)
        receipt = None
        if ledger is not None:
            note = f"recipe {self.name}"
            receipt = ledger.charge(prepared.event, note=note, relation=prepared.relation).digest
        folder = None
        if run is not None:
            told = {"recipe": self.name, "setting": setting, **prepared.training}
            told["stages"] = "; ".join(stage.words for stage in prepared.stages)
            meta = facts(
                dataset,
                training=told,
                stages=[stage.name for stage in prepared.stages],
                constants=self.constants,
                chosen_on=self.chosen_on,
                public_inputs=self.public_inputs,
            )
            meta |= {"target_epsilon": epsilon, "reproducible": randomness.reproducible}
            folder = begun(Path(run), self._plan(prepared, stated), meta, prepared.charges, randomness)
        payment = Payment(
            prepared.charges,
            randomness=randomness,
            progress=progress,
            run=folder,
            receipt=receipt,
            epsilon=stated.epsilon,
        )
        with ended(folder), seeded(randomness), feature_cache():
            model = prepared.fit(dataset.train, payment)
            guarantee = _guarantee(payment.event, delta, prepared.relation, seeded=randomness.reproducible)
            if folder is not None:
                folder.save_model(model.tensors())
                folder.write_guarantee(guarantee)
        return FittedPipeline(
            pipeline=self.name,
            model=model,
            guarantee=guarantee,
            events=payment.events,
            complete=payment.complete,
            run=None if folder is None else folder.path,
        )

    def _plan(self, prepared: Prepared, stated: Guarantee) -> str:
        # One training is told in its own words, which reports know; of several stages no one speaks for the run.
        alone = prepared.stages[0].settings.get("plan") if len(prepared.stages) == 1 else None
        body = {
            **(alone if isinstance(alone, dict) else {}),
            "schema": 1,
            "recipe": self.name,
            "stages": [stage.to_dict() for stage in prepared.stages],
            "steps": len(prepared.charges),
            "delta": stated.delta,
            "neighboring_relation": prepared.relation.value,
            "privacy_unit": stated.unit.value,
            "dataset_size_is_public": True,
            "public_inputs": list(self.public_inputs),
        }
        return json.dumps(body, indent=2, allow_nan=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedPipeline:
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
        scores = self.model.logits(records).astype(np.float64)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        return powers / powers.sum(axis=1, keepdims=True)

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
        event = compose([event for event in self.events if not isinstance(event, Nothing)])
        relation = self.guarantee.relation
        return accounting.epsilon(event, self.guarantee.delta, relation=relation, accountant=accountant).upper


def _guarantee(event: Event, delta: float, relation: NeighboringRelation, *, seeded: bool = False) -> Guarantee:
    spent = accounting.epsilon(event, delta, relation=relation)
    caveats = ("the size of the data set is treated as public",)
    return Guarantee(
        epsilon=spent.upper,
        delta=delta,
        accountant=spent.accountant,
        sampler=sampling_words(event),
        relation=relation,
        caveats=(*caveats, FIXED_SEED) if seeded else caveats,
    )
