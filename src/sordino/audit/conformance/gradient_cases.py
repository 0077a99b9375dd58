"""Cases: unusual models are exact — each record's own gradient, clipped — or refused; never silently wrong."""

from collections.abc import Callable
from contextlib import suppress
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from sordino.audit.conformance.framework import (
    Batch,
    Case,
    ConformanceFailure,
    ConformanceLoss,
    Expects,
    Library,
    case,
    distance,
    must_be_exact,
    must_stay_within,
    set_parameters,
    synthetic_integers,
    synthetic_normal,
)

# ----------------------------------------------------------------------------------------------------------------------
# Cases: records that touch each other are refused, or stay within the bound all the same; neighbors of those work.
# ----------------------------------------------------------------------------------------------------------------------


COUPLING: dict[str, Case] = {}
# Gradients far above the clipping norm, so that what one record does to the others' shows.
_LARGE = 100.0
CROSS_ENTROPY = ConformanceLoss.of(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def _classes() -> Batch:
    """8 records of 5 features in 3 classes."""
    return synthetic_normal(8, 5), synthetic_integers(3, 8)


def _coupled(
    name: str,
    build: Callable[[], nn.Module],
    mean: Callable[[nn.Module, Batch], Tensor],
    batch: Batch | None = None,
) -> None:
    """A case in which one record reaches another's gradient."""
    records = _classes() if batch is None else batch
    loss = ConformanceLoss(mean=lambda model, given: _LARGE * mean(model, given))

    @case(COUPLING, f"refused: {name}", expects="refusal")
    def check(library: Library) -> None:
        must_stay_within(library, build, records, [column[1:] for column in records], loss)


def _mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _three() -> nn.Module:
    return nn.Linear(5, 3)


def _normalized(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))


class _Centered(nn.Module):
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
    return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


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


def _weighted_by(weights: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean of losses with weights that are computed from the batch's features."""
    return lambda model, batch: (
        F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights(batch[0])
    ).mean()


def _above_mean(x: Tensor) -> Tensor:
    return torch.where(x.sum(1) > x.sum(1).mean(), 1.0, -1.0)


def _labels_from_outside(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0]), device=batch[0].device) % 3)


_SIGNS = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
_EXTREME = (torch.cat([1000 * synthetic_normal(1, 5).abs(), synthetic_normal(8, 5)[1:]]), synthetic_integers(3, 8))
_TOKENS = (synthetic_integers(7, 8, 4), synthetic_integers(7, 2, 8, 4)[1])
_coupled("batch normalization", lambda: _normalized(nn.BatchNorm1d(4)), _mean)
_coupled("batch normalization without affine parameters", lambda: _normalized(nn.BatchNorm1d(4, affine=False)), _mean)
_coupled(
    "frozen batch normalization in training mode",
    lambda: _normalized(nn.BatchNorm1d(4).requires_grad_(requires_grad=False)),
    _mean,
)
_coupled("a batch mean inside the model", lambda: _Centered(1.0), _mean)
_coupled("a batch mean of weight 1e-6 inside the model", lambda: _Centered(1e-6), _mean)
_coupled("an in-batch contrastive loss", lambda: nn.Linear(5, 4), _contrast)
_coupled("records mixed in the loop", _three, _mixup)
_coupled("class weights with a mean over the batch", _three, _weighted)
_coupled("a masked mean over the batch", _language_model, _masked, _TOKENS)
_coupled(
    "weights that follow from the position in the batch",
    _three,
    _weighted_by(lambda x: (1 - 2 * (torch.arange(8, device=x.device) % 2))[: len(x)]),
)
_coupled(
    "weights from outside, one for each position in the batch",
    _three,
    _weighted_by(lambda x: torch.tensor(_SIGNS[: len(x)], device=x.device)),
)
_coupled("labels that follow from the position in the batch", _three, _labels_from_outside)
_coupled("weights computed from the whole batch", _three, _weighted_by(_above_mean), _EXTREME)


@case(COUPLING, "refused: a buffer that collects from records", expects="refusal")
def _counting(library: Library) -> None:
    model = set_parameters(_Counting())
    library.clipped_sum(model, _classes(), CROSS_ENTROPY, max_grad_norm=1.0)
    if model.get_buffer("seen").any():
        raise ConformanceFailure("records are stored without noise")


