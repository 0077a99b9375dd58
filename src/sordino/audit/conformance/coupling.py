"""Cases: records that touch each other are refused, or stay within the bound all the same; neighbours of those work."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.audit.case import Case, Wrong, case
from sordino.audit.library import Batch, Library, Loss
from sordino.audit.made_up import determined, must_be_exact, must_stay_within, normal, whole

__all__ = ["COUPLING"]

COUPLING: dict[str, Case] = {}
# Gradients far above the clipping norm, so that what one record does to the others' shows.
_LARGE = 100.0
CROSS_ENTROPY = Loss.of(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def _coupled(
    name: str,
    build: Callable[[], nn.Module],
    mean: Callable[[nn.Module, Batch], Tensor],
    batch: Batch | None = None,
) -> None:
    """A case in which one record reaches another's gradient."""
    records = (normal(8, 5), whole(3, 8)) if batch is None else batch
    loss = Loss(mean=lambda model, given: _LARGE * mean(model, given))

    @case(COUPLING, f"refused: {name}", expects="refusal")
    def check(library: Library) -> None:
        must_stay_within(library, build, records, [column[1:] for column in records], loss)


def _mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _normalised(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))


class _Centred(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.l, self.by = nn.Linear(5, 3), weight

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x - self.by * x.mean(0))


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum(0)
        return self.l(x)


def _contrast(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def _mixup(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(0.6 * batch[0] + 0.4 * batch[0].flip(0)), batch[1])


def _weighted(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 1.0, 4.0]).to(model(batch[0])))


def _language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))


def _token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)


def _all_tokens_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _own_tokens_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


def _masked(model: nn.Module, batch: Batch) -> Tensor:
    mask = (batch[1] > 0).float()
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    return (losses * mask).sum() / mask.sum()


def _weights_by_place(model: nn.Module, batch: Batch) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * (1 - 2 * (torch.arange(8) % 2))[: len(losses)]).mean()


def _weights_from_outside(model: nn.Module, batch: Batch) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * torch.tensor(_SIGNS[: len(losses)])).mean()


def _weights_by_batch(model: nn.Module, batch: Batch) -> Tensor:
    sizes = batch[0].sum(1)
    weights = torch.where(sizes > sizes.mean(), 1.0, -1.0)
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).mean()


def _labels_from_outside(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])) % 3)


_SIGNS = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
_EXTREME = (torch.cat([1000 * normal(1, 5).abs(), normal(8, 5)[1:]]), whole(3, 8))
_TOKENS = (whole(7, 8, 4), whole(7, 2, 8, 4)[1])
_coupled("batch normalisation", lambda: _normalised(nn.BatchNorm1d(4)), _mean)
_coupled("batch normalisation without affine parameters", lambda: _normalised(nn.BatchNorm1d(4, affine=False)), _mean)
_coupled(
    "frozen batch normalisation in training mode",
    lambda: _normalised(nn.BatchNorm1d(4).requires_grad_(requires_grad=False)),
    _mean,
)
_coupled("a batch mean inside the model", lambda: _Centred(1.0), _mean)
_coupled("a batch mean of weight 1e-6 inside the model", lambda: _Centred(1e-6), _mean)
_coupled("an in-batch contrastive loss", lambda: nn.Linear(5, 4), _contrast)
_coupled("records mixed in the loop", lambda: nn.Linear(5, 3), _mixup)
_coupled("class weights with a mean over the batch", lambda: nn.Linear(5, 3), _weighted)
_coupled("a masked mean over the batch", _language_model, _masked, _TOKENS)
_coupled("weights that follow from the place in the batch", lambda: nn.Linear(5, 3), _weights_by_place)
_coupled("weights from outside, one for each place in the batch", lambda: nn.Linear(5, 3), _weights_from_outside)
_coupled("labels that follow from the place in the batch", lambda: nn.Linear(5, 3), _labels_from_outside)
_coupled("weights computed from the whole batch", lambda: nn.Linear(5, 3), _weights_by_batch, _EXTREME)


@case(COUPLING, "refused: a buffer that collects from records", expects="refusal")
def _counting(library: Library) -> None:
    model = determined(_Counting())
    library.clipped_sum(model, (normal(8, 5), whole(3, 8)), CROSS_ENTROPY, max_grad_norm=1.0)
    if model.get_buffer("seen").any():
        raise Wrong("records are stored without noise")


@case(COUPLING, "batch normalisation in evaluation mode is exact and keeps its buffers")
def _evaluated(library: Library) -> None:
    def build() -> nn.Module:
        return _normalised(nn.BatchNorm1d(4).eval().requires_grad_(requires_grad=False))

    must_be_exact(library, build, (normal(8, 5), whole(3, 8)), CROSS_ENTROPY)
    model = determined(build())
    before = [buffer.clone() for buffer in model.buffers()]
    library.clipped_sum(model, (normal(8, 5), whole(3, 8)), CROSS_ENTROPY, max_grad_norm=1.0)
    if not all(torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True)):
        raise Wrong("its buffers changed")


@case(COUPLING, "ignored tokens of one record do not change the others in a mean over all tokens")
def _ignored_tokens(library: Library) -> None:
    loss = Loss(mean=lambda model, batch: _LARGE * _token_mean(model, batch))
    records = (_TOKENS[0], torch.cat([torch.zeros(1, 4, dtype=torch.int64), _TOKENS[1][1:]]))
    must_stay_within(library, _language_model, _TOKENS, [column[1:] for column in _TOKENS], loss)
    must_stay_within(library, _language_model, records, [column[1:] for column in records], loss)


@case(COUPLING, "a mean over the tokens of equally long records is exact")
def _all_tokens(library: Library) -> None:
    loss = Loss(mean=_all_tokens_mean, each=_own_tokens_mean)
    must_be_exact(library, _language_model, _TOKENS, loss)


@case(COUPLING, "a mean over each record's own tokens is exact")
def _own_tokens(library: Library) -> None:
    loss = Loss.of(_own_tokens_mean)
    must_be_exact(library, _language_model, _TOKENS, loss)
