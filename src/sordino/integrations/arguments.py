"""What a private run inside another library's trainer needs (floor 4, integrations), and the noise that keeps its ε."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from sordino import accounting, checks
from sordino.clipping import Clipping, clipping_called
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import compose
from sordino.training import Plan
from sordino.training.engine import PrivacyEngine
from sordino.training.performance import Gradients
from sordino.training.processes.ranks import ranks_here

__all__ = ["PrivacyArguments", "noise_for"]


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """What a private run needs beside the other library's own settings. Give `target_epsilon` or `noise_multiplier`.

    Args:
        delta: δ in (0, 1).
        target_epsilon: ε of the whole training, never exceeded; the noise follows from it.
        noise_multiplier: noise standard deviation over the sensitivity, ≥ 0; 0 is for debugging.
        max_grad_norm: clipping norm > 0 of one record's gradient. (The other library's own clipping is not used.)
        clipping: "flat", "per_layer", "automatic", "psac", "global", or an object of `sordino.clipping`.
        neighboring_relation: which data sets count as neighbours.
        eval_data_are_public: whether evaluation may be shown: no noise covers what is measured on private records.
        diagnostics: "private" shows losses on this terminal, outside the guarantee.
        public_records: at least five public or invented items of the data set's form, where the engine's own made-up
            ones don't run.
        gradients: "one-by-one" runs plain autograd on one record at a time, as in `sordino.training.Performance`.
    """

    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    clipping: str | Clipping = "flat"
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    eval_data_are_public: bool = False
    diagnostics: str | None = None
    public_records: Sequence[object] | None = None
    gradients: Gradients = "auto"

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.positive(max_grad_norm=self.max_grad_norm)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InvalidArgument("target_epsilon or noise_multiplier must be given, and not both. Give one of them.")
        if self.target_epsilon is not None:
            checks.positive(target_epsilon=self.target_epsilon)
        if self.noise_multiplier is not None:
            checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.one_of((None, "private"), diagnostics=self.diagnostics)
        checks.one_of(get_args(Gradients), gradients=self.gradients)


def noise_for(
    privacy: PrivacyArguments, engine: PrivacyEngine, *, steps: int, sample_rate: float, records: int
) -> float:
    """The noise multiplier asked for, or the least with which `steps` more steps stay within the target.

    Args:
        privacy: the goal.
        engine: what it charged so far is part of the target.
        steps: to come, ≥ 1.
        sample_rate: of each of them.
        records: in the data set.

    Raises:
        InvalidArgument: nothing of the target is left.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    target = privacy.target_epsilon
    assert target is not None
    spent = engine.event()
    if engine.get_epsilon(privacy.delta) >= target * (1 - 1e-3):
        raise InvalidArgument(
            f"target_epsilon must leave something for further steps, got {target:g}, which is spent. Raise it."
        )
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=privacy.max_grad_norm,
        sample_rate=sample_rate,
        steps=steps,
        expected_batch_size=records * sample_rate,
        delta=privacy.delta,
        neighboring_relation=privacy.neighboring_relation,
        clipping=clipping_called(privacy.clipping),
    )
    # Once for all processes: two kinds of machine may differ in the last digit.
    return ranks_here().agreed(
        lambda: accounting.calibrate_noise_multiplier(
            lambda noise: compose([spent, replace(plan, noise_multiplier=noise).event()]),
            target_epsilon=target,
            target_delta=privacy.delta,
            relation=privacy.neighboring_relation,
        )
    )
