"""One model under an engine (floor 3): its session, its meter, its budget; what a checkpoint keeps of them."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sordino import accounting
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnprivateStep
from sordino.events import Nothing
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.training.bills.adaptive import KEPT, AdaptiveRun, Admitted
from sordino.training.bills.charges import Charges
from sordino.training.bills.meter import Meter
from sordino.training.bills.target import EpsilonTarget
from sordino.training.drop_in.journal import Journal
from sordino.training.drop_in.module_fields import ModuleFields
from sordino.training.drop_in.optimizer_fields import OptimizerFields
from sordino.training.drop_in.proving import set_probe
from sordino.training.drop_in.session import Session
from sordino.training.drop_in.trainable import check_trainable
from sordino.training.fitting.display import DIAGNOSED
from sordino.training.loops.criterion import Criterion
from sordino.training.performance import Performance
from sordino.training.plan import Plan
from sordino.training.probing.probe import ProbeSize
from sordino.training.processes.ranks import Ranks, inner, ranks_here, shapes_of
from sordino.training.records.loader import PrivateLoader, population_of
from sordino.training.records.sizes import batch_bound, largest_batch, substitutes
from sordino.training.records.units import Units
from sordino.wording import sampling_words

__all__ = ["Attached", "Loop", "claim_of"]


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What an engine keeps of one `make_private`.

    Args:
        number: which call it was, from 0.
        plan: of the model.
        session: turns the user's steps into private ones.
        meter: charges and numbers the batches.
        adaptive: the budget that chooses each step's values, or None.
        fields: what the optimizer shows of the coming step, and what the module has of other engines' modules.
    """

    number: int
    plan: Plan
    session: Session
    meter: Meter
    adaptive: AdaptiveRun | None
    fields: tuple[OptimizerFields, ModuleFields]

    def detach(self) -> None:
        """Give module and optimizer back as they were."""
        for fields in self.fields:
            fields.remove()
        self.session.detach()

    def facts(self) -> dict[str, object]:
        """Where the model stands, in plain JSON types: which it is, its next step, its budget."""
        stream = self.session.step.next_noise
        return {
            "number": self.number,
            "next_step": self.meter.reached if stream is None else stream,
            "budget": None if self.adaptive is None else self.adaptive.facts(),
        }

    def state(self) -> dict[str, object]:
        """What later steps need of earlier ones: adapted bounds, buffers of correlated noise, the last norm.

        The buffers are secret: with the released gradients they give the clipped sums away.
        """
        return {
            "step": self.session.step.state(),
            "adaptive": None if self.adaptive is None else self.adaptive.state(),
        }

    def check(self, facts: Mapping[str, object]) -> None:
        """Refuse a checkpoint that this model can't go on from.

        Raises:
            InvalidArgument: the budget is not that of the checkpoint.
            UnprivateStep: noise that later steps take back was given here already.
        """
        if self.plan.mechanism is not None and self.session.step.last_step >= 0:
            raise UnprivateStep(
                "checkpoint must be loaded before the first step with correlated noise, got an engine that took some: "
                "its noise would come twice. Make a new engine."
            )
        own = self.facts()["budget"]
        if facts["budget"] != own:
            raise InvalidArgument(
                f"budget must be that of the checkpoint, {facts['budget']}, got {own}. Call make_private with it."
            )

    def start_at(self, step: int) -> None:
        """Number the next step `step`, or later: where a training goes on that another library keeps."""
        self.session.go_on(step, self.session.step.state())
        self.meter.go_on(step, repeats=False)

    def go_on(self, facts: Mapping[str, object], state: Mapping[str, object], *, repeats: bool) -> None:
        """Go on from where a checkpoint stopped; what it cost is taken over apart."""
        step = int(str(facts["next_step"]))
        self.session.go_on(step, cast("Mapping[str, object]", state["step"]))
        self.meter.go_on(step, repeats=repeats)
        if self.adaptive is not None:
            self.adaptive.load_state(cast("Mapping[str, object]", state["adaptive"]))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The parts of the user's own loop, as `make_private` was given them.

    Args:
        module: to be trained.
        optimizer: holds the parameters to train.
        data_loader: over the private records.
        loss_reduction: "mean" or "sum" over the records of a batch.
        microbatch_size: most records in one forward and backward; None takes batches whole.
        criterion: the loss, to be proved before the first forward, or None.
        public_batch: public or invented records as the loader gives them, or None.
        public_records: public or invented items as the data set gives them, or None.
        units: which records belong together, or None.
        performance: how gradients and sums are taken.
    """

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[object]
    loss_reduction: str
    microbatch_size: int | None
    criterion: Criterion | None
    public_batch: object
    public_records: Sequence[object] | None
    units: Units | None
    performance: Performance

    def attach(
        self,
        plan: Plan,
        *,
        number: int,
        steps: int,
        randomness: Randomness,
        charges: Charges,
        ledger: Account | Reservation | None,
        adaptive: AdaptiveRun | None,
        journal: Journal,
        target: EpsilonTarget | None = None,
    ) -> tuple[Attached, PrivateLoader]:
        """Hook the private step to module and optimizer, and make the loader; after a refusal all is as it was."""
        alone = self.performance.is_one_by_one
        ranks = ranks_here().over(inner(self.module), plan, adaptive=adaptive, alone=alone)
        microbatch_size = 1 if alone else self.microbatch_size
        randomness = ranks.shared(randomness)
        ranks.require_same(
            plan=plan.to_json(),
            records=len(population_of(self.data_loader)),
            steps=steps,
            model=shapes_of(inner(self.module)),
            budget=None if adaptive is None else adaptive.facts(),
        )
        ranks.align(inner(self.module))
        public_batch = self.public_batch
        if public_batch is None and self.public_records is not None:
            public_batch = self.data_loader.collate_fn(copy.deepcopy(list(self.public_records)))
        check_trainable(self.module, self.optimizer)
        fields = OptimizerFields(self.optimizer, plan, lambda: session.step.last_step)
        try:
            session = Session(
                module=self.module,
                optimizer=self.optimizer,
                plan=plan,
                randomness=randomness,
                mean_over_records=self.loss_reduction == "mean",
                adaptive=adaptive,
                by_unit=self.units is not None,
                performance=self.performance,
                ranks=ranks,
            )
        except BaseException:
            fields.remove()
            raise
        try:
            model = ranks.first_then_all(lambda: journal.model(number, plan, randomness, adaptive))
            meter = ranks.first_then_all(
                lambda: Meter(
                    plan,
                    charges=charges,
                    ready=partial(_ready, session, journal if ranks.is_first else None),
                    ledger=ledger if ranks.is_first else None,
                    steps=steps,
                    adaptive=adaptive,
                    journal=partial(journal.charge, model) if ranks.is_first else None,
                    target=target,
                )
            )
            loader = PrivateLoader(
                self.data_loader,
                sampling=plan.sampling if adaptive is None else Admitted(adaptive),
                steps=steps,
                microbatch_size=microbatch_size,
                randomness=randomness,
                charge=lambda begins: _charged(ranks, meter, begins),
                share=ranks.share,
                rank=ranks.number,
                hand_out=session.hand_out,
                let_go=session.let_go,
                substitutes=substitutes(plan.at(0).expected_batch_size, microbatch_size),
                public_records=self.public_records,
                public_batch=public_batch,
                numbers=meter if adaptive is not None or plan.noise is not None else None,
                units=self.units,
                largest=self._largest(plan, adaptive, ranks),
                taken=session.parts_taken,
                leave_out=session.leave_out,
            )
            most = largest_batch(plan, microbatch_size, records_each=_records_each(self.units), processes=ranks.count)
            size = ProbeSize(records=most, two_passes=self.performance.memory == "two-pass")
            set_probe(session, loader, self.loss_reduction, self.criterion, public_batch, size)
        except BaseException:
            session.detach()
            fields.remove()
            raise
        if adaptive is None:
            fields.show()
        given = fields, ModuleFields(self.module)
        attached = Attached(number=number, plan=plan, session=session, meter=meter, adaptive=adaptive, fields=given)
        return attached, loader

    def _largest(self, plan: Plan, adaptive: AdaptiveRun | None, ranks: Ranks) -> Callable[[int], int]:
        """Of a step's number, how many records a batch of it hardly ever exceeds, by what is public."""
        reach = population_of(self.data_loader)
        # With units the plan names the size of the data set as public.
        public = len(reach) if plan.dataset_size_is_public else None
        at = plan.at if adaptive is None else adaptive.at

        def largest(step: int) -> int:
            now = at(step)
            mean = now.expected_batch_size if public is None else public * now.sample_rate
            whole = batch_bound(mean, public) if plan.poisson_sampling else math.ceil(mean)
            return math.ceil(whole / ranks.count)

        return largest


