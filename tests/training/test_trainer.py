import math
import shutil
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import oracles
from sordino.errors import BudgetExceeded
from sordino.events import Event, Gaussian, PoissonSampled
from sordino.randomness import KeyedRNG
from sordino.training.averaging import ExponentialWeightAverage, TailWeightAverage
from sordino.training.fit import fit
from sordino.training.plan import PerformanceOptions, Plan


def plan_of(**changes: object) -> Plan:
    settings: dict[str, object] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.4,
        "steps": 6,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
    }
    return Plan(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def records(n: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator) * 3, torch.randint(3, (n,), generator=generator)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def seeded(seed: int = 3) -> KeyedRNG:
    return KeyedRNG(seed=seed, reproducible=True)


class Lines:
    """A transcript in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Event, float]] = []

    def append(self, *, step: int, event: Event, epsilon: float) -> None:
        self.rows.append((step, event, epsilon))


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_rate", [0.4, 1.0])
def test_without_noise_fit_is_clip_sum_divide_step_record_by_record(sample_rate: float) -> None:
    plan, data = plan_of(noise_multiplier=0.0, sample_rate=sample_rate), records()
    expected = net().double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.7, momentum=0.9)
    for step in range(plan.steps):
        indices = plan.sampler.draw(dataset_size=20, step=step, rng=seeded())
        batch = tuple(tensor[torch.from_numpy(indices)] for tensor in data)
        gradients = oracles.per_record_gradients(expected, lambda m, r: F.cross_entropy(m(r[0]), r[1]), batch)
        sums = oracles.clipped_sum(gradients, plan.max_grad_norm)
        for parameter, total in zip(expected.parameters(), sums, strict=True):
            parameter.grad = total / plan.expected_batch_size
        optimizer.step()
    model = net()
    fit(
        model,
        losses,
        data,
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9),
        rng=seeded(),
        progress=False,
    )
    assert oracles.relative_error(weights(model), weights(expected)) < 1e-5
    assert oracles.relative_error(weights(model), weights(net())) > 0.1


@pytest.mark.parametrize("microbatch_size", [1, 3, 8, 100])
def test_the_size_of_a_chunk_changes_nothing(microbatch_size: int) -> None:
    whole, split = net(), net()
    fit(whole, losses, records(), plan_of(), rng=seeded(), progress=False)
    performance = PerformanceOptions(microbatch_size=microbatch_size)
    fit(split, losses, records(), plan_of(), performance=performance, rng=seeded(), progress=False)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-5, atol=1e-6)


def test_tensors_a_tensor_data_set_and_a_collated_data_set_train_the_same_model() -> None:
    class Dicts(Dataset[object]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> object:
            return {"x": records()[0][index], "y": records()[1][index]}

    def dict_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return losses(model, batch["x"], batch["y"])

    models = [net() for _ in range(4)]
    fit(models[0], losses, records(), plan_of(), rng=seeded(), progress=False)
    fit(models[1], losses, TensorDataset(*records()), plan_of(), rng=seeded(), progress=False)
    fit(models[2], dict_losses, Dicts(), plan_of(), rng=seeded(), progress=False)
    pairs = [(x, y) for x, y in zip(*records(), strict=True)]

    class Pairs(Dataset[object]):
        def __len__(self) -> int:
            return len(pairs)

        def __getitem__(self, index: int) -> object:
            return pairs[index]

    def collate(items: list[object]) -> object:
        return [torch.stack(list(column)) for column in zip(*items, strict=True)]

    fit(models[3], losses, Pairs(), plan_of(), collate_fn=collate, rng=seeded(), progress=False)
    for model in models[1:]:
        torch.testing.assert_close(weights(model), weights(models[0]))


def test_a_record_with_a_nan_contributes_zero() -> None:
    x, y = records()
    plan = plan_of(sample_rate=1.0)
    without, poisoned = net(), net()
    fit(without, losses, (x[1:], y[1:]), plan, rng=seeded(), progress=False)
    x = x.clone()
    x[0, 2] = math.nan
    fit(poisoned, losses, (x, y), plan, rng=seeded(), progress=False)
    torch.testing.assert_close(weights(poisoned), weights(without))


def test_a_schedule_is_stepped_once_a_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fit(
        model,
        losses,
        records(),
        plan_of(steps=4),
        optimizer=optimizer,
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
        progress=False,
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**4)


def test_the_model_comes_back_as_it_was_given_without_hooks_or_gradients() -> None:
    model = net()
    result = fit(model, losses, records(), plan_of(), progress=False)
    assert result.model is model
    assert list(model.state_dict()) == list(net().state_dict())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    held = [vars(module)[name] for module in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    assert not any(held)


def test_frozen_parameters_stay_as_they_are() -> None:
    model = net()
    model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    model[0].weight.grad = torch.ones(7, 5)  # pyright: ignore[reportIndexIssue]
    before = [parameter.clone() for parameter in model.parameters()]
    fit(model, losses, records(), plan_of(), progress=False)
    after = list(model.parameters())
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])


# --- privacy ---------------------------------------------------------------------------------------------------------


def noise_after_one_step(plan: Plan) -> Tensor:
    """What one step with lr 1 adds to 40 000 weights when no record has a gradient."""
    model = nn.Linear(200, 200, bias=False)
    start = model.weight.detach().clone()
    x = torch.zeros(16, 200)
    fit(
        model,
        lambda m, a: m(a).sum(1),
        (x,),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        progress=False,
    )
    return (model.weight.detach() - start).flatten()


def test_the_noise_on_the_weights_has_the_planned_size_and_five_percent_are_noticed() -> None:
    plan = plan_of(steps=1, noise_multiplier=1.7, max_grad_norm=0.3, expected_batch_size=11.0)
    noise = noise_after_one_step(plan).double()
    planned = 1.7 * 0.3 / 11.0

    def fits(stddev: float) -> bool:
        # The sum of squares over σ² is χ² with n degrees of freedom: six of its standard deviations.
        statistic = float(noise.square().sum()) / stddev**2
        return abs(statistic - len(noise)) < 6 * math.sqrt(2 * len(noise))

    assert fits(planned)
    assert not fits(planned * 1.05)
    assert not fits(planned * 0.95)


def test_one_record_more_that_adds_nothing_leaves_every_bit_as_it_is() -> None:
    x, y = records()
    models = []
    for n in (19, 20):
        model = nn.Linear(5, 3, bias=False)
        nn.init.zeros_(model.weight)
        features = x[:n].clone()
        features[19:] = 0
        plan = plan_of(sample_rate=1.0)
        fit(model, losses, (features, y[:n]), plan, rng=seeded(), progress=False)
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_one_record_moves_a_step_by_at_most_the_clipping_norm_over_the_divisor(scale: float) -> None:
    x, y = records()
    x = x.double()
    x[0] *= scale
    plan = plan_of(noise_multiplier=0.0, sample_rate=1.0, steps=1)
    reached = []
    for first in (0, 1):
        model = net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fit(model, losses, (x[first:], y[first:]), plan, optimizer=optimizer, progress=False)
        reached.append(weights(model))
    bound = plan.max_grad_norm / plan.expected_batch_size
    assert float((reached[0] - reached[1]).norm()) <= bound * (1 + 1e-6)


def test_empty_batches_are_steps_of_noise_and_are_charged() -> None:
    model, lines = net(), Lines()
    seen = [weights(model)]
    result = fit(
        model,
        losses,
        records(3),
        plan_of(sample_rate=1e-6, steps=5),
        transcript=lines,
        on_step=lambda _: seen.append(weights(model)),
        progress=False,
    )
    assert len(lines.rows) == result.steps == result.charged_steps == 5
    assert all(not torch.equal(before, after) for before, after in pairwise(seen))


def test_a_data_set_without_records_trains_like_any_other() -> None:
    x, y = records()
    result = fit(net(), losses, (x[:0], y[:0]), plan_of(), progress=False)
    assert result.steps == 6


def test_a_step_is_charged_before_one_of_its_records_is_read() -> None:
    order: list[object] = []

    class Watched(Dataset[object]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> object:
            order.append("read")
            return records()[0][index], records()[1][index]

    class Noted(Lines):
        def append(self, *, step: int, event: Event, epsilon: float) -> None:
            order.append(step)

    plan = plan_of(steps=3)
    drawn = [len(plan.sampler.draw(dataset_size=20, step=step, rng=seeded())) for step in range(3)]
    fit(net(), losses, Watched(), plan, transcript=Noted(), rng=seeded(), progress=False)
    assert all(drawn)
    assert order == [0, *["read"] * drawn[0], 1, *["read"] * drawn[1], 2, *["read"] * drawn[2]]


def test_a_refused_step_touches_no_record_and_changes_no_parameter() -> None:
    reads: list[int] = []

    class Watched(Dataset[object]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> object:
            reads.append(index)
            return records()[0][index], records()[1][index]

    class Spent(Lines):
        def append(self, *, step: int, event: Event, epsilon: float) -> None:
            if step == 2:
                raise BudgetExceeded("budget must hold the step. Stop here.")

    model = net()
    at_two: list[Tensor] = []
    counts: list[int] = []

    def note(step: int) -> None:
        at_two.append(weights(model))
        counts.append(len(reads))

    with pytest.raises(BudgetExceeded):
        fit(model, losses, Watched(), plan_of(), transcript=Spent(), on_step=note, progress=False)
    assert len(at_two) == 2
    assert torch.equal(weights(model), at_two[-1])
    assert len(reads) == counts[-1]


def test_every_line_holds_the_step_event_and_an_epsilon_that_never_falls_short() -> None:
    plan, lines = plan_of(steps=250, sample_rate=0.05, noise_multiplier=2.0), Lines()
    result = fit(net(), losses, records(), plan, transcript=lines, progress=False)
    assert [step for step, _, _ in lines.rows] == list(range(250))
    event = PoissonSampled(sample_rate=0.05, event=Gaussian(noise_multiplier=2.0))
    assert {event} == {event for _, event, _ in lines.rows}
    spent = [epsilon for _, _, epsilon in lines.rows]
    assert spent == sorted(spent)
    assert len(set(spent)) <= 200
    for done in (1, 2, 7, 100, 249):
        assert spent[done - 1] >= plan.guarantee(steps=done).epsilon
    assert spent[-1] == result.guarantee.epsilon == plan.guarantee().epsilon


def test_a_fixed_seed_repeats_the_run_and_marks_it() -> None:
    models, results = [net() for _ in range(3)], []
    for model, seed in zip(models, (1, 1, 2), strict=True):
        results.append(fit(model, losses, records(), plan_of(), rng=seeded(seed), progress=False))
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert not torch.equal(weights(models[0]), weights(models[2]))
    assert "fixed seed: not for release" in results[0].guarantee.describe()


def test_two_runs_without_a_seed_differ_whatever_torch_was_seeded_with() -> None:
    models = []
    for _ in range(2):
        model = net()
        torch.manual_seed(0)
        result = fit(model, losses, records(), plan_of(), progress=False)
        models.append(model)
        assert result.guarantee.caveats == ()
    assert not torch.equal(weights(models[0]), weights(models[1]))


def test_without_noise_the_result_says_that_it_is_not_private() -> None:
    result = fit(net(), losses, records(), plan_of(noise_multiplier=0.0), progress=False)
    assert not result.guarantee.is_private
    assert "NOT private" in result.guarantee.describe()


def test_shuffled_epochs_charge_the_first_step_of_each_epoch() -> None:
    lines = Lines()
    plan = plan_of(
        sample_rate=0.25, steps=9, poisson_sampling=False, neighboring_relation="replace_one", noise_multiplier=3.0
    )
    result = fit(net(), losses, records(), plan, transcript=lines, progress=False)
    paid = [step for step, event, _ in lines.rows if event == Gaussian(noise_multiplier=3.0)]
    assert paid == [0, 4, 8]
    assert lines.rows[-1][2] == result.guarantee.epsilon


# --- interrupts ------------------------------------------------------------------------------------------------------


def test_ctrl_c_between_steps_keeps_the_last_finished_step() -> None:
    model = net()
    reached: list[Tensor] = []

    def stop(step: int) -> None:
        reached.append(weights(model))
        if step == 3:
            raise KeyboardInterrupt

    plan = plan_of()
    result = fit(model, losses, records(), plan, on_step=stop, progress=False)
    assert result.interrupted
    assert (result.steps, result.charged_steps) == (3, 3)
    assert torch.equal(weights(model), reached[-1])
    assert result.guarantee.epsilon == plan.guarantee(steps=3).epsilon


def test_ctrl_c_within_a_step_charges_it_and_throws_its_gradient_away() -> None:
    model, lines = net(), Lines()
    reached: list[Tensor] = []

    def stopping(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(reached) == 2:
            raise KeyboardInterrupt
        return losses(m, x, y)

    plan = plan_of(sample_rate=1.0)
    result = fit(
        model,
        stopping,
        records(),
        plan,
        transcript=lines,
        on_step=lambda _: reached.append(weights(model)),
        progress=False,
    )
    assert (result.steps, result.charged_steps, len(lines.rows)) == (2, 3, 3)
    assert torch.equal(weights(model), reached[-1])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.guarantee.epsilon == plan.guarantee(steps=3).epsilon


def test_ctrl_c_during_an_update_waits_until_it_is_whole() -> None:
    import os
    import signal

    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            os.kill(os.getpid(), signal.SIGINT)
            return super().step(closure)

    model = net()
    start = weights(model)
    optimizer = Interrupted(model.parameters(), lr=1.0)
    # A shell that starts the tests in the background has Python ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = fit(model, losses, records(), plan_of(), optimizer=optimizer, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.steps, result.interrupted) == (1, True)
    assert not torch.equal(weights(model), start)


# --- averages --------------------------------------------------------------------------------------------------------


def test_a_tail_average_is_the_mean_of_the_last_weights() -> None:
    model = net()
    seen: list[Tensor] = []
    plan = plan_of(steps=8)
    fit(
        model,
        losses,
        records(),
        plan,
        averaging=TailWeightAverage(fraction=0.5),
        on_step=lambda _: seen.append(weights(model)),
        progress=False,
    )
    torch.testing.assert_close(weights(model), torch.stack(seen[4:]).mean(0))
    assert not torch.equal(weights(model), seen[-1])


def test_an_exponential_average_follows_its_recursion() -> None:
    model = net()
    seen: list[Tensor] = []
    plan = plan_of(steps=20)
    fit(
        model,
        losses,
        records(),
        plan,
        averaging=ExponentialWeightAverage(decay=0.5),
        on_step=lambda _: seen.append(weights(model)),
        progress=False,
    )
    average = seen[0]
    for step, now in enumerate(seen[1:], start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * now
    torch.testing.assert_close(weights(model), average, rtol=1e-5, atol=1e-6)


def test_an_interrupt_before_the_tail_keeps_the_weights() -> None:
    model = net()
    seen: list[Tensor] = []

    def stop(step: int) -> None:
        seen.append(weights(model))
        if step == 2:
            raise KeyboardInterrupt

    fit(model, losses, records(), plan_of(steps=10), averaging=TailWeightAverage(), on_step=stop, progress=False)
    assert torch.equal(weights(model), seen[-1])


def test_progress_shows_steps_and_epsilon_and_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    fit(net(), losses, records(), plan_of())
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "ε ≤" in shown
    assert "loss" not in shown


@pytest.mark.parametrize("compile", [False, True])
def test_a_mean_over_a_records_own_targets_divides_by_all_of_them_whatever_the_batch(compile: bool) -> None:
    """One divisor for each record, in batches of every size: also where its targets are as many as the records."""
    if compile and not any(shutil.which(name) for name in ("g++", "clang++")):
        pytest.skip("no C++ compiler")
    x, y = torch.randn(4, 4, 5), torch.randint(0, 3, (4, 4))
    y[:, 0] = -100

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        return torch.stack([F.cross_entropy(row, target) for row, target in zip(logits, y, strict=True)])

    for records in (2, 3, 4):
        model = nn.Linear(5, 3)
        before = model.weight.detach().clone()
        wanted = sum(
            torch.autograd.grad(F.cross_entropy(model(x[i]), y[i], reduction="sum") / 4, model.weight)[0]
            for i in range(records)
        )
        plan = Plan(
            noise_multiplier=0.0, max_grad_norm=1e6, sample_rate=1.0, steps=1, expected_batch_size=1.0, delta=1e-5
        )
        fit(
            model,
            loss,
            (x[:records], y[:records]),
            plan,
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
            progress=False,
            performance=PerformanceOptions(compile=compile),
        )
        assert torch.allclose(before - model.weight.detach(), wanted, atol=1e-5)
