"""One record at a time by plain autograd: exact for models that no capture reads, under every policy of a plan."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from oracles import clipped_sum, per_record_gradients, relative_error
from sordino import NeighboringRelation, Plan, PrivacyEngine, fit
from sordino.clipping import AdaClip, AutomaticClipping, GroupedClipping, QuantileClipping
from sordino.definitions import PrivacyUnit
from sordino.errors import (
    CoupledRecords,
    InvalidArgument,
    LossShapeError,
    PrivacyError,
    RecordCountMismatch,
    UncapturedParameter,
    UnsupportedModule,
)
from sordino.gradients import GradientCapture, OneByOne
from sordino.mechanisms.correlated import FixedEpochOrder, optimize_banded
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedClipping
from sordino.training import CorrelatedNoise, LossRelease, PerformanceOptions, UnitAssignment

RECORDS, TOKENS, WIDTH, CLASSES, C = 12, 5, 4, 3, 0.05
ALONE = PerformanceOptions(gradients="one-by-one")


class Folding(nn.Module):
    """Records and positions become rows of one table."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        rows = torch.tanh(self.inner(x.reshape(-1, WIDTH)))
        return self.outer(rows).view(len(x), -1, CLASSES).mean(1)


class Routing(nn.Module):
    """Each token goes to the expert that its values choose; experts see as many tokens as there are."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights = self.gate(tokens).softmax(1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = weights.argmax(1) == number
            mixed[chosen] = expert(tokens[chosen]) * weights[chosen, number : number + 1]
        return self.out(mixed.view_as(x).mean(1))


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.5


class Custom(nn.Module):
    """A weight behind an autograd function of one's own, and a loss term left in an attribute."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(CLASSES, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.extra = None

    def forward(self, x):
        hidden = self.inner(x.mean(1))
        self.extra = (self.weight * hidden[:, None]).square().mean((1, 2))
        return F.linear(hidden, _Sign.apply(self.weight))


class Shared(nn.Module):
    """One table for input and output, used functionally, with a parametrized layer between."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        hidden = self.layer(torch.einsum("btd,de->bte", x, self.table))
        return self.head(torch.einsum("bte,de->btd", hidden, self.table).mean(1))


MODELS = [Folding, Routing, Custom, Shared]


def losses(model, x, y):
    found = F.cross_entropy(model(x), y, reduction="none")
    extra = getattr(model, "extra", None)
    return found if extra is None else found + extra


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, TOKENS, WIDTH, generator=generator), torch.randint(
        CLASSES, (RECORDS,), generator=generator
    )


def made(kind):
    torch.manual_seed(1)
    return kind()


def plan(**options):
    wanted = {
        "noise_multiplier": 0.0,
        "max_grad_norm": C,
        "sample_rate": 1.0,
        "steps": 1,
        "expected_batch_size": float(RECORDS),
        "delta": 1e-5,
    }
    return Plan(**{**wanted, **options})


SGD = partial(torch.optim.SGD, lr=1.0)


def moved(model, before):
    """What one step of plain SGD moved, times the divisor: the clipped sum."""
    return [RECORDS * (old - new).detach() for old, new in zip(before.parameters(), model.parameters(), strict=True)]


def expected(model, bound=C):
    return clipped_sum(per_record_gradients(model, lambda twin, one: losses(twin, *one).sum(), data()), bound)


def assert_close(got, wanted, tolerance=1e-4):
    size = max(float(one.abs().max()) for one in wanted)
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other, floor=size) <= tolerance


@pytest.mark.parametrize("kind", MODELS)
def test_fit_is_exact(kind):
    model = made(kind)
    before = copy.deepcopy(model)
    result = fit(model, losses, data(), plan(), optimizer=SGD, progress=False, performance=ALONE)
    assert result.gradients == "one-by-one"
    assert_close(moved(model, before), expected(before))


@pytest.mark.parametrize("kind", [Folding, Routing, Shared])
@pytest.mark.parametrize("with_criterion", [False, True])
def test_own_loop_is_exact(kind, with_criterion):
    model = made(kind)
    before = copy.deepcopy(model)
    engine = PrivacyEngine(gradients="one-by-one")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=SGD(model.parameters()),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=RECORDS),
        noise_multiplier=0.0,
        max_grad_norm=C,
        microbatch_size=8,
        criterion=F.cross_entropy if with_criterion else None,
    )
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    assert sizes == [1] * RECORDS
    assert_close(moved(model, before), expected(before))


# --- what "auto" takes by itself ---------------------------------------------------------------------------------


def test_auto_takes_one_at_a_time_where_the_model_cannot_be_captured(caplog):
    model = made(Folding)
    before = copy.deepcopy(model)
    with pytest.raises(RecordCountMismatch):
        fit(model, losses, data(), plan(), progress=False, performance=PerformanceOptions(gradients="captured"))
    with caplog.at_level(logging.WARNING, logger="sordino"):
        result = fit(model, losses, data(), plan(), optimizer=SGD, progress=False)
    assert result.gradients == "one-by-one"
    assert "one record at a time" in caplog.text
    assert_close(moved(model, before), expected(before))


def test_auto_stays_with_the_capture_where_it_works(caplog):
    model = nn.Sequential(nn.Flatten(), nn.Linear(TOKENS * WIDTH, CLASSES))
    result = fit(model, losses, data(), plan(), progress=False)
    assert result.gradients == "captured"
    assert not caplog.records


class _Records(Dataset):
    def __len__(self):
        return RECORDS

    def __getitem__(self, place):
        x, y = data()
        return x[place], y[place]


def test_auto_changes_at_the_first_batch_of_a_data_set_whose_form_is_not_known_before():
    model = made(Folding)
    before = copy.deepcopy(model)
    result = fit(model, losses, _Records(), plan(), optimizer=SGD, progress=False)
    assert result.gradients == "one-by-one"
    assert result.charged_steps == 1
    assert_close(moved(model, before), expected(before))


class _Contrasting(nn.Module):
    """Every record is compared with the others of its batch, over rows that are folded."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x.reshape(-1, WIDTH)).view_as(x).mean(1)


