"""Ways by which values of records get past the notes of a loop: into sizes, plain tensors, constants, later batches."""

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from loops import records, train
from sordino import Plan, fit
from sordino.errors import CoupledRecords, NonPrivateStep, PrivacyError, UncapturedParameter
from sordino.training.engine import PrivacyEngine
from sordino.training.loss_tracing.carried import CrossBatchState
from sordino.training.loss_tracing.loss_tracer import (
    CheckedLossForm,
    is_recheck_due,
    module_state_key,
    order_of_magnitude,
)


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- sizes and numbers --------------------------------------------------------------------------------------------


def size_of_a_selection(model, batch, state):
    first = batch[1] == 0
    return (losses_of(model, batch) * first).sum() / (batch[0][first].shape[0] + 1)


def length_of_a_selection(model, batch, state):
    first = batch[1] == 0
    return (losses_of(model, batch) * first).sum() / (len(batch[0][first]) + 1)


def balance_from_lengths(model, batch, state):
    ratio = (1 + len(batch[1][batch[1] == 1])) / (1 + len(batch[1][batch[1] == 0]))
    return (losses_of(model, batch) * torch.where(batch[1] == 0, ratio, 1.0)).mean()


def number_of_records(model, batch, state):
    return losses_of(model, batch).sum() / len(batch[0])


def tensor_of_a_number(model, batch, state):
    ratio = (batch[1] == 1).sum().item() / (1 + (batch[1] == 0).sum().item())
    weight = torch.tensor([1.0, ratio, 1.0])
    return (weight[batch[1]] * losses_of(model, batch)).mean()


def bare_number_in_a_tensor(model, batch, state):
    return losses_of(model, batch).mean() * torch.tensor(float(batch[0].std()))


# --- plain tensors ------------------------------------------------------------------------------------------------


def copy_by_constructor(model, batch, state):
    center = torch.tensor(batch[0].mean(0))
    return F.cross_entropy(model(batch[0] - center), batch[1])


def copy_of_the_output(model, batch, state):
    out = model(batch[0])
    return F.cross_entropy(out - torch.tensor(out.detach().mean(0)), batch[1])


def deep_copy(model, batch, state):
    return F.cross_entropy(model(batch[0] - copy.deepcopy(batch[0]).mean(0)), batch[1])


def weights_filled_in(model, batch, state):
    weight = torch.zeros(3)
    for label in range(3):
        weight[label] = 1 / (1 + (batch[1] == label).sum())
    return (weight[batch[1]] * losses_of(model, batch)).mean()


def weights_of_records_filled_in(model, batch, state):
    weight = torch.empty(len(batch[1]))
    for label in range(3):
        weight[batch[1] == label] = 1 / (1 + (batch[1] == label).sum())
    return (weight * losses_of(model, batch)).mean()


def written_to_by_out(model, batch, state):
    center = torch.empty(3)
    out = model(batch[0])
    torch.mean(out.detach(), 0, out=center)
    return F.cross_entropy(out - center, batch[1])


# --- later batches ------------------------------------------------------------------------------------------------


def center_in_place(model, batch, state):
    center = state.setdefault("center", torch.zeros(3))
    out = model(batch[0])
    loss = F.cross_entropy(out - center, batch[1])
    center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
    return loss


def queue(model, batch, state):
    kept = state.setdefault("queue", torch.randn(16, 3))
    out = model(batch[0])
    loss = F.cross_entropy(out, batch[1]) + (out @ kept.clone().t()).logsumexp(1).mean()
    kept[: len(out)] = out.detach()[:16]
    return loss


def memory_by_constructor(model, batch, state):
    out = model(batch[0])
    loss = F.cross_entropy(out - state.get("center", torch.zeros(3)), batch[1])
    state["center"] = torch.tensor(out.detach().mean(0))
    return loss


def memory_by_numpy(model, batch, state):
    out = model(batch[0])
    loss = F.cross_entropy(out - state.get("center", torch.zeros(3)), batch[1])
    state["center"] = torch.from_numpy(out.detach().mean(0).numpy().copy())
    return loss


def average_of_losses(model, batch, state):
    loss = losses_of(model, batch).mean()
    weighted = loss * torch.tensor(state.get("average", 1.0))
    state["average"] = 0.9 * state.get("average", 1.0) + 0.1 * loss.item()
    return weighted


# --- modules ------------------------------------------------------------------------------------------------------


class Centered(nn.Module):
    """Keeps what it saw in attributes; `shift` is what a loop may put there."""

    def __init__(self):
        super().__init__()
        self.body, self.shift = nn.Linear(6, 3), 0.0
        self.register_buffer("running", torch.zeros(3))

    def forward(self, x):
        out = self.body(x - self.shift) - self.running
        self.hidden, self.center = out.detach(), out.detach().mean(0)
        return out


def center_from_an_attribute(model, batch, state):
    out = model(batch[0])
    return F.cross_entropy(out - model.center, batch[1])


