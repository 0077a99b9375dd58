"""The drop-in engine: the user's own objects, private steps only, noise of the right size."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from oracles import clipped_sum, per_record_gradients, relative_error
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, NonPrivateStep, PrivacyError, RecordCountMismatch, UncapturedParameter
from sordino.training.engine import PrivacyEngine

DELTA = 1e-5


def data(records=64):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(records, 5, generator=generator), torch.randint(0, 3, (records,), generator=generator)
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def private(model=None, optimizer=None, records=None, batch_size=64, engine=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    loader = DataLoader(data() if records is None else records, batch_size=batch_size)
    wanted = {"noise_multiplier": 0.0, "max_grad_norm": 0.5} | options
    engine = PrivacyEngine() if engine is None else engine
    return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **wanted)


def train(model, optimizer, loader, epochs=1):
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(features), labels).backward()
            optimizer.step()


def unchanged(model, before):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# --- the familiar surface ---------------------------------------------------------------------------------------------


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return torch.sigmoid(self.linear(x))


def test_the_tutorial_runs_after_changing_only_its_import_line():
    from sordino import PrivacyEngine

    torch.manual_seed(0)
    X = torch.randn(500, 5)
    y = (X[:, :1] > 0).float()
    model = Logistic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_loader = DataLoader(TensorDataset(X, y), batch_size=50, shuffle=True)
    criterion = nn.BCELoss()
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    for _epoch in range(4):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
    epsilon = privacy_engine.get_epsilon(1e-5)
    with torch.no_grad():
        accuracy = ((model(X) > 0.5) == (y > 0.5)).float().mean()
    assert accuracy > 0.85
    # 40 steps of the Gaussian of multiplier 1 at rate 0.1; reference value of an independent accountant below.
    assert epsilon == pytest.approx(reference_epsilon(0.1, 1.0, 40), rel=1e-3)


def reference_epsilon(sample_rate, noise_multiplier, steps):
    from dp_accounting import dp_event, pld

    step = dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier))
    return pld.PLDAccountant().compose(dp_event.SelfComposedDpEvent(step, steps)).get_epsilon(1e-5)


def test_module_and_optimizer_come_back_as_the_users_own_objects():
    model = network()
    keys, optimizer = list(model.state_dict()), torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    got_model, got_optimizer, loader = private(model, optimizer, batch_size=16)
    assert got_model is model
    assert got_optimizer is optimizer
    assert list(model.state_dict()) == keys
    train(model, optimizer, loader)
    schedule.step()
    assert list(model.state_dict()) == keys


def test_a_copy_and_a_pickle_of_the_model_are_ordinary_models():
    model, optimizer, loader = private()
    train(model, optimizer, loader)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(3, 5)).sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert not unchanged(twin, list(model.parameters()))


def test_options_that_only_change_speed_elsewhere_are_accepted():
    for mode in ("hooks", "functorch", "ew"):
        train(*private(grad_sample_mode=mode))


@pytest.mark.parametrize(
    "options",
    [
        {"noise_generator": torch.Generator()},
        {"grad_sample_mode": "magic"},
        {"clipping": "adaptive"},
        {"batch_first": False},
        {"loss_reduction": "none"},
        {"noise_multiplier": -1.0},
        {"max_grad_norm": 0.0},
        {"microbatch_size": 0},
        {"sample_rate": 0.0},
    ],
)
def test_an_option_that_can_not_be_kept_is_refused_and_the_model_stays_free(options):
    model = network()
    with pytest.raises(InvalidArgument):
        private(model, **options)
    model(torch.ones(2, 5)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_engine_options_that_promise_too_much_are_refused():
    with pytest.raises(InvalidArgument, match="understate"):
        PrivacyEngine(accountant="gdp")
    with pytest.raises(InvalidArgument, match="secure_mode"):
        PrivacyEngine(secure_mode="yes")
    with pytest.raises(InvalidArgument):
        PrivacyEngine(seed=3)
    with pytest.raises(TypeError):
        PrivacyEngine(acountant="rdp")


def test_the_rdp_accountant_is_at_least_the_tight_one_and_both_meet_their_target():
    spent = {}
    for accountant in ("prv", "rdp"):
        engine, model = PrivacyEngine(accountant=accountant), network()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=4),
            target_epsilon=2.0,
            target_delta=DELTA,
            epochs=2,
            max_grad_norm=1.0,
        )
        train(model, optimizer, loader, epochs=2)
        spent[accountant] = engine.get_epsilon(DELTA)
        assert engine.accountant.get_epsilon(delta=DELTA) == spent[accountant]
    assert 1.98 < spent["prv"] <= 2.0
    assert 1.98 < spent["rdp"] <= 2.0


def test_the_guarantee_names_what_it_rests_on():
    engine = PrivacyEngine(seed=1, reproducible=True)
    train(*private(engine=engine, batch_size=16, noise_multiplier=1.0))
    sentence = engine.guarantee(DELTA).describe()
    for part in ("Poisson sampling at rate 0.25", "add or remove one", "one record", "not for release", "public"):
        assert part in sentence


def test_one_engine_composes_everything_it_made_private():
    engine = PrivacyEngine()
    first, second = private(engine=engine, noise_multiplier=1.0), private(engine=engine, noise_multiplier=1.0)
    train(*first)
    one = engine.get_epsilon(DELTA)
    train(*second)
    assert engine.get_epsilon(DELTA) > one
    with pytest.raises(InvalidArgument, match="neighboring_relation"):
        private(engine=engine, neighboring_relation="replace_one")


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("microbatch_size", [None, 1, 7])
def test_the_gradient_is_the_clipped_sum_by_the_expected_size(reduction, microbatch_size):
    records = data(20)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    expected = clipped_sum(per_record_gradients(model, loss, records.tensors), 0.5)
    _, _, loader = private(
        model, optimizer, records, 20, loss_reduction=reduction, microbatch_size=microbatch_size, expected_batch_size=4
    )
    for features, labels in loader:
        F.cross_entropy(model(features), labels, reduction=reduction).backward()
        optimizer.step()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 4, total) < 1e-5


class ClassToken(nn.Module):
    """The root owns parameters of its own, broadcast over the records."""

    def __init__(self):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.ones(1, 1, 5)), nn.Parameter(torch.randn(1, 2, 5))
        self.l = nn.Linear(5, 3)

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x[:, None]], 1) + self.places
        return self.l(torch.tanh(tokens)).mean(1)


def test_parameters_of_the_root_itself_are_exact():
    torch.manual_seed(0)
    model, records = ClassToken(), data(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = clipped_sum(
        per_record_gradients(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), records.tensors), 0.5
    )
    _, _, loader = private(model, optimizer, records, 20)
    train(model, optimizer, loader)
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 20, total) < 1e-5


def test_microbatches_give_the_same_training_as_whole_batches_with_any_optimizer():
    models = []
    for microbatch_size in (None, 5):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        engine = PrivacyEngine(seed=3, reproducible=True)
        options = {"engine": engine, "noise_multiplier": 0.5, "microbatch_size": microbatch_size}
        train(*private(model, optimizer, batch_size=16, **options), epochs=3)
        models.append(list(model.parameters()))
    for one, other in zip(*models, strict=True):
        assert relative_error(one.detach(), other.detach()) < 1e-4


@pytest.mark.parametrize("neighboring_relation", list(NeighboringRelation))
def test_noise_of_the_declared_scale_passes_and_one_5_percent_off_is_caught(neighboring_relation):
    torch.manual_seed(0)
    model = nn.Linear(500, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"noise_multiplier": 1.5, "max_grad_norm": 0.8, "neighboring_relation": neighboring_relation}
    _, _, loader = private(model, optimizer, TensorDataset(torch.zeros(32, 500)), 4, **options)
    for (features,) in loader:
        (0 * model(features)).sum(1).mean().backward()
        optimizer.step()
        break
    noise = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    stddev = 1.5 * 0.8 * neighboring_relation.sensitivity_factor / 4
    ratio = float(noise.square().mean().sqrt()) / stddev
    # 200 400 draws: the standard error of the ratio is 0.16 %.
    assert abs(ratio - 1) < 0.01
    assert abs(ratio / 1.05 - 1) > 0.01
    assert abs(ratio / 0.95 - 1) > 0.01


def test_noise_never_repeats_over_steps_models_and_engines():
    values = []
    engine = PrivacyEngine()
    for one in (engine, engine, PrivacyEngine()):
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _, _, loader = private(model, optimizer, batch_size=16, noise_multiplier=1.0, engine=one)
        for features, _ in loader:
            (0 * model(features)).sum(1).mean().backward()
            optimizer.step()
            values += [parameter.grad.flatten().clone() for parameter in model.parameters()]
    together = torch.cat(values)
    assert len(together.unique()) == len(together)


def test_noise_is_uncorrelated_between_steps():
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, _, loader = private(model, optimizer, TensorDataset(torch.zeros(32, 100)), 8, noise_multiplier=1.0)
    rows = []
    for (features,) in loader:
        (0 * model(features)).sum(1).mean().backward()
        optimizer.step()
        rows.append(model.weight.grad.flatten().clone())
    correlation = np.corrcoef(torch.stack(rows).numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 6 / 100


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_step_needs_a_backward_on_the_current_batch():
    model, optimizer, loader = private(batch_size=16)
    before = [parameter.clone() for parameter in model.parameters()]
    batches = iter(loader)
    features, labels = next(batches)
    loss = F.cross_entropy(model(features), labels)
    with pytest.raises(NonPrivateStep, match="backward"):
        optimizer.step()
    loss.backward()
    optimizer.step()
    after = [parameter.clone() for parameter in model.parameters()]
    assert not unchanged(model, before)
    with pytest.raises(NonPrivateStep):
        optimizer.step()
    with pytest.raises(NonPrivateStep, match="next batch"):
        model(features).sum().backward()
    assert unchanged(model, after)


def test_a_closure_is_refused():
    model, optimizer, loader = private()
    features, labels = next(iter(loader))
    before = [parameter.clone() for parameter in model.parameters()]

    def closure():
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        return loss

    with pytest.raises(NonPrivateStep, match="closure"):
        optimizer.step(closure)
    assert unchanged(model, before)


def test_an_optimizer_that_evaluates_several_times_is_refused():
    model = network()
    with pytest.raises(InvalidArgument, match="LBFGS"):
        private(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_with_foreign_parameters_is_refused():
    model, stranger = network(), nn.Parameter(torch.ones(2))
    with pytest.raises(InvalidArgument, match="only parameters of the module"):
        private(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LazyLinear(3)

    def forward(self, x):
        return self.l(x)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_refused_until_it_has_its_parameters():
    model = Lazy()
    with pytest.raises(InvalidArgument, match="lazy"):
        private(model)
    model(torch.ones(2, 5))
    train(*private(model))


def test_gradients_from_before_are_cleared():
    model = network()
    model(torch.ones(2, 5)).sum().backward()
    private(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_second_engine_on_the_same_model_is_refused_until_the_first_lets_go():
    engine, model = PrivacyEngine(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private(model, optimizer, engine=engine)
    with pytest.raises(InvalidArgument, match="private already"):
        private(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.detach()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    train(*private(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_private_loader_gives_no_batch_after_its_engine_was_detached():
    engine = PrivacyEngine()
    _, _, loader = private(batch_size=16, engine=engine, noise_multiplier=1.0)
    begun = iter(loader)
    next(begun)
    spent = engine.get_epsilon(DELTA)
    engine.detach()
    for batches in (begun, iter(loader)):
        with pytest.raises(NonPrivateStep, match="detach"):
            next(batches)
    assert engine.get_epsilon(DELTA) == spent > 0


def test_another_optimizer_is_refused_also_for_a_layer_that_came_later():
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    _, _, loader = private(model, optimizer)
    before = [parameter.clone() for parameter in model[0].parameters()]
    with pytest.raises(NonPrivateStep, match="another optimizer"):
        torch.optim.Adam(model[2].parameters()).step()
    model[2] = nn.Linear(6, 3)
    next(iter(loader))
    with pytest.raises(NonPrivateStep, match="another optimizer"):
        torch.optim.SGD(model[2].parameters(), lr=0.1).step()
    assert unchanged(model[0], before)


def test_an_optimizer_that_holds_a_layer_that_was_replaced_is_refused():
    model, _, loader = private()
    model[2] = nn.Linear(6, 3)
    with pytest.raises(InvalidArgument, match="only parameters of the module"):
        next(iter(loader))


def test_a_parameter_group_added_between_steps_is_trained_privately():
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)
    _, _, loader = private(model, optimizer)
    train(model, optimizer, loader)
    assert model[0].weight.grad is None
    optimizer.add_param_group({"params": list(model[0].parameters())})
    expected = clipped_sum(
        per_record_gradients(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data().tensors), 0.5
    )
    train(model, optimizer, loader)
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 64, total) < 1e-5


def test_a_parameter_group_added_within_a_step_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    _, _, loader = private(model, optimizer)
    features, labels = next(iter(loader))
    F.cross_entropy(model(features), labels).backward()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(NonPrivateStep, match="same parameters"):
        optimizer.step()


def test_training_on_anything_but_the_private_loader_is_refused_and_evaluation_is_free():
    model, optimizer, loader = private()
    x = torch.ones(4, 5)
    with pytest.raises(NonPrivateStep, match="private loader"):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    model.eval()
    out = model(x.requires_grad_())
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    with pytest.raises(UncapturedParameter):
        model(x).sum().backward()
    model.train()
    train(model, optimizer, loader)


def test_a_generator_learns_through_a_private_critic():
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 5), nn.Linear(5, 1)
    ascent = torch.optim.SGD(generator.parameters(), lr=0.1)
    engine = PrivacyEngine()
    descent = torch.optim.SGD(critic.parameters(), lr=0.1)
    _, _, loader = private(critic, descent, batch_size=16, noise_multiplier=1.0, engine=engine)
    start = [parameter.clone() for parameter in generator.parameters()]
    for real, _ in loader:
        made_up = engine.mark_public(generator(torch.randn(len(real), 2)).detach())
        (F.softplus(-critic(real)) + F.softplus(critic(made_up))).mean().backward()
        descent.step()
        critic.eval().requires_grad_(False)
        ascent.zero_grad()
        F.softplus(-critic(generator(torch.randn(16, 2)))).mean().backward()
        ascent.step()
        critic.train().requires_grad_(True)
    assert not unchanged(generator, start)
    assert 0 < engine.get_epsilon(DELTA) < float("inf")


def test_an_evaluation_between_forward_and_backward_takes_no_part():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = clipped_sum(
        per_record_gradients(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data().tensors), 0.5
    )
    _, _, loader = private(model, optimizer)
    for features, labels in loader:
        loss = F.cross_entropy(model(features), labels)
        model.eval()
        model(100 * features.clone())
        with torch.no_grad():
            model(features)
        model.train()
        loss.backward()
        optimizer.step()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 64, total) < 1e-5


@pytest.mark.parametrize("is_moved", [False, True])
def test_fetching_ahead_of_the_loop_is_refused(is_moved):
    model, _, loader = private(batch_size=16)
    batches = iter(loader)
    features, _ = next(batches)
    earlier = features.to(torch.float32, copy=True) if is_moved else features
    next(batches)
    with pytest.raises(NonPrivateStep, match="ahead"):
        model(earlier).sum().backward()


def test_a_part_of_a_batch_is_refused():
    model, _, loader = private(criterion=nn.CrossEntropyLoss())
    features, _ = next(iter(loader))
    with pytest.raises(RecordCountMismatch):
        model(features[:5])


def test_calling_a_layer_past_the_model_is_refused():
    model, _, loader = private()
    features, _ = next(iter(loader))
    with pytest.raises(PrivacyError):
        model[0](features).sum().backward()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("criterion", [None, nn.CrossEntropyLoss()])
def test_a_loss_scaler_is_refused_and_the_loop_goes_on_without_it(criterion, fused, unscales):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    _, _, loader = private(model, optimizer, criterion=criterion)
    batches, scaler = iter(loader), torch.amp.GradScaler("cpu")
    features, labels = next(batches)
    before = [parameter.clone() for parameter in model.parameters()]
    scaler.scale(F.cross_entropy(model(features), labels)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(NonPrivateStep, match="GradScaler"):
        scaler.step(optimizer)
    assert unchanged(model, before)
    del batches
    for features, labels in loader:
        F.cross_entropy(model(features), labels).backward()
        optimizer.step()


def test_an_optimizer_that_is_given_back_takes_a_scaler_as_before():
    for fused in (False, True):
        model, engine = network(), PrivacyEngine()
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        before = set(vars(optimizer))
        engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(torch.rand(8, 5)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        engine.detach()
        assert set(vars(optimizer)) == before
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.rand(2, 5)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_zero_grad_between_backward_and_step_loses_and_leaks_nothing():
    gradients = []
    for clear in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _, _, loader = private(model, optimizer)
        for features, labels in loader:
            F.cross_entropy(model(features), labels).backward()
            assert all(parameter.grad is None for parameter in model.parameters()), "raw gradients are never in .grad"
            if clear:
                optimizer.zero_grad()
            optimizer.step()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_errors_do_not_tell_how_many_records_a_batch_had():
    model, optimizer, loader = private(batch_size=16)
    features, labels = next(iter(loader))
    messages = []
    for call in (optimizer.step, lambda: model(features[:1].expand(3, 5))):
        with pytest.raises(PrivacyError) as refusal:
            call()
        messages.append(str(refusal.value))
    assert not any(str(len(labels)) in message for message in messages)


def test_bfloat16_autocast_works_without_a_scaler():
    model, optimizer, loader = private(batch_size=16)
    for features, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_every_batch_is_followed_and_stays_an_ordinary_tensor_to_the_loop():
    model, optimizer, loader = private(batch_size=16)
    kinds = []
    for features, labels in loader:
        out = model(features)
        kinds.append((isinstance(features, torch.Tensor), isinstance(out, torch.Tensor), out.detach().numpy().ndim))
        F.cross_entropy(out, labels).backward()
        optimizer.step()
    assert kinds == [(True, True, 2)] * 4
