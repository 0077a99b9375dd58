"""Flower's messages, without Flower's network: what the strategy sends, takes, leaves out, and charges."""

import math

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: the extra `federated` has it")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod

from sordino import accounting
from sordino.clipping import QuantileClipping
from sordino.definitions import PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.federated.flower import CertifiedAccountant, PrivateStrategy, clipping_mod, local_privacy_mod
from sordino.training import Plan


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Flower's messages carry who made them; its server sets that for an app."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def plan(**changes):
    values = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "sample_rate": 1.0,
        "steps": 3,
        "expected_batch_size": 4.0,
        "delta": 1e-5,
        "privacy_unit": PrivacyUnit.CLIENT,
    }
    return Plan(**{**values, **changes})


class Grid:
    """What a strategy asks of Flower's grid; every node answers by `answer(node, arrays)`."""

    def __init__(self, nodes, answer):
        self.nodes, self.answer, self.asked = nodes, answer, []

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.append(node)
            replies += self.replies(node, message)
        return replies

    def replies(self, node, message):
        content = self.answer(node, message.content["arrays"].to_torch_state_dict())
        contents = content if isinstance(content, list) else [content]
        return [reply_from(message, one) for one in contents if one is not None]


def reply_from(message, content):
    return Message(content, reply_to=message)


def returned(arrays, *entries, examples=60, **more):
    new = {name: value.clone() for name, value in arrays.items()}
    new["weight"] += torch.tensor([entries], dtype=torch.float32)
    return RecordDict(
        {
            "arrays": ArrayRecord(torch_state_dict={**new, **more}),
            "metrics": MetricRecord({"num-examples": examples, "loss": 0.5}),
        }
    )


def line():
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def started(answer, nodes=(11, 22, 33, 44), num_clients=4, **changes):
    strategy = PrivateStrategy(line(), plan(**changes), num_clients=num_clients)
    grid = Grid(nodes, answer)
    result = strategy.start(grid)
    return strategy, grid, result


