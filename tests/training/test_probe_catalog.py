"""A catalog of couplings, each refused, and of independent models, each accepted, in batches as large as training's."""

import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sordino.errors import CoupledRecords, UncapturedParameter, UnsupportedModule
from sordino.gradients import GradientCapture
from sordino.gradients.numerics import product_mode
from sordino.training.fit import fit
from sordino.training.loader import max_batch_size
from sordino.training.plan import Plan
from sordino.training.probing.probe import _replaced_sets, check_record_independence
from sordino.training.probing.probe_runner import ProbeOptions, ProbeRunner, ProbeTask, graph_nodes
from sordino.training.probing.torch_modes import GraphWithoutValues

_MOST = 64
MIX = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.gate = nn.Linear(4, 3), nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def check(model, capture, records, run, **options):
    task = ProbeTask(model=model, recorder=capture, records=records, run=run, options=ProbeOptions(**options))
    check_record_independence(task)


def probe(function, *, reduction="none", records=_MOST, seed=0):
    torch.manual_seed(seed)
    model = Net(function)
    capture = GradientCapture(model)
    batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)

    def run(made_up):
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction=reduction)

    try:
        check(model, capture, batch, run, reduction=reduction, num_records=records)
    finally:
        capture.detach()


def pair(first, second, *, above=1, when=lambda _: True):
    """Record `first` is added to record `second` in batches of more than `above` records, where `when` says so."""

    def forward(model, x):
        if len(x) > above and when(x[first]):
            x = x.clone()
            x[second] = x[second] + 0.5 * x[first]
        return model.inner(x)

    return forward


def is_large(row):
    return float(row.abs().max()) > 100


def experts(room):
    def forward(model, x):
        share = model.gate(x).softmax(1)
        chosen = F.one_hot(share.argmax(1), 2)
        kept = ((chosen.cumsum(0) * chosen).sum(1) <= room).float()
        mixed = sum((chosen[:, j] * share[:, j] * kept)[:, None] * expert(x) for j, expert in enumerate(model.experts))
        return mixed + model.inner(x)

    return forward


def without_repeats(model, x):
    seen, first = set(), []
    for row in x.tolist():
        first.append(tuple(row) not in seen)
        seen.add(tuple(row))
    return model.inner(x) * torch.tensor(first)[:, None]


def remembers(model, x):
    factor = 1.0 + 0.1 * vars(model).get("last", 0.0)
    vars(model)["last"] = float(x.detach().mean())
    return model.inner(x) * factor


def centered(when):
    return lambda model, x: model.inner(x - x.mean(0) if when(len(x)) else x)