def mean_of_an_attribute(model, batch, state):
    out = model(batch[0])
    return F.cross_entropy(out - model.hidden.mean(0), batch[1])


def buffer_written_by_the_loop(model, batch, state):
    out = model(batch[0])
    loss = F.cross_entropy(out, batch[1])
    model.running.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
    return loss


def attribute_set_by_the_loop(model, batch, state):
    model.shift = batch[0].mean(0)
    return F.cross_entropy(model(batch[0]), batch[1])


def attribute_of_the_batch_before(model, batch, state):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model.shift = batch[0].mean(0)
    return loss


def linear():
    return nn.Linear(6, 3)


SUMMED = {"loss_reduction": "sum"}
CASES = [
    (size_of_a_selection, linear, SUMMED),
    (length_of_a_selection, linear, SUMMED),
    (balance_from_lengths, linear, {}),
    (number_of_records, linear, SUMMED),
    (tensor_of_a_number, linear, {}),
    (bare_number_in_a_tensor, linear, {}),
    (copy_by_constructor, linear, {}),
    (copy_of_the_output, linear, {}),
    (deep_copy, linear, {}),
    (weights_filled_in, linear, {}),
    (weights_of_records_filled_in, linear, {}),
    (written_to_by_out, linear, {}),
    (center_in_place, linear, {}),
    (queue, linear, {}),
    (memory_by_constructor, linear, {}),
    (memory_by_numpy, linear, {}),
    (average_of_losses, linear, {}),
    (center_from_an_attribute, Centered, {}),
    (mean_of_an_attribute, Centered, {}),
    (buffer_written_by_the_loop, Centered, {}),
    (attribute_set_by_the_loop, Centered, {}),
    (attribute_of_the_batch_before, Centered, {}),
]


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize(("loop", "model", "options"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_values_that_get_past_the_notes_are_refused(loop, model, options):
    def train_for_a_while():
        for _ in range(4):
            train(loop, model, **options)

    with pytest.raises(PrivacyError):
        train_for_a_while()


# --- what must go on working --------------------------------------------------------------------------------------


def one_hot(model, batch, state):
    target = torch.zeros(len(batch[1]), 3)
    target[torch.arange(len(batch[1])), batch[1]] = 1
    return F.mse_loss(model(batch[0]), target)


def metric_before_the_loss(model, batch, state):
    out = model(batch[0])
    state["right"] = state.get("right", 0.0) + (out.argmax(1) == batch[1]).float().mean().item()
    return F.cross_entropy(out, batch[1])


def annealed(model, batch, state):
    state["step"] = state.get("step", 0) + 1
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * state["step"] * out.square().mean()


def counted(model, batch, state):
    state["seen"] = state.get("seen", 0) + len(batch[0])
    return losses_of(model, batch).sum() / batch[0].size(0)


@pytest.mark.parametrize("loop", [one_hot, metric_before_the_loss, annealed, counted])
def test_ordinary_loops_beside_them_go_on(loop):
    train(loop, linear)


# --- what is proved again ------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Couples its records by integers alone, once `beta` is not zero."""

    def __init__(self, vocabulary=9):
        super().__init__()
        self.embed, self.head, self.beta = nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary), 0.0

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden - self.beta * hidden.mean(0))


def token_loss(model, ids):
    return F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").mean(1)


def warmed_up(model, batch, state):
    state["beta"] = min(1.0, state.get("beta", -0.5) + 0.5)
    out = model(batch[0])
    return token_loss(model, batch[0]).mean() + state["beta"] * (out - out.mean(0)).square().mean()


def schedule_in_the_module(model, batch, state):
    model.beta = min(1.0, state.setdefault("step", 0) / 2)
    state["step"] += 1
    return token_loss(model, batch[0]).mean()


@pytest.mark.parametrize("loop", [warmed_up, schedule_in_the_module])
def test_a_coupling_whose_weight_starts_at_zero_is_found_when_it_grows(loop):
    with pytest.raises(CoupledRecords):
        train(loop, Tokens, "tokens")


class Switched(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


def test_a_part_that_is_put_into_training_later_is_tried_anew():
    def loop(model, batch, state):
        model[1].train("switched" in state)
        state["switched"] = True
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(CoupledRecords):
        train(loop, lambda: nn.Sequential(nn.Linear(6, 4), Switched(), nn.Linear(4, 3)))


PLAN = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.25, steps=20, expected_batch_size=10.0, delta=1e-5)
IDS = torch.randint(0, 9, (40, 6), generator=torch.Generator().manual_seed(0))


def test_fit_tries_a_model_anew_whose_attributes_change():
    model = Tokens()
    with pytest.raises(CoupledRecords):
        fit(model, token_loss, (IDS,), PLAN, progress=False, on_step=lambda _: setattr(model, "beta", 1.0))


def test_fit_tries_a_loss_anew_now_and_then():
    weight = {"beta": 0.0}

    def loss(model, ids):
        losses = token_loss(model, ids)
        return losses - weight["beta"] * losses.detach().mean() * losses

    with pytest.raises(CoupledRecords):
        fit(Tokens(), loss, (IDS,), PLAN, progress=False, on_step=lambda _: weight.update(beta=1.0))