def test_the_model_moves_by_the_clipped_sum_over_the_planned_cohort():
    steps = {11: (3.0, 4.0, 0.0), 22: (0.0, 0.1, 0.0), 33: (0.0, 0.0, -1.0)}
    strategy, grid, result = started(
        lambda node, arrays: returned(arrays, *steps[node]) if node in steps else None, steps=1
    )
    expected = [0.6 / 4, 0.9 / 4, -0.25]
    assert strategy.server.model.weight.detach()[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert result.arrays.to_torch_state_dict()["weight"][0].tolist() == pytest.approx(expected, abs=1e-5)
    assert sorted(grid.asked) == [11, 22, 33, 44]


def test_what_clients_report_of_their_size_changes_nothing():
    one = started(lambda node, arrays: returned(arrays, 0.1 * (node == 11), 0, 0, examples=1), steps=1)[0]
    hundred = started(
        lambda node, arrays: returned(arrays, 0.1 * (node == 11), 0, 0, examples=100 if node == 11 else 1), steps=1
    )[0]
    assert torch.equal(one.server.model.weight, hundred.server.model.weight)


@pytest.mark.parametrize(
    "bad",
    [
        lambda arrays: returned(arrays, math.nan, 0, 0),
        lambda arrays: returned(arrays, math.inf, 0, 0),
        lambda arrays: RecordDict({}),
        lambda arrays: RecordDict({"arrays": ArrayRecord(torch_state_dict={"weight": torch.ones(2, 5)})}),
        lambda arrays: RecordDict({"arrays": ArrayRecord(torch_state_dict={"other": torch.ones(1, 3)})}),
        lambda arrays: Error(code=0, reason="battery"),
        lambda arrays: returned(arrays, 0, 0, 0),
    ],
    ids=["nan", "inf", "empty", "shape", "name", "error", "zero"],
)
def test_broken_absent_and_zero_replies_count_as_zero_and_stop_nothing(bad):
    strategy, _, _ = started(lambda node, arrays: bad(arrays) if node == 11 else returned(arrays, 0, 0, 0.5), steps=1)
    assert strategy.server.model.weight.detach()[0].tolist() == pytest.approx([0, 0, 1.5 / 4], abs=1e-6)
    assert strategy.server.done == 1


def test_a_second_reply_of_a_node_is_left_out():
    strategy, _, _ = started(lambda node, arrays: [returned(arrays, 0, 0, 0.5)] * (2 if node == 11 else 1), steps=1)
    assert strategy.server.model.weight.detach()[0].tolist() == pytest.approx([0, 0, 0.5], abs=1e-6)


def test_buffers_and_counters_of_clients_never_reach_the_server():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    strategy = PrivateStrategy(model, plan(steps=1), num_clients=4)

    def answer(_node, arrays):
        new = {name: value + 1 for name, value in arrays.items()}
        return RecordDict({"arrays": ArrayRecord(torch_state_dict=new)})

    strategy.start(Grid((1, 2, 3, 4), answer))
    assert model[1].running_mean.abs().max() == 0
    assert model[1].num_batches_tracked == 0
    assert model[0].weight.requires_grad


def test_an_adaptive_bound_rises_and_falls_to_the_norms():
    """All updates of norm 1: a bound of 0.1 must rise to it, and one of 10 must fall to it."""
    for start in (0.1, 10.0):
        strategy, _, _ = started(
            lambda node, arrays: returned(arrays, 0, 0, 1.0),
            steps=60,
            max_grad_norm=start,
            noise_multiplier=0.01,
            clipping=QuantileClipping(quantile=0.5, learning_rate=0.2, count_noise=0.05),
        )
        assert 0.6 < strategy.server.bounds[0] < 1.7


def test_rounds_are_charged_at_the_rate_of_the_population_not_of_the_connected():
    strategy, grid, _ = started(
        lambda node, arrays: returned(arrays, 0, 0, 0.1),
        nodes=range(30),
        num_clients=100,
        sample_rate=0.2,
        steps=40,
        noise_multiplier=1.0,
        expected_batch_size=20.0,
    )
    event = SelfComposed(event=PoissonSampled(sample_rate=0.2, event=Gaussian(noise_multiplier=1.0)), count=40)
    assert strategy.guarantee().epsilon == pytest.approx(accounting.epsilon(event, 1e-5).upper, rel=1e-9)
    assert strategy.guarantee().privacy_unit is PrivacyUnit.CLIENT
    # Only connected clients can be asked: 30 of 100, each with probability 0.2 in each of 40 rounds.
    assert abs(len(grid.asked) - 240) < 5 * math.sqrt(240 * 0.8)


def test_more_nodes_than_the_population_are_refused_before_anything_is_sent():
    strategy = PrivateStrategy(line(), plan(), num_clients=3)
    grid = Grid((1, 2, 3, 4), lambda node, arrays: returned(arrays, 0, 0, 0))
    with pytest.raises(InvalidArgument, match="num_clients"):
        strategy.start(grid)
    assert not grid.asked


def test_more_rounds_than_planned_are_refused():
    strategy = PrivateStrategy(line(), plan(steps=2), num_clients=4)
    with pytest.raises(InvalidArgument, match="num_rounds"):
        strategy.start(Grid((1,), lambda node, arrays: None), num_rounds=3)


def test_clients_are_never_asked_to_evaluate_and_their_metrics_go_nowhere():
    strategy, _, result = started(lambda node, arrays: returned(arrays, 0, 0, 0.1))
    assert strategy.configure_evaluate(1, None, None, None) == []
    assert not result.train_metrics_clientapp
    assert not result.evaluate_metrics_clientapp


# --- client mods -------------------------------------------------------------------------------------------------


def through(mod, entries, *, context=None, more=None):
    given = {"weight": torch.zeros(1, 3), "count": torch.tensor(5), **(more or {})}
    message = Message(
        RecordDict({"arrays": ArrayRecord(torch_state_dict=given), "config": ConfigRecord()}),
        message_type="train",
        dst_node_id=7,
    )
    context = (
        Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={}) if context is None else context
    )

    def app(message, context):
        arrays = message.content["arrays"].to_torch_state_dict()
        arrays["count"] += 1
        return Message(returned(arrays, *entries, count=arrays["count"]), reply_to=message)

    reply = mod(message, context, app)
    return reply.content, context


