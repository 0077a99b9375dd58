"""Canaries: records that an audit plants, each with probability ½ (room `audit`, floor 4).

A canary of gradients has one coordinate to itself, beside the model: its gradient there is larger than any clipping
norm, and no record's reaches it. It is the worst record for a mechanism, and leaves the model's training as it was.
Canaries of records go the whole way, through the model's own layers: mislabelled or made-up ones.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.randomness import Randomness
from sordino.training.plan import Plan

__all__ = ["GradientCanaries", "RecordCanaries", "coins", "made_up", "mislabelled"]

_LOUD = 1000.0
"""A canary's gradient norm, in clipping norms."""


def coins(count: int, randomness: Randomness) -> np.ndarray:
    """Which of `count` canaries are in: fair and independent."""
    return randomness.fresh("audit coins").uniform(checks.integer(1, count=count)) < 0.5


class _Marked(nn.Module):
    """The model, with one number beside it for every canary."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        like = next(model.parameters())
        self.model = model
        self.marks = nn.Embedding(count, 1, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.marks.weight)
        self.train(model.training)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)


class GradientCanaries:
    """Canaries whose gradients are unit directions beside the model's parameters.

    Args:
        model: of the user; it is trained in place.
        loss: ``loss(model, *batch)``, one value a record.
        data: equally long tensors, records first.
        plan: what is audited.
        present: [m], which canaries are in.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        data: Sequence[Tensor],
        plan: Plan,
        present: np.ndarray,
    ) -> None:
        self.model = _Marked(model, len(present))
        self._loss = loss
        self._loudness = _LOUD * max(plan.at(step).max_grad_norm for step in {0, max(plan.steps - 1, 0)})
        places, signs = _planted(present, plan.neighboring_relation)
        count = len(data[0])
        blanks = [torch.zeros((len(places), *part.shape[1:]), dtype=part.dtype, device=part.device) for part in data]
        self.data = (
            *(torch.cat([part, blank]) for part, blank in zip(data, blanks, strict=True)),
            torch.cat([torch.zeros(count, dtype=torch.long), places]),
            torch.cat([torch.zeros(count), signs]),
            torch.cat([torch.zeros(count), torch.ones(len(places))]),
        )

    def loss(self, model: _Marked, *batch: Tensor) -> Tensor:
        """The user's loss of records; of a canary, its own number times a large one."""
        *own, places, signs, planted = batch
        marks = model.marks(places.clamp(0, model.marks.num_embeddings - 1)).flatten(1).sum(1)
        return (1 - planted) * self._loss(model.model, *own) + planted * signs * self._loudness * marks

    def inner_products(self) -> Tensor:
        """⟨canary's direction, the gradient that the optimizer is about to see⟩, [m]."""
        gradient = self.model.marks.weight.grad
        assert gradient is not None
        return gradient.flatten().double()

    def final_scores(self) -> Tensor:
        """What the final model alone says, [m]: how far down a canary's loss went."""
        return -self.model.marks.weight.detach().flatten().double()


def _planted(present: np.ndarray, relation: NeighboringRelation) -> tuple[Tensor, Tensor]:
    """Places and signs of the canaries in the data: what is absent is left out, blank, or replaced by its opposite."""
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        places = torch.from_numpy(np.flatnonzero(present))
        return places, torch.ones(len(places))
    absent = -1.0 if relation is NeighboringRelation.REPLACE_ONE else 0.0
    return torch.arange(len(present)), torch.from_numpy(np.where(present, 1.0, absent)).float()


