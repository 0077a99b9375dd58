"""All membership attacks on one model, held against the ceiling of its guarantee."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import checks
from sordino.audit.attacks.membership_scores import (
    Confidence,
    ReferenceModels,
    TrainReference,
    confidence,
    lira_offline,
    lira_online,
    loss_scores,
    quantile_scores,
    rmia_offset,
    rmia_scores,
    shadow_scores,
    train_references,
)
from sordino.audit.attacks.roc import MembershipBound, RateInterval, RocCurve, membership_bound_of_claim, roc_curve
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.installation import require
from sordino.plot_style import COLORS, SERIF, STYLE
from sordino.randomness import KeyedRNG

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------------------------
# Where an attack bites hardest: by class, and by how hard a record is.
# ----------------------------------------------------------------------------------------------------------------------


_FEWEST = 20


@dataclass(frozen=True, kw_only=True)
class SubgroupResult:
    """The attack on a group of records alone.

    Args:
        name: of the group.
        members: members in it.
        non_members: non-members in it.
        auc: area under the curve within the group.
        lower: end of its 95 % interval, for this group alone: of many groups one looks bad by chance.
        upper: the other end.
    """

    name: str
    members: int
    non_members: int
    auc: float
    lower: float
    upper: float


def subgroup_results(
    scores: NDArray[np.float64],
    *,
    members: int,
    labels: NDArray[np.int64],
    difficulty: NDArray[np.float64],
    label_names: tuple[str, ...] = (),
) -> tuple[SubgroupResult, ...]:
    """Classes and tenths of difficulty, the worst first; groups with fewer than 20 records on either side are left out.

    Args:
        scores: of all candidates, members first.
        members: how many of them are members, ≥ 1.
        labels: class of each candidate.
        difficulty: how hard each is for a model that has not seen it, a loss for instance.
        label_names: names of the classes.
    """
    inside = np.arange(len(scores)) < checks.integer(1, members=members)
    groups = {
        f"class {label_names[label] if label < len(label_names) else label}": labels == label
        for label in np.unique(labels).tolist()
    }
    tenth = np.minimum(10 * difficulty.argsort(kind="stable").argsort(kind="stable") // len(scores), 9)
    for k in range(10):
        words = " (easiest)" if k == 0 else " (hardest)" if k == 9 else ""
        groups[f"difficulty, tenth {k + 1}{words}"] = tenth == k
    found = []
    for name, mask in groups.items():
        mine, others = scores[mask & inside], scores[mask & ~inside]
        if min(len(mine), len(others)) < _FEWEST:
            continue
        curve = roc_curve(mine, others, false_positive_rates=())
        lower, upper = curve.auc_interval
        found.append(
            SubgroupResult(
                name=name, members=len(mine), non_members=len(others), auc=curve.auc, lower=lower, upper=upper
            )
        )
    return tuple(sorted(found, key=lambda part: part.lower, reverse=True))


# ----------------------------------------------------------------------------------------------------------------------
# All membership attacks on one model, held against the ceiling of its guarantee.
# ----------------------------------------------------------------------------------------------------------------------


Floats = NDArray[np.float64]
Pair = tuple[Tensor, Tensor]

NO_PROOF = "An attack that fails is no proof of privacy: another one may do better, up to the attack bound."
_RATES = (0.1, 0.01, 0.001)
_ALPHA = 0.05
_LEAST_POPULATION = 10

_KNOWLEDGE = {
    "loss threshold": "the model's loss on the record, nothing else",
    "quantile regression": "records that were not trained on; no other models",
    "shadow models": "reference models with and without the record, their confidence vectors",
    "LiRA, online": "reference models with and without the record",
    "LiRA, offline": "reference models without the record",
    "RMIA, online": "reference models with and without the record; records that were not trained on",
    "RMIA, offline": "reference models without the record; records that were not trained on",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class MembershipAttack:
    """One attack's result.

    Args:
        name: of the attack.
        knowledge: what the attacker is assumed to know, besides the record and the model's outputs.
        roc: what its scores are worth.
        scores: of all candidates, members first; about private records, so never released.
    """

    name: str
    knowledge: str
    roc: RocCurve
    scores: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class MembershipReport:
    """Every attack with its upper bound.

    Guarantee: none. All numbers are statistics of the members: keep them with the data unless `public`.

    Args:
        attacks: results, the strongest first.
        ceiling: what no attack can exceed if the claim is true.
        claim: the claimed guarantee, or None when the model claims nothing.
        slices: the worst groups of records under the strongest attack.
        references: number of reference models.
        public: whether the records were declared public.
    """

    attacks: tuple[MembershipAttack, ...]
    ceiling: MembershipBound
    claim: Guarantee | None
    slices: tuple[SubgroupResult, ...]
    references: int
    public: bool

    @property
    def strongest(self) -> MembershipAttack:
        """The attack that finds most members at the lowest false-positive rate that could be measured."""
        return self.attacks[0]

    @property
    def above_ceiling(self) -> tuple[str, ...]:
        """Attacks that refute the claim: 95 % sure over all attacks and rates together (Bonferroni)."""
        tests = max(1, sum(len(attack.roc.rates) for attack in self.attacks))
        found = []
        for attack in self.attacks:
            for rate in attack.roc.rates:
                false_positives, true_positives = rate.surely_above(alpha=_ALPHA / tests)
                if true_positives > self.ceiling.true_positive_rate(false_positives):
                    found.append(attack.name)
                    break
        return tuple(found)

    def most_exposed(self, count: int = 10) -> tuple[int, ...]:
        """Positions of the members that the strongest attack is surest of, among the members given. Never release."""
        members = self.strongest.scores[: self.strongest.roc.members]
        return tuple(np.argsort(-members, kind="stable")[: checks.integer(1, count=count)].tolist())

    def to_dict(self) -> dict[str, object]:
        """All but the scores, as plain JSON types."""
        return {
            "attacks": [
                {
                    "name": attack.name,
                    "knowledge": attack.knowledge,
                    "auc": attack.roc.auc,
                    "auc_interval": list(attack.roc.auc_interval),
                    "advantage": attack.roc.advantage,
                    "advantage_interval": list(attack.roc.advantage_interval),
                    "rates": [vars(rate) for rate in attack.roc.rates],
                    "curve": [list(point) for point in attack.roc.curve],
                }
                for attack in self.attacks
            ],
            "ceiling": {
                "source": self.ceiling.source,
                "advantage": self.ceiling.advantage,
                "auc": self.ceiling.auc,
                "rates": {str(rate): self.ceiling.true_positive_rate(rate) for rate in _RATES},
            },
            "claim": None if self.claim is None else self.claim.describe(),
            "above_ceiling": list(self.above_ceiling),
            "slices": [vars(part) for part in self.slices],
            "references": self.references,
            "members": self.strongest.roc.members,
            "non_members": self.strongest.roc.non_members,
            "public": self.public,
            "note": NO_PROOF,
        }


def membership_report(
    model: nn.Module,
    members: Pair,
    non_members: Pair,
    *,
    event: Event,
    train_reference: TrainReference | None = None,
    references: int = 8,
    population: Pair | None = None,
    claim: Guarantee | None = None,
    label_names: tuple[str, ...] = (),
    public: bool = False,
    rng: KeyedRNG | None = None,
) -> MembershipReport:
    """Every membership attack on `model`, from the weakest attacker to the strongest.

    Members and non-members are treated alike: each reference model is trained on half of both together, so that the
    only difference is that `model` itself saw the members. Both should come from one population, or the attacks will
    tell populations apart.

    Guarantee: none; see `MembershipReport`.

    Args:
        model: features ↦ logits.
        members: features and labels of records that `model` was trained on.
        non_members: of records that it was not trained on.
        event: what its training did (`RunFolder.event()`); `events.NonPrivate()` for a model without noise.
        train_reference: trains a model as `model` was trained; without it only attacks that need no model are made.
        references: an even number of reference models, ≥ 4; 16 and more make the attacks stronger.
        population: further records that nothing was trained on; by default every second non-member is kept for it.
        claim: the guarantee that is claimed.
        label_names: for the table of slices.
        public: whether the records are public.
        rng: fresh by default.

    Returns:
        The report.

    Raises:
        InvalidArgument: there are too few records, or the shapes do not fit.
    """
    outsiders, known = (non_members, population) if population is not None else _split(non_members)
    if len(known[1]) < _LEAST_POPULATION or not len(members[1]) or not len(outsiders[1]):
        raise InvalidArgument(
            f"members and non_members must be records, and {_LEAST_POPULATION} more must be left for the population, "
            "got fewer. Give more records that were not trained on."
        )
    candidates = torch.cat([members[0], outsiders[0]]), torch.cat([members[1], outsiders[1]])
    target, on_population = confidence(model, candidates), confidence(model, known)
    models = None
    if train_reference is not None:
        models = train_references(
            train_reference, candidates, count=references, population=known, rng=rng or KeyedRNG()
        )
    scores = _scores(target, on_population, models, candidates, known)
    count = len(members[1])
    attacks = [
        MembershipAttack(name=name, knowledge=_KNOWLEDGE[name], roc=roc_curve(s[:count], s[count:]), scores=s)
        for name, s in scores.items()
    ]
    attacks.sort(key=_strength, reverse=True)
    return MembershipReport(
        attacks=tuple(attacks),
        ceiling=membership_bound_of_claim(event, claim, rates=_RATES),
        claim=claim,
        slices=subgroup_results(
            attacks[0].scores,
            members=count,
            labels=candidates[1].numpy(),
            difficulty=_difficulty(target, models),
            label_names=label_names,
        ),
        references=0 if models is None else len(models.models),
        public=public,
    )


def _strength(attack: MembershipAttack) -> tuple[float, float]:
    """By the lower end of TPR at the smallest measurable FPR, then by AUC."""
    rates: tuple[RateInterval, ...] = attack.roc.rates
    # 1 % is the usual one to compare by; fewer records allow only 10 %, and very few none.
    chosen = next((rate for rate in rates if rate.false_positive_rate == 0.01), rates[-1] if rates else None)
    return (chosen.value if chosen else 0.0, attack.roc.auc)


def _split(records: Pair) -> tuple[Pair, Pair]:
    features, labels = records
    return (features[0::2], labels[0::2]), (features[1::2], labels[1::2])


def _difficulty(target: Confidence, models: ReferenceModels | None) -> Floats:
    """Loss under reference models that didn't see the record; without them the attacked model's own loss."""
    if models is None:
        return -target.own
    losses = -np.stack([one.own for one in models.models])
    out = ~models.included
    return np.where(out, losses, 0.0).sum(axis=0) / out.sum(axis=0)


def _scores(
    target: Confidence, on_population: Confidence, models: ReferenceModels | None, candidates: Pair, known: Pair
) -> Mapping[str, Floats]:
    found = {
        "loss threshold": loss_scores(-target.own),
        "quantile regression": quantile_scores(
            _with_label(candidates),
            target.phi,
            population_features=_with_label(known),
            population_confidences=on_population.phi,
        ),
    }
    if models is None:
        return found
    phi, seen = np.stack([one.phi for one in models.models]), models.included
    own = np.exp(np.stack([one.own for one in models.models]))
    own_z = np.exp(np.stack([one.own for one in models.population]))

    offset = rmia_offset(own, seen, population_references=own_z)

    def rmia(*, online: bool) -> Floats:
        return rmia_scores(
            np.exp(target.own),
            own,
            seen,
            population_target=np.exp(on_population.own),
            population_references=own_z,
            offset=offset,
            online=online,
        )

    shadows = np.exp(np.stack([one.log_probabilities for one in models.models]))
    return found | {
        "shadow models": shadow_scores(np.exp(target.log_probabilities), candidates[1].numpy(), shadows, seen),
        "LiRA, online": lira_online(target.phi, phi, seen),
        "LiRA, offline": lira_offline(target.phi, phi, seen),
        "RMIA, online": rmia(online=True),
        "RMIA, offline": rmia(online=False),
    }


def _with_label(records: Pair) -> Floats:
    features, labels = records
    return np.column_stack([features.reshape(len(labels), -1).double().numpy(), labels.numpy()])


# ----------------------------------------------------------------------------------------------------------------------
# The attacks' ROC curves on logarithmic axes, under the ceiling of the claim.
# ----------------------------------------------------------------------------------------------------------------------


_FEWEST_COUNTED = 5
_OTHERS = ("#5f7f9e", "#b08948", "#8d6a9f", "#7d8a4a", "#b0665c", "#4f9090")


def plot_roc(report: MembershipReport, path: Path, *, title: str = "") -> None:
    """Draw the strongest attack with its band, the others behind it, and the ceiling, to a PNG of 1000 × 800 pixels.

    Guarantee: none: the curves are statistics of the members. The picture says so unless the records are public.

    Args:
        report: from `membership_report`.
        path: where the PNG goes.
        title: what was attacked.
    """
    require("report", "matplotlib", user="a picture")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Below this rate a curve stands on fewer than five non-members; chance alone draws it there.
    lowest = min(0.1, _FEWEST_COUNTED / report.strongest.roc.non_members)
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(10, 8), dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.1, 0.13, 0.86, 0.7))
        _curves(axes, report, lowest)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(lowest, 1)
        axes.set_ylim(0.5 * lowest, 1.15)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda rate, _: f"{100 * rate:g} %")
        axes.set_xlabel("non-members wrongly identified", color=COLORS["soft"], loc="right")
        axes.set_title("members correctly identified", loc="left", color=COLORS["soft"], fontsize=11)
        axes.grid(color=COLORS["hair"], which="major")
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", frameon=False, labelcolor=COLORS["ink"], fontsize=10.5)
        figure.text(0.06, 0.93, title or "Membership attacks", fontsize=20, color=COLORS["ink"], family=SERIF)
        figure.text(0.06, 0.885, _describe(report), fontsize=11, color=COLORS["soft"])
        few = f"Rates below {100 * lowest:.2g} % are not drawn: they rest on fewer than {_FEWEST_COUNTED} non-members."
        figure.text(0.06, 0.03, f"{few}\n{NO_PROOF}", fontsize=10, color=COLORS["soft"], linespacing=1.4)
        if not report.public:
            figure.text(0.96, 0.03, "Private: keep with the data.", fontsize=10, color=COLORS["alarm"], ha="right")
        figure.savefig(path, metadata={"Software": "sordino"})


def _describe(report: MembershipReport) -> str:
    roc = report.strongest.roc
    claim = f"claimed ε = {report.claim.epsilon:.3g}" if report.claim is not None else "no guarantee claimed"
    return f"{roc.members:,} members, {roc.non_members:,} others, {report.references} reference models · {claim}"


def _curves(axes: "Axes", report: MembershipReport, lowest: float) -> None:
    rates = [rate for rate, _ in report.ceiling.curve if rate >= lowest]
    most = [value for rate, value in report.ceiling.curve if rate >= lowest]
    axes.fill_between(rates, most, 1.15, color=COLORS["hair"], alpha=0.55, linewidth=0)
    axes.plot(
        rates, most, color=COLORS["alarm"], linewidth=2, label=f"bound of the claim, from {report.ceiling.source}"
    )
    for number, attack in enumerate(report.attacks):
        points = [point for point in attack.roc.curve if point[0] >= lowest]
        x, y = [point[0] for point in points], [point[1] for point in points]
        # A logarithmic axis has no zero: a curve starts at its first true positive.
        first = next((k for k, value in enumerate(y) if value > 0), len(y))
        label = f"{attack.name}   AUC {attack.roc.auc:.3f}"
        if number == 0:
            low, high = [max(point[2], 1e-9) for point in points], [point[3] for point in points]
            axes.fill_between(x, low, high, color=COLORS["tint"], alpha=0.8, linewidth=0)
            axes.plot(x[first:], y[first:], color=COLORS["accent"], linewidth=2.8, label=label, zorder=3)
        else:
            axes.plot(x[first:], y[first:], color=_OTHERS[(number - 1) % len(_OTHERS)], linewidth=1.3, label=label)
    axes.plot([lowest, 1], [lowest, 1], color=COLORS["soft"], linewidth=1, linestyle=(0, (2, 3)), label="guessing")