def _contrast(model, x, y):
    del y
    found = model(x)
    return F.cross_entropy(found @ found.T, torch.arange(len(x)), reduction="none")


class _Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        found = self.inner(x.reshape(-1, WIDTH)).view(*x.shape[:2], CLASSES).mean(1)
        return found - found.mean(0) if len(x) > 1 else found


@pytest.mark.parametrize(("model", "loss"), [(_Contrasting, _contrast), (_Centered, losses)])
def test_auto_never_splits_records_that_a_batch_couples(model, loss):
    with pytest.raises((CoupledRecords, RecordCountMismatch)):
        fit(made(model), loss, data(), plan(), progress=False)


def test_a_loss_that_compares_records_is_refused_one_at_a_time():
    with pytest.raises(CoupledRecords, match="by itself"):
        fit(made(_Contrasting), _contrast, data(), plan(), progress=False, performance=ALONE)


# --- refusals name it where it works ------------------------------------------------------------------------------


def in_a_loop(model, loss, **options):
    engine = PrivacyEngine(**options)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=SGD(model.parameters()),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=RECORDS),
        noise_multiplier=0.0,
        max_grad_norm=C,
    )
    for x, y in loader:
        loss(model, x, y).mean().backward()
        optimizer.step()


def by_capture(model, loss, gradients="captured"):
    return fit(
        model, loss, data(), plan(), optimizer=SGD, progress=False, performance=PerformanceOptions(gradients=gradients)
    )


@pytest.mark.parametrize("kind", [Folding, Routing])
@pytest.mark.parametrize("train", [in_a_loop, by_capture])
def test_a_refusal_to_capture_names_one_record_at_a_time_and_the_advice_works(kind, train):
    model = made(kind)
    before = copy.deepcopy(model)
    with pytest.raises(PrivacyError, match='gradients="one-by-one"'):
        train(model, losses)
    model = copy.deepcopy(before)
    train(model, losses, gradients="one-by-one")
    assert_close(moved(model, before), expected(before))


def test_a_refusal_does_not_advise_what_would_not_work():
    with pytest.raises(PrivacyError) as caught:
        by_capture(made(_Contrasting), _contrast)
    assert "one-by-one" not in str(caught.value)
    # Before the loss is known the advice comes with its condition.
    with pytest.raises(PrivacyError, match="if the loss takes every record by itself"):
        in_a_loop(made(_Contrasting), _contrast)
    with pytest.raises(CoupledRecords, match="by itself"):
        in_a_loop(made(_Contrasting), _contrast, gradients="one-by-one")


# --- what one record at a time must still refuse -----------------------------------------------------------------


class _Counting(nn.Module):
    """Each record's output depends on how many came before, by an attribute or a buffer."""

    def __init__(self, buffer):
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)
        if buffer:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = 0

    def forward(self, x):
        self.seen = self.seen + 1
        return self.inner(x.mean(1)) / self.seen