COUPLED = {
    "first to last": pair(0, -1),
    "last to first": pair(-1, 0),
    "adjacent": pair(3, 4),
    "adjacent, backwards": pair(4, 3),
    "far apart, in large batches": pair(17, 35, above=40),
    "far apart, backwards": pair(35, 17, above=40),
    "large first to last": pair(0, -1, above=20, when=is_large),
    "large last to first": pair(-1, 0, above=20, when=is_large),
    "one large record to another": pair(41, 12, above=50, when=is_large),
    "every seventh": lambda m, x: m.inner(torch.cat([x[:7], x[7:] + 0.1 * x[:-7]]) if len(x) > 20 else x),
    "every seventh, backwards": lambda m, x: m.inner(torch.cat([x[:-7] + 0.1 * x[7:], x[-7:]]) if len(x) > 20 else x),
    "experts with room for 2": experts(2),
    "experts with room for 20": experts(20),
    "experts with room for 30": experts(30),
    "more than 16 records": centered(lambda count: count > 16),
    "more than 60 records": centered(lambda count: count > 60),
    "fewer than 5 records": centered(lambda count: 1 < count < 5),
    "between 20 and 30 records": centered(lambda count: 20 < count < 30),
    "cumulative sum": lambda m, x: m.inner(x.cumsum(0)),
    "running maximum": lambda m, x: m.inner(x.cummax(0).values),
    "sorted, in large batches": lambda m, x: m.inner(x.sort(0).values if len(x) > 20 else x),
    "rank": lambda m, x: m.inner(x) * (1 + 0.01 * x[:, 0].argsort().argsort()[:, None]),
    "without repeats": without_repeats,
    "median": lambda m, x: m.inner(x - x.median(0).values),
    "six large records": lambda m, x: m.inner(x) * (2.0 if int((x.abs().amax(1) > 100).sum()) > 5 else 1.0),
    "any NaN": lambda m, x: m.inner(x) * (2.0 if bool(x.isnan().any()) else 1.0),
    "sign of the whole": lambda m, x: m.inner(x) * torch.sign(x.sum().detach() + 1e-3),
    "left out for a negative one": lambda m, x: m.inner(x) * (0.0 if len(x) > 20 and bool((x < -50).any()) else 1.0),
    "state": remembers,
    "a random other record": lambda m, x: m.inner(x + x[torch.randint(len(x), (len(x),))]),
    "random times by the number of records": lambda m, x: m.inner(x) * torch.randint(len(x), (len(x), 1)),
    "one choice out of all": lambda m, x: m.inner(x + x[torch.ones(len(x)).multinomial(1)]),
    "shuffled": lambda m, x: m.inner(0.7 * x + 0.3 * x[torch.randperm(len(x))]),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_coupling_of_any_pair_and_from_any_threshold_on_is_refused(name, reduction):
    with pytest.raises(CoupledRecords):
        probe(COUPLED[name], reduction=reduction)


class Backwards(torch.autograd.Function):
    """Passes records on as they are; one record's gradient gets a part of another's."""

    @staticmethod
    def forward(ctx, x, to, source, weight):
        ctx.to, ctx.source, ctx.weight = to, source, weight
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if len(gradient) > 16:
            gradient[ctx.to] += ctx.weight * gradient[ctx.source]
        return gradient, None, None, None


@pytest.mark.parametrize("weight", [1.0, 0.05])
@pytest.mark.parametrize(("to", "source"), [(12, 13), (13, 12), (11, 13), (3, 1), (0, 16), (40, 62)])
def test_a_coupling_of_gradients_alone_in_large_batches_is_refused(to, source, weight):
    with pytest.raises(CoupledRecords):
        probe(lambda model, x: model.inner(torch.tanh(Backwards.apply(model.inner(x), to, source, weight) @ MIX)))


def of_most(y, label, least):
    return 0.5 if int((y == label).sum()) >= least else 1.0


@pytest.mark.parametrize(("label", "least"), [(0, 45), (1, 40), (1, 47), (2, 25), (3, 45), (5, 3)])
def test_a_loss_that_changes_with_the_number_of_records_of_a_label_is_refused(label, least):
    def losses(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none") * of_most(y, label, least)

    plan = Plan(
        noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.25, steps=1, expected_batch_size=30.0, delta=1e-5
    )
    with pytest.raises(CoupledRecords):
        fit(nn.Linear(4, 6), losses, (torch.randn(120, 4), torch.randint(0, 6, (120,))), plan, progress=False)


LARGE_LOOKS = {
    "features and labels": (lambda: nn.Linear(4, 3), torch.zeros(2, 4)),
    "ids and labels": (lambda: nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 2)), torch.zeros(2, dtype=torch.long)),
    "chance": (lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 3)), torch.zeros(2, 4)),
}


@pytest.mark.parametrize("name", LARGE_LOOKS)
def test_no_large_batch_is_looked_at_twice(name, monkeypatch):
    torch.manual_seed(0)
    build, features = LARGE_LOOKS[name]
    model, batch = build(), (features, torch.zeros(2, dtype=torch.long))
    capture, look, seen = GradientCapture(model), ProbeRunner.look, []

    def noted(self, made_up, count, **options):
        if count == _MOST:
            seen.append(made_up)
        return look(self, made_up, count, **options)

    def run(made_up):
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction="none")

    monkeypatch.setattr(ProbeRunner, "look", noted)
    try:
        check(model, capture, batch, run, num_records=_MOST)
    finally:
        capture.detach()
    assert len(seen) > 2
    for one, other in itertools.combinations(seen, 2):
        assert not all(map(torch.equal, one, other))


