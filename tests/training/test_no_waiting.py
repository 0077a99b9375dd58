"""A step on another device waits for it once for each microbatch: whether every record has weight, for the sums.

There is no card here. Tensors without values (the meta device, under `FakeTensorMode`) raise wherever a value is read
or devices are mixed; and with the processor taken for another device, the profiler counts what a real step reads.
"""

import importlib
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import oracles
from sordino import PerformanceOptions, Plan, PrivacyEngine, fit
from sordino.clipping import FlatClipping, GroupedClipping, QuantileClipping
from sordino.errors import PrivacyError
from sordino.gradients import (
    GradientCapture,
    backward_strategies,
    capture,
    captured_gradients,
    interception,
    numerics,
)
from sordino.gradients.rules.base import LayerCall
from sordino.mechanisms.correlated import BinaryTree, SingleParticipation
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch
from sordino.training import CorrelatedNoise
from sordino.training.noisy_releases import LossRelease, NormRelease
from sordino.training.probing import snapshots
from sordino.training.step import PrivateStep
from training.memory_models import gradients
from training.test_two_pass import Unlike

# The module: the package's name for it is the function's.
fit_module = importlib.import_module("sordino.training.fit")
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_unique2", "aten::bincount"}


def plan(**changed):
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.5, "steps": 8}
    return Plan(**(settings | {"expected_batch_size": 4.0, "delta": 1e-5} | changed))