def _ready(session: Session, journal: Journal | None) -> None:
    """Raise when no batch may be given out; know what others have charged to the run folder before asking for one."""
    session.check_attached()
    if journal is not None:
        journal.catch_up()


def _records_each(units: Units | None) -> int:
    """Records of a unit in one forward pass: all of them in a loop of the user's own."""
    return 1 if units is None or units.most_records is None else units.most_records


def _charged(ranks: Ranks, meter: Meter, begins_epoch: bool) -> int | None:
    """Charge a batch in the first process, then in the others. Of a budget they decide together, once it is paid."""
    if not meter.adapts:
        return ranks.first_then_all(lambda: meter(begins_epoch))
    ranks.first_then_all(meter.prepare)
    return meter(begins_epoch)


def claim_of(
    charges: Charges,
    plans: list[Plan],
    adaptive: AdaptiveRun | None,
    *,
    stepped: list[Plan],
    delta: float,
    accountant: str,
    reproducible: bool,
    diagnosed: bool = False,
) -> Guarantee:
    """What holds for everything that an engine charged: the composition of its steps, or its budget.

    A plan that no batch was drawn for, one not in `stepped`, is named only where nothing was charged at all.
    """
    relation = plans[-1].neighboring_relation if plans else NeighboringRelation.ADD_OR_REMOVE_ONE
    spent = accounting.epsilon(charges.event(), delta, relation=relation, accountant=accountant)
    caveats = [FIXED_SEED] if reproducible else []
    caveats += [DIAGNOSED] if diagnosed else []
    is_charged = not isinstance(charges.event(), Nothing)
    named = stepped if is_charged else plans
    caveats += [caveat for plan in named for caveat in plan.guarantee(steps=0).caveats]
    epsilon, name = spent.upper, spent.accountant
    # Charges that were loaded without their plans say by themselves how batches were drawn.
    loaded = sampling_words(charges.event()) if is_charged and not named else "none"
    sampler = ", ".join(dict.fromkeys(plan.sampling.words for plan in named)) or loaded
    if adaptive is not None:
        name, sampler = adaptive.accountant, adaptive.words
        caveats.append(KEPT)
        if is_charged:
            epsilon = max(epsilon, _budget_at(adaptive, plans[-1], delta))
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        accountant=name,
        sampler=sampler,
        relation=relation,
        unit=plans[-1].privacy_unit if plans else PrivacyUnit.EXAMPLE,
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _budget_at(adaptive: AdaptiveRun, plan: Plan, delta: float) -> float:
    """ε of the whole budget at any δ; at its own, what was promised."""
    if delta == plan.delta:
        return adaptive.epsilon
    whole = accounting.epsilon(adaptive.event(), delta, relation=plan.neighboring_relation).upper
    return min(whole, adaptive.epsilon) if delta > plan.delta else whole