class _Trailing(nn.Module):
    """The record before has a say."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, CLASSES), None

    def forward(self, x):
        found = self.inner(x.mean(1))
        before, self.last = self.last, x.mean().detach()
        return found if before is None else found * before


class _Marked(nn.Module):
    """One unusual record changes the module for good."""

    def __init__(self):
        super().__init__()
        self.inner, self.factor = nn.Linear(WIDTH, CLASSES), 1.0

    def forward(self, x):
        if float(x.abs().max()) > 100:
            self.factor = 2.0
        return self.inner(x.mean(1)) * self.factor


@pytest.mark.parametrize(
    "model", [partial(_Counting, buffer=True), partial(_Counting, buffer=False), _Trailing, _Marked]
)
def test_a_module_that_remembers_records_is_refused(model):
    with pytest.raises(CoupledRecords):
        fit(made(model), losses, data(), plan(), progress=False, performance=ALONE)


def test_batch_normalization_is_refused_where_it_stores_statistics_and_exact_where_not():
    def build(**options):
        return nn.Sequential(
            nn.Conv1d(TOKENS, 3, 1), nn.BatchNorm1d(3, **options), nn.Flatten(), nn.Linear(12, CLASSES)
        )

    with pytest.raises(UnsupportedModule):
        fit(build(), losses, data(), plan(), progress=False, performance=ALONE)
    with pytest.raises(CoupledRecords):
        fit(build(track_running_stats=False), losses, data(), plan(), progress=False)
    model = build(track_running_stats=False)
    before = copy.deepcopy(model)
    fit(model, losses, data(), plan(), optimizer=SGD, progress=False, performance=ALONE)
    assert_close(moved(model, before), expected(before), tolerance=1e-4)


def test_a_learner_outside_the_model_is_refused():
    outside = nn.Linear(CLASSES, CLASSES)

    def loss(model, x, y):
        return F.cross_entropy(outside(model(x)), y, reduction="none")

    with pytest.raises(UncapturedParameter):
        fit(made(Folding), loss, data(), plan(), progress=False, performance=ALONE)


def test_a_reduced_loss_is_refused():
    with pytest.raises(LossShapeError):
        fit(
            made(Folding),
            lambda model, x, y: F.cross_entropy(model(x), y),
            data(),
            plan(),
            progress=False,
            performance=ALONE,
        )


@pytest.mark.parametrize(
    "options",
    [
        {"clipping_mode": "low_memory"},
        {"clipping_mode": "two_pass"},
        {"clipping_mode": "groupwise"},
        {"compile": True},
        {"autotune": True},
    ],
)
def test_settings_of_a_capture_are_refused_by_name(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        PerformanceOptions(gradients="one-by-one", **options)


@pytest.mark.parametrize("way", ["register_post_accumulate_grad_hook", "register_hook"])
def test_a_hook_that_would_see_raw_gradients_is_refused(way):
    model = made(Folding)
    getattr(model.inner.weight, way)(lambda _: None)
    with pytest.raises(InvalidArgument, match=r"inner\.weight"):
        fit(model, losses, data(), plan(), progress=False, performance=ALONE)


def test_a_hook_that_comes_later_sees_nothing():
    model, seen = made(Folding), []
    recorder = OneByOne(model)
    model.inner.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    x, y = data()
    with recorder.capturing(1):
        losses(model, x[:1], y[:1]).sum().backward()
    assert seen == [None]
    model.inner.weight.register_hook(seen.append)
    with pytest.raises(InvalidArgument, match="gradient hook"):
        recorder.start(1)


def test_raw_gradients_cannot_be_read_in_a_loop_of_ones_own():
    model = made(Folding)
    engine = PrivacyEngine(gradients="one-by-one")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=SGD(model.parameters()),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=RECORDS),
        noise_multiplier=0.0,
        max_grad_norm=C,
        criterion=F.cross_entropy,
    )
    before = copy.deepcopy(model.state_dict())
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(UncapturedParameter, match=r"loss\.backward"):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with pytest.raises(PrivacyError):
        loss.backward()
    with pytest.raises(PrivacyError):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_ordinary_backward_pass_is_refused_and_leaves_nothing():
    model = made(Folding)
    recorder = OneByOne(model)
    with pytest.raises(UncapturedParameter):
        losses(model, *data()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    recorder.detach()
    losses(model, *data()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- the numbers -------------------------------------------------------------------------------------------------


def recorded(model, loss, parameters=None):
    recorder = OneByOne(model, parameters)
    with recorder.capturing(1):
        loss.backward()
    return recorder


def test_several_backward_passes_of_a_record_are_one_gradient():
    model = nn.Linear(3, 1)
    recorder = OneByOne(model)
    with recorder.capturing(1):
        model(torch.ones(1, 3)).sum().backward()
        (2 * model(torch.ones(1, 3)).sum()).backward()
    assert float(recorder.squared_norm_bounds()) == pytest.approx(36.0)


def test_what_lay_in_grad_before_takes_no_part():
    model = nn.Linear(3, 1)
    recorder = OneByOne(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    with recorder.capturing(1):
        model(torch.ones(1, 3)).sum().backward()
    assert float(recorder.squared_norm_bounds()) == pytest.approx(4.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_gradients_do_not_underflow(dtype):
    layer = nn.Linear(1000, 1, bias=False).to(dtype)
    recorder = recorded(layer, layer(torch.full((1, 1000), 1e-4, dtype=dtype)).sum())
    wanted = 1000 * float(torch.tensor(1e-4, dtype=dtype)) ** 2
    assert float(recorder.squared_norm_bounds()) == pytest.approx(wanted, rel=1e-6)
    sums = {}
    recorder.add_weighted_sums(torch.ones(1), sums)
    assert sums[layer.weight].dtype == torch.float32


def test_a_record_that_is_not_finite_adds_nothing():
    model = nn.Linear(3, 1)
    recorder = recorded(model, model(torch.full((1, 3), torch.inf)).sum())
    assert not bool(recorder.squared_norm_bounds().isfinite())
    sums = {}
    recorder.add_weighted_sums(torch.zeros(1), sums)
    assert not sums


def test_parameters_that_are_not_listed_get_no_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    recorder = recorded(model, model(torch.ones(1, 3)).sum(), list(model[1].parameters()))
    sums = {}
    recorder.add_weighted_sums(torch.ones(1), sums)
    assert set(sums) == set(model[1].parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sparse_gradients_are_summed():
    table = nn.Embedding(7, 3, sparse=True)
    recorder = recorded(table, table(torch.tensor([[1, 1, 4]])).sum())
    assert float(recorder.squared_norm_bounds()) == pytest.approx(3 * (4 + 1))


def test_more_than_one_record_is_refused():
    with pytest.raises(RecordCountMismatch):
        OneByOne(nn.Linear(3, 1)).start(2)


# --- policies: the same release as by the capture -----------------------------------------------------------------

_SMALL = [nn.Flatten(), nn.Linear(TOKENS * WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)]
POLICIES = {
    "per layer": {"clipping": GroupedClipping(by="layer")},
    "groups": {"clipping": GroupedClipping(by=(("1",), ("3",)))},
    "automatic": {"clipping": AutomaticClipping()},
    "adaptive bounds": {"clipping": QuantileClipping(count_noise=50.0)},
    "AdaClip": {"clipping": AdaClip()},
    "projections": {"clipping": ProjectedClipping(projections=3)},
    "secure noise": {"secure_mode": True},
    "correlated noise": {
        "correlated_noise": CorrelatedNoise(
            strategy=optimize_banded(2, steps=3), participation=FixedEpochOrder(steps_per_epoch=2)
        ),
        "poisson_sampling": False,
    },
    "loss curve": {"loss_release": LossRelease(max_loss=2.0)},
    "replace one": {"neighboring_relation": NeighboringRelation.REPLACE_ONE},
}


def released(performance, model, options, **more):
    trained = copy.deepcopy(model)
    wanted = plan(**{"noise_multiplier": 0.3, "steps": 3, "sample_rate": 0.5, **options})
    seeded = KeyedRNG(seed=3, reproducible=True)
    result = fit(
        trained,
        losses,
        data(),
        wanted,
        optimizer=SGD,
        progress=False,
        performance=performance,
        rng=seeded,
        **more,
    )
    return [parameter.detach() for parameter in trained.parameters()], result


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_releases_what_the_capture_releases(name):
    torch.manual_seed(0)
    model = nn.Sequential(*_SMALL)
    got, one = released(ALONE, model, POLICIES[name])
    wanted, other = released(PerformanceOptions(microbatch_size=1), model, POLICIES[name])
    assert_close(got, wanted, tolerance=1e-4)
    assert one.guarantee == other.guarantee
    if one.released_losses is not None:
        pairs = zip(one.released_losses, other.released_losses, strict=True)
        assert all(a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-5) for a, b in pairs)


def test_units_in_fit_are_clipped_together():
    torch.manual_seed(0)
    model = nn.Sequential(*_SMALL)
    units = UnitAssignment(unit_ids=[place // 3 for place in range(RECORDS)], num_units=4)
    options = {"noise_multiplier": 0.0, "expected_batch_size": 4.0, "privacy_unit": PrivacyUnit.USER}
    got, _ = released(ALONE, model, options, units=units)
    wanted, _ = released(PerformanceOptions(gradients="captured"), model, options, units=units)
    assert_close(got, wanted)


def test_a_capture_and_one_record_at_a_time_agree_record_by_record():
    model = nn.Sequential(*_SMALL)
    x, y = data()
    single = OneByOne(model)
    squares = []
    for place in range(RECORDS):
        with single.capturing(1):
            losses(model, x[place : place + 1], y[place : place + 1]).sum().backward()
        squares.append(single.squared_norm_bounds())
    single.detach()
    capture = GradientCapture(model)
    with capture.capturing(RECORDS):
        losses(model, x, y).sum().backward()
    assert torch.allclose(torch.cat(squares), capture.squared_norms(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_tensor_outside_the_model_that_would_learn_is_refused(shape):
    temperature = torch.ones(shape, requires_grad=True)

    def loss(model, x, y):
        return F.cross_entropy(model(x) * temperature, y, reduction="none")

    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=8.0, delta=1e-5)
    data = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    with pytest.raises(UncapturedParameter, match="outside"):
        fit(nn.Linear(4, 3), loss, data, plan, progress=False, performance=PerformanceOptions(gradients="one-by-one"))
    assert temperature.grad is None


# --- the advice of a refusal -----------------------------------------------------------------------------------------


class FoldingNorm(nn.Module):
    """As OPT: records and positions are folded into rows for the second half of a block."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        rows = rows + torch.relu(self.inner(self.norm(rows)))
        return self.head(rows.view(x.shape).mean(1))


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    size = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    own = {
        "OPT": {"ffn_dim": 12, "word_embed_proj_dim": 8, "dropout": 0.0},
        "Mixtral": {"intermediate_size": 12, "num_key_value_heads": 1, "num_local_experts": 2},
    }
    config = getattr(transformers, f"{name}Config")(**size, **own[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def next_tokens(model, batch):
    (ids,) = batch
    logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


TOKENS_OF_RECORDS = torch.randint(3, 20, (RECORDS, TOKENS), generator=torch.Generator().manual_seed(2))
REFUSED = {
    "OPT-like": (FoldingNorm, classes, data),
    "Mixtral-like": (Routing, classes, data),
    "OPT": (partial(of_transformers, "OPT"), next_tokens, lambda: (TOKENS_OF_RECORDS,)),
    "Mixtral": (partial(of_transformers, "Mixtral"), next_tokens, lambda: (TOKENS_OF_RECORDS,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_that_a_refusal_names_trains_the_same_loop_exactly(name):
    make, losses_of, of_records = REFUSED[name]
    torch.manual_seed(3)
    model = make()
    before = copy.deepcopy(model)

    def loop(engine, trained):
        trained, optimizer, loader = engine.make_private(
            module=trained,
            optimizer=SGD(trained.parameters()),
            data_loader=DataLoader(TensorDataset(*of_records()), batch_size=RECORDS),
            noise_multiplier=0.0,
            max_grad_norm=C,
        )
        for batch in loader:
            losses_of(trained, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RecordCountMismatch, match="one record at a time") as refusal:
        loop(PrivacyEngine(), copy.deepcopy(model))
    named = re.search(r"PrivacyEngine\(.*?\)", str(refusal.value))
    assert named is not None
    loop(eval(named.group(), {"PrivacyEngine": PrivacyEngine}), model)
    # In single precision: grouped products of experts have no other.
    total = [torch.zeros_like(parameter) for parameter in before.parameters()]
    for place in range(RECORDS):
        loss = losses_of(before, [tensor[place : place + 1] for tensor in of_records()]).sum()
        gradients = torch.autograd.grad(loss, list(before.parameters()), allow_unused=True)
        norm = sum(float(one.square().sum()) for one in gradients if one is not None) ** 0.5
        for part, one in zip(total, gradients, strict=True):
            if one is not None:
                part += min(1.0, C / norm) * one
    assert_close(moved(model, before), total)