@case(COUPLING, "batch normalization in evaluation mode is exact and keeps its buffers")
def _evaluated(library: Library) -> None:
    def build() -> nn.Module:
        return _normalized(nn.BatchNorm1d(4).eval().requires_grad_(requires_grad=False))

    must_be_exact(library, build, _classes(), CROSS_ENTROPY)
    model = set_parameters(build())
    before = [buffer.clone() for buffer in model.buffers()]
    library.clipped_sum(model, _classes(), CROSS_ENTROPY, max_grad_norm=1.0)
    if not all(torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True)):
        raise ConformanceFailure("its buffers changed")


@case(COUPLING, "ignored tokens of one record do not change the others in a mean over all tokens")
def _ignored_tokens(library: Library) -> None:
    loss = ConformanceLoss(mean=lambda model, batch: _LARGE * _token_mean(model, batch))
    records = (_TOKENS[0], torch.cat([torch.zeros(1, 4, dtype=torch.int64), _TOKENS[1][1:]]))
    must_stay_within(library, _language_model, _TOKENS, [column[1:] for column in _TOKENS], loss)
    must_stay_within(library, _language_model, records, [column[1:] for column in records], loss)


@case(COUPLING, "a mean over the tokens of equally long records is exact")
def _all_tokens(library: Library) -> None:
    loss = ConformanceLoss(mean=_all_tokens_mean, each=_own_tokens_mean)
    must_be_exact(library, _language_model, _TOKENS, loss)


@case(COUPLING, "a mean over each record's own tokens is exact")
def _own_tokens(library: Library) -> None:
    loss = ConformanceLoss.of(_own_tokens_mean)
    must_be_exact(library, _language_model, _TOKENS, loss)


# ----------------------------------------------------------------------------------------------------------------------
# Cases: unusual models are exact — each record's own gradient, clipped — or refused; never silently wrong.
# ----------------------------------------------------------------------------------------------------------------------


EXACTNESS: dict[str, Case] = {}
_Padding = Literal["circular", "reflect"]


def _exact(
    name: str,
    build: Callable[[], nn.Module],
    batch: Batch | None = None,
    loss: ConformanceLoss = CROSS_ENTROPY,
    *,
    expects: Expects = "right",
) -> None:
    """A case whose clipped sum must be the slow one; by default 8 records of 5 features in 3 classes."""
    records = _classes() if batch is None else batch

    @case(EXACTNESS, f"exact: {name}", expects=expects)
    def check(library: Library) -> None:
        must_be_exact(library, build, records, loss)


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + 50 * F.linear(torch.tanh(x), self.l.weight)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(torch.tanh(self.l(x)))