def all_experts(model, x):
    share = model.gate(x).softmax(1)
    chosen = share.argmax(1)
    return model.inner(x) + sum(
        ((chosen == j).float() * share[:, j])[:, None] * expert(x) for j, expert in enumerate(model.experts)
    )


def in_half(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model.inner(torch.tanh(x)).float()


def chosen(draw):
    """A record's number is drawn for it, as the time of a diffusion or a choice of an expert."""
    return lambda model, x: model.inner(x) * (1 + draw(x).reshape(len(x), -1).float().mean(1, keepdim=True))


INDEPENDENT = {
    "random times": chosen(lambda x: torch.randint(0, 1000, (len(x),))),
    "random times, in place": chosen(lambda x: torch.empty(len(x)).random_(5)),
    "random times like others": chosen(lambda x: torch.randint_like(x, 3, 7)),
    "choices": chosen(lambda x: x.softmax(1).multinomial(1)),
    "several choices": chosen(lambda x: x.softmax(1).multinomial(2)),
    "choices with replacement": chosen(lambda x: x.softmax(1).multinomial(7, replacement=True)),
    "categories": chosen(lambda x: torch.distributions.Categorical(logits=x).sample()),
    "gumbel softmax": lambda m, x: F.gumbel_softmax(m.inner(x)),
    "exponential": chosen(lambda x: torch.empty_like(x).exponential_(2.0)),
    "Laplace": chosen(lambda x: torch.distributions.Laplace(x, 1.0).rsample()),
    "linear": lambda m, x: m.inner(x),
    "normalized": lambda m, x: m.inner(F.layer_norm(x, (4,))),
    "dropout": lambda m, x: m.inner(F.dropout(x, 0.5)),
    "experts with room for all": all_experts,
    "clamped": lambda m, x: m.inner(x.clamp(-1, 1)),
    "a branch within each record": lambda m, x: torch.where(x.sum(1, keepdim=True) > 2, m.inner(x), m.inner(-x)),
    "half precision": in_half,
}


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("records", [1, 2, 3, 20, _MOST])
def test_independent_records_are_accepted_in_batches_of_any_size(name, reduction, records):
    probe(INDEPENDENT[name], reduction=reduction, records=records)


def test_a_model_that_meets_one_record_at_a_time_is_never_given_more():
    seen = []

    def forward(model, x):
        seen.append(len(x))
        return model.inner(x - x.mean(0))

    probe(forward, records=1)
    assert set(seen) == {1}
    with pytest.raises(CoupledRecords):
        probe(forward, records=2)
    assert max(seen) == 2


class Noisy(torch.autograd.Function):
    """A backward pass that adds up in any order: now and then an entry is off by one unit in the last place."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        bits = gradient.contiguous().view(torch.int16).clone()
        off = torch.rand(bits.shape, generator=_ORDER) < 0.05
        return torch.where(off, bits + 1, bits).view(torch.bfloat16)


_ORDER = torch.Generator().manual_seed(1)


def noisy(coupling):
    def forward(model, x):
        hidden = Noisy.apply(torch.tanh(model.inner(x)).bfloat16()).float()
        return hidden + coupling * hidden.mean(0) if coupling else hidden

    return forward


@pytest.mark.parametrize("coupling", [0.0, 0.3])
def test_rounding_that_does_not_repeat_is_no_coupling_and_hides_none(coupling):
    if not coupling:
        probe(noisy(coupling))
        return
    with pytest.raises(CoupledRecords):
        probe(noisy(coupling))


class Atomic(torch.autograd.Function):
    """A backward pass that adds up in bfloat16 in any order: entries are off by one unit in the last place."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        bits = gradient.contiguous().view(torch.int16).clone()
        return (bits + torch.randint(-1, 2, bits.shape, generator=_ORDER, dtype=torch.int16)).view(torch.bfloat16)


def atomic(couple):
    def forward(model, x):
        return couple(Atomic.apply(torch.tanh(model.inner(x)).bfloat16()).float())

    return forward


COUPLINGS_IN_HALF = {
    "a mean": lambda h: h - h.mean(0),
    "a small part of the mean": lambda h: h + 0.2 * h.mean(0),
    "the largest": lambda h: h / h.abs().amax(0, keepdim=True).clamp(min=0.1),
    "the record before": lambda h: h + 0.5 * h.roll(1, 0),
    "a threshold": lambda h: h * (2.0 if bool((h.abs() > 0.9).sum() > 1) else 1.0),
}


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_pass_with_atomics_in_half_precision_is_no_coupling(seed):
    probe(atomic(lambda h: h), seed=seed)


@pytest.mark.parametrize("name", COUPLINGS_IN_HALF)
def test_couplings_are_found_behind_a_backward_pass_with_atomics(name):
    with pytest.raises(CoupledRecords, match="independent"):
        probe(atomic(COUPLINGS_IN_HALF[name]))


def other_kernels(couple):
    """Products of single precision in TF32, rounded in another way for each number of records."""

    def forward(model, x):
        generator = torch.Generator().manual_seed(len(x))
        hidden = model.inner(x)
        return couple(hidden * (1 + 2.0**-7 * torch.empty(hidden.shape[1]).uniform_(0.5, 1, generator=generator)))

    return forward


@contextmanager
def products_in(matmul, conv="ieee"):
    """What torch may take on this processor's matrix units."""
    backends = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, mode in zip(backends, (matmul, conv), strict=True):
            backend.fp32_precision = mode
        yield
    finally:
        for backend, mode in zip(backends, before, strict=True):
            backend.fp32_precision = mode


def test_the_rounding_of_tf32_is_no_coupling_where_torch_may_take_it():
    with pytest.raises(CoupledRecords):
        probe(other_kernels(lambda h: h))
    with products_in("tf32"):
        probe(other_kernels(lambda h: h))
        for name in ("a mean", "the record before"):
            with pytest.raises(CoupledRecords, match="independent"):
                probe(other_kernels(COUPLINGS_IN_HALF[name]))


@pytest.mark.parametrize(
    ("matmul", "conv", "expected"), [("ieee", "ieee", "full"), ("bf16", "ieee", "bf16"), ("ieee", "tf32", "tf32")]
)
def test_what_products_are_taken_in_is_what_torch_may(matmul, conv, expected):
    with products_in(matmul, conv):
        assert product_mode(torch.device("cpu"), convolutions=True) == expected
        assert product_mode(torch.device("cpu"), convolutions=False) == ("full" if matmul == "ieee" else expected)


class Compared(nn.Module):
    """Returns what it makes of each record, and of each pair of them, as two-tower models do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        own = self.inner(x)
        return own, own @ own.t()


def compared(use, reduction):
    torch.manual_seed(0)
    model, batch = Compared(), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    capture = GradientCapture(model)

    def run(made_up):
        losses = F.cross_entropy(model(made_up[0])[0], made_up[1], reduction="none")
        losses = losses * (1 + 0.1 * use(model(made_up[0])[1])) if use else losses
        return losses if reduction == "none" else losses.mean()

    try:
        check(model, capture, batch, run, reduction=reduction, num_records=20)
    finally:
        capture.detach()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_an_output_that_compares_records_matters_only_where_a_loss_is_made_of_it(reduction):
    compared(None, reduction)
    for use in (lambda pairs: pairs.tanh().mean(1), lambda pairs: pairs.detach().tanh().mean(1)):
        with pytest.raises(CoupledRecords):
            compared(use, reduction)


# --- gradients that are captured in part ---------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return torch.sign(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Binary(nn.Linear):
    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight), self.bias)


_TERMS = {}


class Balanced(nn.Module):
    """Experts with a term for the loss, which is left somewhere instead of returned."""

    def __init__(self, leave):
        super().__init__()
        self.gate, self.weight = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4, 4))
        self.leave = leave

    def forward(self, x):
        share = (x @ self.gate).softmax(-1)
        self.leave(self, share.square().sum(-1))
        return torch.einsum("bd,edf,be->bf", x, self.weight, share)


class WithTerm(nn.Module):
    def __init__(self, leave, take):
        super().__init__()
        self.inner, self.head, self.take = Balanced(leave), nn.Linear(4, 2), take

    def forward(self, x):
        return self.head(self.inner(x)), self.take(self.inner)


def plain_loss(model, x, y):
    out = model(x)
    if isinstance(out, tuple):
        return F.cross_entropy(out[0], y, reduction="none") + 5 * out[1]
    return F.cross_entropy(out, y, reduction="none")


PARTLY = {
    "straight through": lambda: Binary(4, 2),
    "attribute": lambda: WithTerm(lambda m, t: setattr(m, "term", t), lambda m: m.term),
    "list": lambda: WithTerm(lambda m, t: m.__dict__.setdefault("terms", []).append(t), lambda m: m.terms.pop()),
    "global": lambda: WithTerm(lambda m, t: _TERMS.update(term=t), lambda m: _TERMS.pop("term")),
}


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.01])
def test_a_gradient_that_is_captured_in_part_is_refused_by_name(monkeypatch, factor):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    capture = GradientCapture(model)
    whole = capture.add_weighted_sums

    def partly(weights, *, into):
        whole(weights, into=into)
        if model.weight in into:
            into[model.weight] = factor * into[model.weight]

    monkeypatch.setattr(capture, "add_weighted_sums", partly)
    batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(UncapturedParameter, match="weight"):
        check(model, capture, batch, lambda made_up: plain_loss(model, *made_up))
    capture.detach()


@pytest.mark.parametrize("name", PARTLY)
def test_fit_takes_its_whole_gradient(name):
    torch.manual_seed(0)
    model, x, y = PARTLY[name](), torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 1, 0])
    wanted = torch.autograd.grad(plain_loss(model, x, y).mean(), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plan = Plan(noise_multiplier=0.0, max_grad_norm=1e6, sample_rate=1.0, steps=1, expected_batch_size=6.0, delta=1e-5)
    fit(model, plain_loss, (x, y), plan, optimizer=lambda held: torch.optim.SGD(held, lr=1.0), progress=False)
    for parameter, old, gradient in zip(model.parameters(), before, wanted, strict=True):
        assert torch.allclose(old - parameter.detach(), gradient, atol=1e-4)


# --- failures on synthetic records -----------------------------------------------------------------------------------


def test_a_failure_of_the_model_is_told_as_what_it_is_and_public_batch_helps():
    class Picky(nn.Linear):
        def forward(self, x):
            if not bool((x > 1).all()):
                raise ValueError("only features above 1")
            return super().forward(x)

    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=2, expected_batch_size=5.0, delta=1e-5)
    torch.manual_seed(0)
    data = torch.rand(10, 4) + 2, torch.arange(10) % 2
    with pytest.raises(UnsupportedModule, match=r"ValueError: only features above 1.*public_batch"):
        fit(Picky(4, 2), plain_loss, data, plan, progress=False)
    public = torch.rand(6, 4) + 3, torch.arange(6) % 2
    assert fit(Picky(4, 2), plain_loss, data, plan, progress=False, public_batch=public).steps == 2


@pytest.mark.parametrize(("poisson", "most"), [(True, 96), (False, 64)])
def test_the_largest_batch_follows_from_public_numbers(poisson, most):
    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        steps=5,
        expected_batch_size=64.0,
        delta=1e-5,
        poisson_sampling=poisson,
        neighboring_relation="add_or_remove_one" if poisson else "replace_one",
    )
    assert max_batch_size(plan, None) == most
    assert max_batch_size(plan, 8) == 8


# --- what the forward pass does not show ----------------------------------------------------------------------------


def met_late():
    """Records of which only a late experiment replaces the first and keeps the others, which are ordinary."""
    sets = [set(replaced) for replaced in _replaced_sets(_MOST)]
    ordinary = [place for place in range(_MOST) if place % 7 in {0, 2, 4, 6}]
    for source, to, donor in itertools.permutations(ordinary, 3):
        meeting = [number for number, one in enumerate(sets) if source in one and to not in one and donor not in one]
        if meeting and meeting[0] >= 3:
            return source, to, donor
    raise AssertionError


SOURCE, TO, DONOR = met_late()


def is_on(x):
    return len(x) > 40 and is_large(x[SOURCE].detach())


def mixed(gradient):
    gradient = gradient.clone()
    gradient[TO] += 0.5 * gradient[DONOR]
    return gradient


class MixesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return mixed(gradient)


def added_and_taken_away(h, cut):
    """`h` as it is; one record's loss has a part in the gradient of another one."""
    other = torch.zeros_like(h)
    other[TO] = 0.5 * h[DONOR]
    return h + (other - cut(other))


def by_hook(h):
    if h.requires_grad:
        h.register_hook(mixed)
    return h


def by_node(h):
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: (mixed(gradients[0]),))
    return h