def test_the_clipping_mod_bounds_the_difference_and_sends_nothing_else():
    content, _ = through(clipping_mod(max_update_norm=1.0), (3.0, 4.0, 0.0))
    sent = content["arrays"].to_torch_state_dict()
    assert sent["weight"][0].tolist() == pytest.approx([0.6, 0.8, 0.0], abs=1e-6)
    assert sent["count"] == 5
    assert list(content) == ["arrays"]


@pytest.mark.parametrize("entries", [(math.nan, 0, 0), (math.inf, 0, 0), (0, 0, 0)])
def test_mods_survive_updates_that_are_zero_or_not_finite(entries):
    content, _ = through(clipping_mod(max_update_norm=1.0), entries)
    assert not content["arrays"].to_torch_state_dict()["weight"].any()


def test_the_local_mod_really_sends_noise_of_the_right_size_and_only_so_often():
    mod = local_privacy_mod(epsilon=10.0, delta=1e-5, max_update_norm=1.0, rounds=2)
    width = 4000
    sent, context = [], None
    for _ in range(3):
        content, context = through(mod, (3.0, 4.0, 0.0), context=context, more={"wide": torch.zeros(width)})
        sent.append(content["arrays"].to_torch_state_dict()["wide"])
    from sordino.federated import LocalPrivacy

    expected = LocalPrivacy(epsilon=10.0, delta=1e-5, max_update_norm=1.0, rounds=2).stddev
    assert float(sent[0].std()) == pytest.approx(expected, rel=0.05)
    assert float(sent[1].std()) == pytest.approx(expected, rel=0.05)
    assert abs(float(np.corrcoef(sent[0], sent[1])[0, 1])) < 0.07
    assert not sent[2].any()


# --- the accountant ----------------------------------------------------------------------------------------------


def config(method=SamplingMethod.POISSON, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE, **more):
    return PrivacyConfig(
        target_delta=1e-5,
        population_size=1000,
        neighboring_relation=neighboring_relation,
        sampling_method=method,
        **more,
    )


def test_the_accountant_agrees_with_flowers_own_and_is_never_above_it():
    from flwr.serverapp import RdpAccountant

    event = GaussianPrivacyEvent(noise_multiplier=1.1, sample_size=50, population_size=1000)
    ours, theirs = CertifiedAccountant(config()), RdpAccountant(config())
    for accountant in (ours, theirs):
        accountant.compose(event, 100)
    assert 0.7 * theirs.get_epsilon(1e-5) < ours.get_epsilon(1e-5) <= theirs.get_epsilon(1e-5)
    assert ours.num_releases == 100
    assert ours.get_delta(ours.get_epsilon(1e-5)) == pytest.approx(1e-5, rel=1e-3)


def test_the_accountant_saves_refuses_and_knows_its_budget():
    event = GaussianPrivacyEvent(noise_multiplier=1.0, sample_size=50, population_size=1000)
    accountant = CertifiedAccountant(config(max_epsilon=3.0))
    assert not accountant.would_exceed(event)
    assert accountant.would_exceed(event, count=5000)
    accountant.compose(event, 10)
    again = CertifiedAccountant(config(max_epsilon=3.0))
    again.load_state_dict(accountant.state_dict())
    assert again.get_privacy_spent() == accountant.get_privacy_spent()
    with pytest.raises(InvalidArgument, match="population_size"):
        accountant.compose(GaussianPrivacyEvent(noise_multiplier=1.0, sample_size=50, population_size=999))


def test_without_replacement_the_noise_counts_half():
    event = GaussianPrivacyEvent(noise_multiplier=2.0, sample_size=1000, population_size=1000)
    accountant = CertifiedAccountant(config(SamplingMethod.WITHOUT_REPLACEMENT, NeighboringRelation.REPLACE_ONE))
    accountant.compose(event)
    assert accountant.get_epsilon(1e-5) >= accounting.epsilon(Gaussian(noise_multiplier=1.0), 1e-5).lower