def masked(model, ids):
    valid = (ids != 50).float()
    losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none") * valid
    return losses.sum(1) / valid.sum() * len(ids)


def test_a_value_that_the_code_compares_with_is_tried():
    with pytest.raises(CoupledRecords):
        fit(Tokens(60), masked, (IDS,), PLAN, progress=False)


def sentinel(model, batch, state):
    present = (batch[0][:, 0] != -999.0).float()
    return (losses_of(model, batch) * present).sum() / present.sum()


def test_a_float_that_marks_what_is_missing_is_tried():
    with pytest.raises(CoupledRecords):
        train(sentinel, linear)


# --- with a criterion ---------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        self.hidden = self.first(x)
        return self.last(self.hidden)


def past_the_output(model, batch, state):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss + (model.hidden - model.hidden.mean(0)).square().mean()


def second_learner(model, batch, state):
    head = state.setdefault("head", nn.Linear(6, 3))
    F.cross_entropy(head(batch[0]), batch[1]).backward()
    return F.cross_entropy(model(batch[0]), batch[1])


def test_with_a_criterion_a_loss_may_not_reach_the_module_past_its_output():
    with pytest.raises(NonPrivateStep):
        train(past_the_output, Two, criterion=F.cross_entropy)


def test_with_a_criterion_nothing_else_learns():
    with pytest.raises(UncapturedParameter):
        train(second_learner, Two, criterion=F.cross_entropy)


# --- schedulers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", [lambda loss: loss.detach(), lambda loss: loss.item(), lambda loss: (loss.item() + 1) / 2]
)
def test_a_scheduler_may_not_follow_the_loss(read):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    x, y = cast("tuple[Tensor, Tensor]", next(iter(loader)))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with pytest.raises(NonPrivateStep):
        scheduler.step(read(loss))
    scheduler.step(0.5)


# --- parts --------------------------------------------------------------------------------------------------------


def test_a_form_is_proved_again_when_a_constant_grows_and_now_and_then():
    form = CheckedLossForm(late=(), numbers=(0.0, 3.0), records=8)
    assert not form.meet((), (0.0, 3.5), 9)
    assert form.meet((), (1e-3, 3.5), 9)
    assert not form.meet((), (1.1e-3, 2.1), 7)
    assert form.meet((), (1.1e-3, -2.1), 7)
    assert [times for times in range(1, 300) if is_recheck_due(times)] == [16, 64, 256]
    assert order_of_magnitude(0.0) == order_of_magnitude(-0.0) != order_of_magnitude(1e-300)


@pytest.mark.parametrize("of", [lambda n: n, lambda n: 1 / n])
def test_constants_that_are_the_number_of_records_are_refused_at_once(of):
    form = CheckedLossForm(late=(), numbers=(of(8),), records=8)
    with pytest.raises(CoupledRecords):
        form.meet((), (of(9),), 9)


def test_constants_in_step_with_the_number_of_records_are_refused_the_second_time():
    form = CheckedLossForm(late=(), numbers=(8 / 3,), records=8)
    form.meet((), (9 / 3,), 9)
    with pytest.raises(CoupledRecords):
        form.meet((), (11 / 3,), 11)


def test_marks_of_a_module_tell_modes_frozen_parts_and_attributes():
    model = Tokens()
    before = module_state_key(model)
    model.beta = 0.5
    assert module_state_key(model) != before
    model.beta = 0.0
    assert module_state_key(model) == before
    model.head.eval()
    assert module_state_key(model) != before
    model.head.train()
    model.embed.weight.requires_grad_(False)
    assert module_state_key(model) != before


def test_copies_are_known_by_long_values_only():
    carried = CrossBatchState()
    carried.remember(torch.tensor([0.1, 0.2]))
    carried.remember(torch.tensor(0.5))
    carried.tell(1 / 3)
    assert carried.is_copy(torch.tensor([0.1, 0.2]))
    assert carried.is_copy(torch.tensor([[1.0, 1 / 3]]))
    assert not carried.is_copy(torch.tensor([0.1, 0.3]))
    assert not carried.is_copy(torch.tensor(0.5))
    assert not carried.is_copy(torch.tensor([0.1, 0.2]).bfloat16())


def test_what_was_written_to_is_known_by_its_memory_as_long_as_it_lives():
    carried, tensor = CrossBatchState(), torch.zeros(3)
    carried.write(tensor[:1])
    assert carried.was_written(tensor)
    assert carried.is_left()
    assert not carried.was_written(torch.zeros(3))
    del tensor
    assert not carried.is_left()


def test_a_tensor_is_constant_until_it_is_changed():
    carried, tensor = CrossBatchState(), torch.zeros(3)
    carried.keep_constant(tensor)
    assert carried.is_constant(tensor)
    assert not carried.is_constant(tensor.clone())
    tensor.add_(1)
    assert not carried.is_constant(tensor)