class RecordCanaries:
    """Canaries that are records as any other.

    Args:
        model: of the user; it is trained in place.
        loss: ``loss(model, *batch)``, one value a record.
        data: equally long tensors, records first.
        plan: what is audited, under add-or-remove-one.
        canaries: tensors like `data`, [m, …].
        present: [m], which canaries are in.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        data: Sequence[Tensor],
        plan: Plan,
        canaries: Sequence[Tensor],
        present: np.ndarray,
    ) -> None:
        if plan.neighboring_relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise InvalidArgument(
                f"canaries must be 'gradients' under {plan.neighboring_relation.words}, got records: an absent one "
                "would have to be replaced. Audit with gradients."
            )
        if [part.shape[1:] for part in canaries] != [part.shape[1:] for part in data]:
            raise InvalidArgument("canaries must have the shapes of the data's records, got others. Give like tensors.")
        self.model, self.loss = model, loss
        self._canaries = tuple(canaries)
        inside = torch.from_numpy(present)
        self.data = tuple(torch.cat([part, more[inside]]) for part, more in zip(data, canaries, strict=True))
        self._before = self._losses()

    def inner_products(self) -> Tensor:
        """⟨canary's loss gradient here, the gradient that the optimizer is about to see⟩, [m], each canary's scaled.

        All at once, as one directional derivative: central differences along the released gradient.
        """
        pairs = [(weight, weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        length = torch.stack([gradient.norm() for _, gradient in pairs]).norm()
        size = torch.stack([weight.detach().norm() for weight, _ in pairs]).norm()
        step = float((1e-2 * (1 + size)) / (1e-30 + length))
        kept = [weight.detach().clone() for weight, _ in pairs]
        with torch.no_grad():
            ends = []
            for sign in (1.0, -1.0):
                for (weight, gradient), start in zip(pairs, kept, strict=True):
                    assert gradient is not None
                    weight.copy_(start + sign * step * gradient)
                ends.append(self._losses())
            for (weight, _), start in zip(pairs, kept, strict=True):
                weight.copy_(start)
        return (ends[0] - ends[1]) / (2 * step)

    def final_scores(self) -> Tensor:
        """How far down each canary's loss went, [m]."""
        return self._before - self._losses()

    def _losses(self) -> Tensor:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.loss(self.model, *self._canaries).double()
        finally:
            self.model.train(training)


def mislabelled(data: Sequence[Tensor], count: int, randomness: Randomness) -> tuple[Tensor, ...]:
    """`count` records of the data with another label: for (features, labels) with labels 0, 1, ….

    The records are taken from the data, so the audit must not be released as if these were private beforehand.

    Raises:
        InvalidArgument: the data are no such pair, have fewer records, or one label only.
    """
    if len(data) != 2 or data[1].dtype not in {torch.int64, torch.int32}:
        raise InvalidArgument(
            "canaries must not be 'mislabelled' without integer labels, got other data. Use 'random'."
        )
    features, labels = data
    classes = int(labels.max()) + 1 if len(labels) else 0
    if classes < 2 or len(labels) < checks.integer(1, count=count):
        raise InvalidArgument(f"data must hold {count} records and two labels, got fewer. Ask for fewer canaries.")
    stream = randomness.fresh("audit canaries")
    places = torch.from_numpy(np.argsort(stream.integers64(len(labels)))[:count].astype(np.int64))
    shift = torch.from_numpy(1 + (stream.integers64(count) % np.uint64(classes - 1)).astype(np.int64))
    return features[places].clone(), ((labels[places] + shift) % classes).to(labels.dtype)


def made_up(data: Sequence[Tensor], count: int, randomness: Randomness) -> tuple[Tensor, ...]:
    """`count` records like those of the data, every entry drawn at random.

    Floats are uniform between the data's least and largest, integers too.
    """
    stream = randomness.fresh("audit canaries")

    def drawn(part: Tensor) -> Tensor:
        shape = (checks.integer(1, count=count), *part.shape[1:])
        unit = torch.from_numpy(stream.uniform(int(np.prod(shape)))).reshape(shape)
        low, high = float(part.min()), float(part.max())
        if part.dtype.is_floating_point:
            return (low + (high - low) * unit).to(part.dtype)
        return (low + torch.floor(unit * (high - low + 1))).to(part.dtype)

    return tuple(drawn(part) for part in data)