def without_gradient(other):
    with torch.no_grad():
        return other * 1.0


class Hooked(nn.Module):
    def forward(self, h):
        return h.clone()


def by_module(h):
    layer = Hooked()
    layer.register_full_backward_hook(lambda _module, gradients, _: (mixed(gradients[0]),))
    return layer(h)


HIDDEN = {
    "an autograd function": MixesGradients.apply,
    "detached": lambda h: added_and_taken_away(h, torch.Tensor.detach),
    "data": lambda h: added_and_taken_away(h, lambda other: other.data),
    "without gradient": lambda h: added_and_taken_away(h, without_gradient),
    "numbers": lambda h: added_and_taken_away(h, lambda other: torch.tensor(other.tolist())),
    "a hook on a tensor": by_hook,
    "a hook on a node": by_node,
    "a hook on a module": by_module,
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_coupling_that_no_forward_pass_shows_is_refused_for_every_pair(name, reduction):
    """One record is large, in a large batch: only then do others meet, and only in gradients."""

    def forward(model, x):
        h = model.inner(x)
        return model.inner(torch.tanh(HIDDEN[name](h) if is_on(x) else h) @ MIX)

    with pytest.raises(CoupledRecords):
        probe(forward, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["linear", "normalized", "dropout", "clamped", "experts with room for all"])
def test_gradients_of_ordinary_models_follow_from_what_the_forward_pass_gives(name, reduction, monkeypatch):
    """So that most experiments need no backward pass."""
    seen = []
    look = ProbeRunner.look

    def noted(self, *args, **options):
        rows = look(self, *args, **options)
        seen.append(self.gradients_follow)
        return rows

    monkeypatch.setattr(ProbeRunner, "look", noted)
    probe(INDEPENDENT[name], reduction=reduction)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("records", [1, 2, 3, 20])
def test_what_a_module_remembers_is_refused_in_batches_of_any_size(records):
    with pytest.raises(CoupledRecords):
        probe(remembers, records=records)


class BehindZero(nn.Module):
    """Adds, with weights that are zero at first, features less their mean in batches of more than `above` records."""

    def __init__(self, above):
        super().__init__()
        self.inner, self.further, self.above = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), above
        nn.init.zeros_(self.further.weight)

    def forward(self, x):
        return self.inner(x) + self.further(x - x.mean(0) if len(x) > self.above else x)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("above", [1, 5, 12, 40, 62, _MOST])