class Words(nn.Module):
    """Tables, attention, norms, a convolution, a head that shares the first table."""

    def __init__(self):
        super().__init__()
        self.table, self.place = nn.Embedding(30, 16), nn.Embedding(12, 16)
        self.first, self.second = nn.LayerNorm(16), nn.RMSNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.first(self.table(ids) + self.place(places))
        q, k, v = (layer(x).unflatten(2, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.second(x + self.mix(x.transpose(1, 2)).transpose(1, 2)))


class Stack(nn.Module):
    """Layers between a table and a head."""

    def __init__(self, *layers, channels_first=False):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.layers, self.channels_first = nn.ModuleList(layers), channels_first

    def forward(self, ids):
        x = self.table(ids)
        x = x.transpose(1, 2) if self.channels_first else x
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x.transpose(1, 2) if self.channels_first else x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Adapter(nn.Module):
    """A frozen layer with a low-rank one."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Bare(nn.Module):
    """A token for all records, rows of a table, a bare matrix and a factor."""

    def __init__(self):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 16)), nn.Embedding(20, 16)
        self.matrix, self.factor = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.ones(16))

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        return torch.tanh((x + self.places.weight[: x.shape[1]]) @ self.matrix) * self.factor


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(30, 16), nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.bag(ids))[:, None]


def twice(layer):
    return Stack(layer, nn.Tanh(), layer)


MODELS = {
    "words": Words,
    "lstm": lambda: Stack(nn.LSTM(16, 16, batch_first=True)),
    "gru": lambda: Stack(nn.GRU(16, 16, batch_first=True)),
    "attention": lambda: Stack(Attention()),
    "encoder": lambda: Stack(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)),
    "convolutions": lambda: Stack(
        nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.Conv1d(16, 16, 3, groups=4), channels_first=True
    ),
    "transposed convolution": lambda: Stack(nn.ConvTranspose1d(16, 16, 3), channels_first=True),
    "instance norm": lambda: Stack(nn.InstanceNorm1d(16, affine=True), channels_first=True),
    "norms": lambda: Stack(nn.LayerNorm(16), nn.RMSNorm(16), nn.PReLU()),
    "adapters": lambda: Stack(Adapter()),
    "bare parameters": lambda: Stack(Bare()),
    "bag": Bag,
    "a layer called twice": lambda: twice(nn.Linear(16, 16)),
    "a convolution called twice": lambda: Stack(*[nn.Conv1d(16, 16, 3, padding=1)] * 2, channels_first=True),
}


def losses(model, ids, labels):
    return F.cross_entropy(model(ids)[:, 0], labels, reduction="none")


def batch(records, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (records, 12), generator=generator).to(device)
    return ids, torch.randint(30, (records,), generator=generator).to(device)


@pytest.fixture
def looks(monkeypatch):
    """Counts what is looked at on purpose; everything else that reads a value raises."""
    found = Counter()

    def flags(given):
        found["flags"] += bool(given)
        return [True] * len(given)

    def guard(condition):
        found["guards"] += 1
        return True

    monkeypatch.setattr(capture, "check_hooks_present", lambda model: None)
    monkeypatch.setattr(captured_gradients, "guard_holds", guard)
    monkeypatch.setattr(backward_strategies, "guard_holds", guard)
    monkeypatch.setattr(snapshots, "read_flags", flags)
    # States of the processor's generator, which the mode takes for tensors without values.
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: a.dtype == torch.uint8 or equal(a, b))
    # Once for each form of an operation, by its values; not in every step.
    monkeypatch.setattr(interception, "is_record_by_record", lambda *_: True)
    return found


def built(name, dtype=torch.float32):
    """A model on the meta device; a module can't be cast there, so it is made in its type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return MODELS[name]()
    finally:
        torch.set_default_dtype(before)


def run_a_step(name, mode, plan, dtype=torch.float32, *, noise=False):
    """A step of two chunks on tensors without values; the number of chunks.

    Noise is the same for every model, and takes a hundred operations a tensor.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = built(name, dtype)
        with torch.device("meta"):
            inputs = (torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, dtype=torch.long))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        recording = GradientCapture(model, trained, low_memory=mode == "low_memory")
        step = PrivateStep(recording, plan, KeyedRNG(), clipping_mode=mode)
        chunks = [Microbatch(step=0, index=i, is_last=i == 1, indices=np.arange(4)) for i in range(2)]
        for chunk in chunks:
            with step.capturing(chunk):
                step.backward(losses(model, *inputs))
            step.add(chunk)
        assert {value.device.type for value in step._sums.values()} == {"meta"}
        assert set(step._sums) == set(trained)
        if noise:
            step.finish()
            assert {parameter.grad.device.type for parameter in trained} == {"meta"}
    return len(chunks)


# The other models take the other ways nightly.
SOME = [
    name if name in ("words", "attention", "bag") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gru"])
def test_the_whole_step_reads_one_truth_value_by_default(looks, name):
    test_the_whole_step_reads_one_truth_value(looks, name, "fast", {})


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("mode", "clipping"),
    [
        ("fast", {"clipping": GroupedClipping()}),
        ("low_memory", {}),
        ("two_pass", {}),
        ("groupwise", {"clipping": GroupedClipping()}),
    ],
    ids=["grouped", "low_memory", "two_pass", "groupwise"],
)
def test_the_whole_step_reads_one_truth_value(looks, name, mode, clipping):
    chunks = run_a_step(name, mode, plan(**clipping), noise=(name, mode) == ("adapters", "fast"))
    assert looks["guards"] == chunks


@pytest.mark.parametrize(
    # Of the words' model: a table with the head, and places, two norms, four linear layers, a convolution.
    ("mode", "clipping", "looks_per_chunk"),
    [("two_pass", {}, 2), ("groupwise", {"clipping": GroupedClipping(by="layer")}, 9)],
)
def test_sums_wait_for_one_look_only_as_long_as_they_hold_little(looks, monkeypatch, mode, clipping, looks_per_chunk):
    monkeypatch.setattr(backward_strategies, "_WAITING_ENTRIES", 0)
    chunks = run_a_step("words", mode, plan(**clipping))
    assert looks["guards"] == looks_per_chunk * chunks


@pytest.mark.parametrize("name", SOME)
def test_a_step_in_half_precision_reads_one_truth_value(looks, name):
    chunks = run_a_step(name, "fast", plan(), torch.bfloat16)
    assert looks["guards"] == chunks


def test_correlated_noise_reads_nothing_more(looks):
    noise = CorrelatedNoise(strategy=BinaryTree(steps=8), participation=SingleParticipation())
    chunks = run_a_step(
        "adapters", "fast", plan(correlated_noise=noise, sample_rate=1 / 8, poisson_sampling=False), noise=True
    )
    assert looks["guards"] == chunks


@pytest.mark.slow
def test_fit_reads_one_truth_value_a_step_beside_the_values_it_compares_at_times(looks, monkeypatch):
    monkeypatch.setattr(fit_module, "check_records", lambda *_, **__: None)
    monkeypatch.setattr(fit_module, "check_padding", lambda *_, **__: None)
    # A failure of model or loss would be taken for a record's.
    monkeypatch.setattr(fit_module._FitLoop, "_record_apart", None)
    monkeypatch.setattr(fit_module, "compares_values", lambda batches: batches == 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = Words()
        model.to = lambda device: model
        fit(
            model,
            losses,
            batch(8),
            plan(sample_rate=1.0, expected_batch_size=8.0, steps=3),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            progress=False,
        )
    assert looks == {"guards": 3, "flags": 1}


class Reads:
    """What a block reads, by the profiler, which doesn't see lists being made."""

    def __enter__(self):
        self._profile, self._lists, listed = torch.autograd.profiler.profile(), 0, torch.Tensor.tolist

        def counted(tensor):
            self._lists += 1
            return listed(tensor)

        torch.Tensor.tolist = counted
        self._profile.__enter__()
        return self

    def __exit__(self, *raised):
        self._profile.__exit__(*raised)
        del torch.Tensor.tolist
        self.count = self._lists + sum(event.name in READS for event in self._profile.function_events)


def reads_of_engine_steps(model, *, mode="fast", **settings):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(32)), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine(clipping_mode=mode).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **settings,
    )
    found = []
    for _ in range(3):
        for ids, labels in loader:
            # Records come from the loader; what is done with them is the step.
            with Reads() as reads:
                optimizer.zero_grad()
                F.cross_entropy(model(ids)[:, 0], labels).backward()
                optimizer.step()
            found.append(reads.count)
    # Before and after the batches at which values are compared.
    return found[5]