class _Tied(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(6, 9, bias=False)
            self.embed = nn.Embedding(9, 6)
            self.embed.weight = self.head.weight
        else:
            self.embed = nn.Embedding(9, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class _Reading(nn.Module):
    """Reads another layer's matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def _tied_to_a_module() -> nn.Module:
    first = nn.Linear(5, 5)
    return nn.Sequential(first, nn.Tanh(), _Reading(first))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.scale, self.cls = nn.Linear(5, 5), nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.cls.expand(len(x), -1, -1), self.l(x)[:, None]], dim=1)
        return (rows * self.scale).tanh().sum(1)


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(4, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        row = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.head(torch.tanh(self.words(ids) + self.positions(row)))


class _Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        records, steps, _ = x.shape
        return self.l(x.reshape(records * steps, -1)).reshape(records, steps, -1).mean(1)


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        identity = F.relu(self.first(x), inplace=True)
        out = self.second(identity)
        out += identity
        return out


class _Checkpointed(_Twice):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(5, 5), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, self.first(x), use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


class _Last(nn.Module):
    """The output of a recurrent layer or an attention, at its last step."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        out, _ = inner(x, x, x) if isinstance(inner, nn.MultiheadAttention) else inner(x)
        return self.head(out[:, -1])


def _language(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


def _pairs(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - model(batch[1])).square().sum(1)


def _convolutions(padding: _Padding) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=2, padding_mode=padding, dilation=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 4, padding="same"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


_TEXT = (synthetic_integers(9, 6, 4), synthetic_integers(9, 2, 6, 4)[1])
_SERIES = (synthetic_normal(6, 4, 5), synthetic_integers(3, 6))
_exact("a layer called twice", _Twice)
_exact("a matrix used once more by a function", _Functional, expects="either")
_exact("a language model tied, table first", lambda: _Tied(head_first=False), _TEXT, ConformanceLoss.of(_language))
_exact("a language model tied, head first", lambda: _Tied(head_first=True), _TEXT, ConformanceLoss.of(_language))
_exact("a matrix tied to a module of one's own", _tied_to_a_module, expects="either")
_exact("a bare scale and a class token", _Scaled)
_exact("one row of position ids for all records", _Positions, _TEXT, ConformanceLoss.of(_language))
_exact(
    "two branches of a siamese model",
    lambda: nn.Linear(5, 2),
    (synthetic_normal(6, 5), synthetic_normal(2, 6, 5)[1]),
    ConformanceLoss.of(_pairs),
)
_exact("time folded into the batch", _Folded, _SERIES, expects="either")
_exact("in-place activations and residual additions", _InPlace)
_exact("checkpointing", lambda: _Checkpointed(reentrant=False))
_exact("checkpointing, reentrant", lambda: _Checkpointed(reentrant=True), expects="either")
_exact("nn.LSTM", lambda: _Last(nn.LSTM(5, 4, batch_first=True), 4), _SERIES)
_exact("nn.GRU", lambda: _Last(nn.GRU(5, 4, batch_first=True), 4), _SERIES)
_exact(
    "nn.MultiheadAttention",
    lambda: _Last(nn.MultiheadAttention(4, 2, batch_first=True, kdim=4), 4),
    (synthetic_normal(6, 4, 4), synthetic_integers(3, 6)),
)
for _padding in get_args(_Padding):
    _exact(
        f"convolutions with {_padding} padding, groups and dilation",
        lambda p=_padding: _convolutions(p),
        (synthetic_normal(6, 2, 5, 5), synthetic_integers(3, 6)),
    )
_exact(
    "bags of embeddings with duplicate ids",
    lambda: nn.Sequential(nn.EmbeddingBag(9, 5, mode="mean", padding_idx=0), nn.RMSNorm(5), nn.Linear(5, 3)),
    (_TEXT[0], synthetic_integers(3, 6)),
)


# ----------------------------------------------------------------------------------------------------------------------
# Cases: one record moves the clipped sum by at most the clipping norm, and nothing but a private step is taken.
# ----------------------------------------------------------------------------------------------------------------------


SENSITIVITY: dict[str, Case] = {}
_LOSSES = {
    "squared": F.mse_loss,
    "logistic": lambda out, y, **options: F.binary_cross_entropy_with_logits(out, (y > 0).to(out), **options),
    "absolute": F.l1_loss,
    "Huber": F.huber_loss,
}


def _linear() -> nn.Module:
    return nn.Linear(5, 1)


def _loss(name: str) -> ConformanceLoss:
    function = _LOSSES[name]
    return ConformanceLoss(
        mean=lambda model, batch: function(model(batch[0]), batch[1]),
        each=lambda model, batch: function(model(batch[0]), batch[1], reduction="none").flatten(1).mean(1),
    )


def _records(outputs: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = synthetic_normal(16, 5), synthetic_normal(16, outputs)
    x[0] *= factor
    y[0] *= factor
    return x, y


def _of_losses(name: str) -> None:
    @case(SENSITIVITY, f"a record replaced by 1000 times itself moves the sum by at most 2 C: {name} loss, one output")
    def one(library: Library) -> None:
        must_stay_within(library, _linear, _records(1), _records(1, 1000.0), _loss(name), norms=2)

    @case(SENSITIVITY, f"a large record left out moves the sum by at most C: {name} loss, three outputs")
    def three(library: Library) -> None:
        x, y = _records(3, 1000.0)
        must_stay_within(library, _three, (x, y), (x[1:], y[1:]), _loss(name))

    @case(SENSITIVITY, f"the mean of a {name} loss over (B, 1) is the mean over records")
    def mean(library: Library) -> None:
        must_be_exact(library, _linear, _records(1), _loss(name))


for _name in _LOSSES:
    _of_losses(_name)


@case(SENSITIVITY, "targets that broadcast over the batch are refused", expects="refusal")
def _broadcast(library: Library) -> None:
    x, y = _records(1)
    loss = ConformanceLoss.of(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1))
    must_stay_within(library, _linear, (x, y[:, 0]), (x[1:], y[1:, 0]), loss)


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))


class _Noisy(nn.Module):
    """Adds random numbers to its inputs, as augmentations and diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x + 10 * torch.randn_like(x))


def _in_loop(model: nn.Module, x: Tensor) -> Tensor:
    return model(x * torch.bernoulli(torch.full(x.shape, 0.5, device=x.device)))


def _drawn(sentence: str, build: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    loss = ConformanceLoss.of(lambda model, batch: (call(model, batch[0]) - batch[1]).square().mean(1))

    @case(SENSITIVITY, sentence, expects="either")
    def check(library: Library) -> None:
        sums = []
        # Equal numbers for equal positions would give twice the same sum, and one record less another one's numbers.
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(42)
                sums.append(library.clipped_sum(set_parameters(build()), _records(1), loss, max_grad_norm=0.7))
        if distance(*sums) == 0:
            raise ConformanceFailure(
                "equal seeds give equal numbers: one record less gives every later record another one's"
            )


_OF_NO_OTHER = "don't follow from a public seed: one record less moves no other's"
_drawn(
    "dropout masks don't follow from a public seed, under which they belong to positions",
    _dropping,
    lambda model, x: model(x),
)
_drawn(f"random numbers inside a model {_OF_NO_OTHER}", _Noisy, lambda model, x: model(x))
_drawn(f"random masks in the loop {_OF_NO_OTHER}", _linear, _in_loop)


@case(SENSITIVITY, "the state of torch's generator after a step doesn't tell how many records were drawn")
def _told_by_state(library: Library) -> None:
    x, y = _records(1)
    states = []
    for records in ((x, y), (x[1:], y[1:])):
        model = set_parameters(_dropping())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                library.clipped_sum(model, records, _loss("squared"), max_grad_norm=0.7)
            except library.refusals:
                continue
            states.append(torch.get_rng_state())
    if len(states) == 2 and not torch.equal(*states):
        raise ConformanceFailure("neighbors leave different states, which checkpoints keep")


@case(SENSITIVITY, "a step without a clipped backward pass raises and changes nothing")
def _step_alone(library: Library) -> None:
    model = _linear()
    private = library.make_private(model, TensorDataset(*_records(1)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        private.optimizer.step()
    except library.refusals:
        if distance(list(model.parameters()), before) > 0:
            raise ConformanceFailure("it changed them") from None
        return
    finally:
        private.detach()
    raise ConformanceFailure("a gradient that was never clipped reached the parameters")


@case(SENSITIVITY, "the optimizer built first is private or refuses")
def _own_optimizer(library: Library) -> None:
    model = _linear()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    private = library.make_private(model, TensorDataset(*_records(1)), optimizer=own, noise_multiplier=1000.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in private.loader:
        F.mse_loss(private.model(x), y).backward()
        try:
            own.step()
        except library.refusals:
            return
    # Noise of standard deviation 1000/16 on six coordinates is below this once in a million times.
    if distance(list(model.parameters()), before) < 1:
        raise ConformanceFailure("it steps without noise")


@case(SENSITIVITY, "another optimizer over a private parameter is refused")
def _other_optimizer(library: Library) -> None:
    model = nn.Linear(5, 1)
    other = torch.optim.Adam([model.bias], lr=1.0)
    private = library.make_private(model, TensorDataset(*_records(1)))
    for x, y in private.loader:
        F.mse_loss(private.model(x), y).backward()
        private.optimizer.step()
    before = model.bias.detach().clone()
    with suppress(*library.refusals):
        other.step()
    if not torch.equal(model.bias, before):
        raise ConformanceFailure("it steps on gradients that are not charged")


@case(SENSITIVITY, "a noise multiplier of 1000 drowns the model in noise")
def _absurd(library: Library) -> None:
    sizes = []
    for noise_multiplier in (0.1, 1000.0):
        torch.manual_seed(0)
        model = _linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private = library.make_private(
            model, TensorDataset(*_records(1)), optimizer=optimizer, noise_multiplier=noise_multiplier
        )
        for _ in range(3):
            for x, y in private.loader:
                F.mse_loss(private.model(x), y).backward()
                private.optimizer.step()
        private.detach()
        sizes.append(float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm()))
    if not sizes[1] > 5 * sizes[0]:
        raise ConformanceFailure("the weights are not mostly noise")