def test_a_coupling_behind_weights_that_are_zero_is_refused_by_its_gradients(above, reduction):
    torch.manual_seed(0)
    model = BehindZero(above)
    capture = GradientCapture(model)

    def run(made_up):
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction=reduction)

    batch = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    try:
        with nullcontext() if above == _MOST else pytest.raises(CoupledRecords):
            check(model, capture, batch, run, reduction=reduction, num_records=_MOST)
    finally:
        capture.detach()


def slope(x):
    """The derivative of the features' cubes, by a graph of the model's own."""
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        return torch.autograd.grad((inner**3).sum(), inner)[0]


def slope_by_function(x):
    return torch.func.grad(lambda inner: (inner**3).sum())(x)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("derivative", [slope, slope_by_function])
@pytest.mark.parametrize("above", [None, 40])
def test_a_model_that_takes_derivatives_itself_is_probed_as_others_are(derivative, above, reduction):
    def forward(model, x):
        if above is not None and len(x) > above:
            x = x + 0.1 * x.roll(17, 0)
        return model.inner(derivative(x))

    with nullcontext() if above is None else pytest.raises(CoupledRecords):
        probe(forward, reduction=reduction)


def test_a_graph_without_values_has_its_nodes_and_tells_when_it_is_read():
    x, graph = torch.ones(3, requires_grad=True), GraphWithoutValues()
    with graph:
        first = (x.exp() * x).sum()
        graph.keeps = lambda: True
        second = (x.exp() * x).sum()
    assert {type(node) for node in graph_nodes(first)} == {type(node) for node in graph_nodes(second)}
    torch.testing.assert_close(torch.autograd.grad(second, x)[0], torch.full((3,), 2 * torch.e))
    assert not graph.is_read
    with pytest.raises(RuntimeError, match="not kept"):
        torch.autograd.grad(first, x)
    assert graph.is_read


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_looks_at_large_batches_of_ordinary_models_keep_no_values_and_come_once(reduction, monkeypatch):
    look, graphs = ProbeRunner._look, []

    def noted(self, made_up, count, **options):
        if count == _MOST and options["gradients"]:
            graphs.append(options.get("graph"))
        return look(self, made_up, count, **options)

    monkeypatch.setattr(ProbeRunner, "_look", noted)
    probe(INDEPENDENT["linear"], reduction=reduction)
    # Every other one replaced, then a code of eight bits, of which one experiment compares gradients instead; a loss
    # that is reduced has one more, of the batch as it is.
    assert len(graphs) == (8 if reduction == "none" else 9)
    assert None not in graphs