def test_a_step_of_the_engine_reads_one_value_where_it_would_read_dozens(monkeypatch):
    torch.manual_seed(0)
    assert reads_of_engine_steps(Words()) > 10
    monkeypatch.setattr(numerics, "_HOST", "none")
    assert reads_of_engine_steps(Words()) == 1


@pytest.mark.parametrize(("mode", "settings"), [("two_pass", {}), ("groupwise", {"clipping": GroupedClipping()})])
def test_a_step_of_the_engine_that_sums_in_the_backward_pass_reads_one_value(monkeypatch, mode, settings):
    monkeypatch.setattr(numerics, "_HOST", "none")
    torch.manual_seed(0)
    assert reads_of_engine_steps(Stack(nn.Linear(16, 16), nn.LayerNorm(16)), mode=mode, **settings) == 1


@pytest.mark.parametrize("clipping", [FlatClipping(), GroupedClipping()], ids=["two_pass", "groupwise"])
@pytest.mark.parametrize("entries", [1 << 26, 300], ids=["all wait", "some wait"])
@pytest.mark.parametrize("value", [1.0, torch.nan], ids=["every record", "a record without"])
def test_sums_that_wait_are_those_of_the_ways_that_look(monkeypatch, clipping, entries, value):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3)
    )
    x = torch.randn(5, 6)
    x[2] = x[2] * value
    mode = "two_pass" if isinstance(clipping, FlatClipping) else "groupwise"
    expected = gradients(model, x if x.isfinite().all() else x[[0, 1, 3, 4]], memory="fast", clipping=clipping)
    monkeypatch.setattr(numerics, "_HOST", "none")
    monkeypatch.setattr(backward_strategies, "_WAITING_ENTRIES", entries)
    for one, other in zip(gradients(model, x, memory=mode, clipping=clipping), expected, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_chunk_of_records_without_weight_adds_nothing(monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    model = nn.Linear(6, 3)
    for mode, clipping in (("two_pass", FlatClipping()), ("groupwise", GroupedClipping())):
        for part in gradients(model, torch.full((2, 6), torch.nan), memory=mode, clipping=clipping):
            assert torch.equal(part, torch.zeros_like(part))


@pytest.mark.parametrize("entries", [1 << 26, 0])
def test_a_second_pass_that_differs_is_refused_before_its_sums_are_used(monkeypatch, entries):
    monkeypatch.setattr(numerics, "_HOST", "none")
    monkeypatch.setattr(backward_strategies, "_WAITING_ENTRIES", entries)
    model, x = Unlike(reentrant=False), torch.randn(5, 6)
    capture = GradientCapture(model)
    passes = backward_strategies.TwoPassBackward([list(model.parameters())], torch.ones_like)
    capture.start(5, backward_strategy=passes)
    loss = model(x).square().sum()
    with pytest.raises(PrivacyError, match="must repeat the first exactly"):
        capture.backward(lambda again: loss.backward(retain_graph=again))
    capture.stop()
    assert not passes.is_complete
    assert bool(passes.sums) == (entries == 0)


@pytest.mark.parametrize("mode", ["two_pass", "groupwise"])
def test_what_was_kept_of_uses_that_wait_is_dropped_with_their_sums(monkeypatch, mode):
    monkeypatch.setattr(numerics, "_HOST", "none")
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    model, uses = nn.Sequential(first, nn.ReLU(), last), []
    made = LayerCall.__init__
    monkeypatch.setattr(LayerCall, "__init__", lambda self, **given: (made(self, **given), uses.append(self))[0])
    groups = [list(first.parameters()), list(last.parameters())]
    strategy = (
        backward_strategies.TwoPassBackward(groups, torch.ones_like)
        if mode == "two_pass"
        else backward_strategies.GroupwiseInBackward(groups, lambda squares, _: torch.ones_like(squares))
    )
    capture, sums = GradientCapture(model), {}
    with capture.capturing(5, backward_strategy=strategy):
        loss = model(torch.randn(5, 6)).square().sum()
        capture.backward(lambda again: loss.backward(retain_graph=again))
        assert any(use.saved or use.memo for use in uses) == (mode == "groupwise")
    capture.add_backward_sums(sums)
    assert set(sums) == set(model.parameters())
    assert not any(use.saved or use.grads or use.memo for use in uses)


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_sums_are_those_of_the_ways_that_look(monkeypatch, microbatch_size):
    def trained():
        torch.manual_seed(1)
        model = Words()
        fit(
            model,
            losses,
            batch(8),
            plan(steps=2),
            rng=KeyedRNG(seed=3, reproducible=True),
            performance=PerformanceOptions(microbatch_size=microbatch_size),
            progress=False,
        )
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = trained()
    monkeypatch.setattr(numerics, "_HOST", "none")
    for value, wanted in zip(trained(), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)


def test_norms_are_exact_and_a_record_that_is_not_finite_is_left_out(monkeypatch):
    monkeypatch.setattr(numerics, "_HOST", "none")
    torch.manual_seed(2)
    model, (ids, labels) = Words(), batch(5)
    scales = torch.tensor([1.0, 1e-12, torch.nan, 1e12, 3.0])
    recording = GradientCapture(model)
    with recording.capturing(records=5):
        (losses(model, ids, labels) * scales).sum().backward()
    bounds = recording.squared_norm_bounds()
    expected = oracles.squared_norms(
        oracles.per_record_gradients(model, lambda m, r: losses(m, *r).sum(), (ids, labels))
    ) * scales.double().square()  # fmt: skip
    finite = torch.tensor([0, 1, 3, 4])
    assert not bounds[2].isfinite()
    torch.testing.assert_close(bounds[finite], expected[finite].to(bounds), rtol=2e-3, atol=0)
    assert bool((bounds[finite] >= expected[finite] * (1 - 1e-5)).all())
    sums: dict[nn.Parameter, torch.Tensor] = {}
    recording.add_weighted_sums(torch.where(bounds.isfinite(), bounds.rsqrt(), 0).to(torch.float32), sums)
    length = sum(value.double().square().sum() for value in sums.values()).sqrt()
    assert 0 < float(length) <= 4 * (1 + 1e-6)


@pytest.mark.parametrize("value", [1e-30, 1e30, 1e-45, 3e38, 0.0])
def test_sums_of_squares_of_every_size_are_exact_without_a_look(monkeypatch, value):
    monkeypatch.setattr(numerics, "_HOST", "none")
    rows = torch.full((3, 1000), value)
    with Reads() as reads:
        norms = numerics.row_squared_norms(rows)
    assert reads.count == 0
    torch.testing.assert_close(norms, rows.double().square().sum(1), rtol=1e-12, atol=0)
    rows[1, 7] = torch.inf
    assert not numerics.row_squared_norms(rows)[1].isfinite()


@pytest.mark.parametrize(
    "changed",
    [
        {"clipping": QuantileClipping(count_noise=5.0, inner=GroupedClipping(by="parameter"))},
        {"loss_release": LossRelease(max_loss=5.0, budget_fraction=0.1)},
        {
            "clipping": QuantileClipping(count_noise=5.0, inner=GroupedClipping(by="parameter")),
            "loss_release": LossRelease(max_loss=5.0, budget_fraction=0.1),
        },
        {"norm": NormRelease(budget_fraction=0.1)},
    ],
    ids=["bounds that adapt", "a loss curve", "both", "a norm"],
)
def test_what_is_released_beside_the_gradient_is_read_once(looks, monkeypatch, changed):
    monkeypatch.setattr(numerics, "_HOST", "none")
    model = nn.Linear(3, 2)
    norm = changed.get("norm")
    changed = {name: value for name, value in changed.items() if name != "norm"}
    step = PrivateStep(GradientCapture(model), plan(**changed), KeyedRNG(), norm=norm)
    inputs, labels = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    with Reads() as reads:
        chunk = Microbatch(step=0, index=0, is_last=True, indices=np.arange(4))
        with step.capturing(chunk):
            given = F.cross_entropy(model(inputs), labels, reduction="none")
            step.add_losses(given)
            step.backward(given)
        step.add(chunk)
        step.finish()
    assert reads.count == 1
    assert looks["guards"] == 1


def test_flags_of_several_places_are_read_together():
    flags = [torch.tensor(True), torch.tensor(False), torch.tensor(True)]
    assert numerics.read_flags(flags) == [True, False, True]
    assert numerics.read_flags([]) == []


def test_numbers_of_several_vectors_are_read_together():
    vectors = [torch.tensor([1.5, 2.0], dtype=torch.float64), torch.zeros(0), torch.tensor([3.0])]
    with Reads() as reads:
        assert numerics.read_numbers(vectors) == [[1.5, 2.0], [], [3.0]]
    assert reads.count == 1