class TwoTowers(nn.Module):
    """Holds a parameter itself, and returns a comparison of all pairs that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        one, other = self.first(x), self.second(x)
        return one @ other.t() * self.scale, one * self.scale, other


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_outputs_that_compare_records_are_left_out_where_the_model_itself_holds_parameters(reduction):
    torch.manual_seed(0)
    model, batch = TwoTowers(), (torch.zeros(2, 4),)
    capture = GradientCapture(model)

    def run(made_up):
        _, one, other = model(made_up[0])
        losses = F.softplus(-(one * other).sum(1))
        return losses if reduction == "none" else losses.mean()

    try:
        check(model, capture, batch, run, reduction=reduction, num_records=20)
    finally:
        capture.detach()


def test_a_record_whose_outputs_sum_to_nothing_is_compared_as_others_are(monkeypatch):
    """An LSTM is computed in another way while it is captured: rounding, which is large beside a sum of zero."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 3, batch_first=True)
    capture = GradientCapture(model)

    def run(made_up):
        hidden, _ = model(made_up[0])
        return (hidden - hidden.sum(2, keepdim=True) / 3).square().mean((1, 2))

    try:
        check(model, capture, (torch.zeros(2, 5, 4),), run, num_records=20)
    finally:
        capture.detach()


class Placed(nn.Module):
    """Holds a parameter that all records share, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.place, self.inner, self.drop = nn.Parameter(torch.ones(1, 4)), nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.inner(self.drop(x + self.place))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_model_that_holds_parameters_and_draws_numbers_is_captured_while_its_outputs_are_looked_at(reduction):
    torch.manual_seed(0)
    model, batch = Placed(), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    capture = GradientCapture(model)

    def run(made_up):
        return F.cross_entropy(model(made_up[0]), made_up[1], reduction=reduction)

    try:
        check(model, capture, batch, run, reduction=reduction, num_records=20)
    finally:
        capture.detach()


class Held:
    """An output that is no tree of tensors."""

    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("above", [None, 0, 40])
def test_records_are_compared_where_the_model_returns_an_object_of_its_own(above, reduction):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return Held(self.inner(x if above is None or len(x) <= above else x - x.mean(0)))

    torch.manual_seed(0)
    model, batch = Wrapped(), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    capture = GradientCapture(model)

    def run(made_up):
        return F.cross_entropy(model(made_up[0]).logits, made_up[1], reduction=reduction)

    try:
        with nullcontext() if above is None else pytest.raises(CoupledRecords):
            check(model, capture, batch, run, reduction=reduction, num_records=_MOST)
    finally:
        capture.detach()
