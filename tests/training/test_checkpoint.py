import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.training.averaging import ExponentialWeightAverage, TailWeightAverage, WeightAverage
from sordino.training.checkpoint import from_bytes, load_module, load_optimizer, module_state, read, to_bytes
from sordino.training.run_writer import commit_to_batch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}
SCHEDULES = {
    "step": lambda o: StepLR(o, 3),
    "multistep": lambda o: MultiStepLR(o, [2, 2, 6]),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "one cycle": lambda o: OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.2, step_size_up=4, cycle_momentum=False),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: SequentialLR(o, [StepLR(o, 2), CosineAnnealingLR(o, 10)], milestones=[4]),
}


class Net(nn.Module):
    """With a tied weight, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x):
        return self.second(self.first(x))


def steps(module, optimizer, schedule, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def round_trip(state, facts=None):
    return from_bytes(to_bytes(facts or {}, state))[1]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit_as_if_it_had_never_stopped(optimizer):
    whole, cut, again = Net(), Net(), Net()
    cut.load_state_dict(whole.state_dict())
    one, two, three = (optimizer(net.parameters()) for net in (whole, cut, again))
    for net, stepper in ((whole, one), (cut, two)):
        steps(net, stepper, None, 5, seed=1)
    saved = round_trip({"model": module_state(cut), "optimizer": two.state_dict()})
    load_module(again, saved["model"])
    load_optimizer(three, type(two).__name__, saved["optimizer"])
    for net, stepper in ((whole, one), (again, three)):
        steps(net, stepper, None, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_goes_on_as_if_it_had_never_stopped(schedule):
    nets = [Net(), Net()]
    steppers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    schedules = [schedule(stepper) for stepper in steppers]
    steps(nets[0], steppers[0], schedules[0], 5, seed=1)
    saved = round_trip({"schedule": schedules[0].state_dict(), "optimizer": steppers[0].state_dict()})
    load_optimizer(steppers[1], "SGD", saved["optimizer"])
    schedules[1].load_state_dict(saved["schedule"])
    rates = []
    for net, stepper, plan in zip(nets, steppers, schedules, strict=True):
        rates.append([])
        for _ in range(10):
            rates[-1].append(stepper.param_groups[0]["lr"])
            steps(net, stepper, plan, 1, seed=2)
    assert rates[0] == rates[1]


@pytest.mark.parametrize("rule", [TailWeightAverage(fraction=0.6), ExponentialWeightAverage(decay=0.7)])
def test_an_average_goes_on_as_if_it_had_never_stopped(rule):
    nets = [Net(), Net()]
    averages = [WeightAverage(rule, net, steps=10) for net in nets]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    for step in range(10):
        steps(nets[0], optimizer, None, 1, seed=step)
        averages[0].update(step)
        if step == 6:
            averages[1].load_state_dict(round_trip({"averaging": averages[0].state_dict()})["averaging"])
        if step > 6:
            load_module(nets[1], module_state(nets[0]))
            averages[1].update(step)
    for average in averages:
        average.load()
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_every_parameter_and_buffer_comes_back_also_those_that_state_dict_leaves_out():
    one, other = Net(), Net()
    load_module(other, round_trip({"model": module_state(one)})["model"])
    assert torch.equal(one.scratch, other.scratch)
    assert torch.equal(one.kept, other.kept)
    assert other.second.weight is other.first.weight
    assert torch.equal(one.first.weight, other.first.weight)


def test_numbers_that_json_lacks_and_containers_of_every_kind_come_back():
    state = {
        "infinite": float("inf"),
        "tuple": (1, (2.5, None), [True, "x"]),
        "by number": {0: {"step": torch.tensor(3.0)}, 7: {}},
        "numpy": np.float64(0.5),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    back = round_trip(state)
    assert back["infinite"] == float("inf")
    assert back["tuple"] == state["tuple"]
    assert back["by number"][0]["step"].shape == ()
    assert back["by number"][7] == {}
    assert back["numpy"] == 0.5
    assert back["half"].dtype is torch.bfloat16


@pytest.mark.parametrize("thing", [object(), lambda x: x, torch.ones(2).to_sparse(), {(1, 2): 3}])
def test_python_objects_are_refused_by_their_place(thing):
    with pytest.raises(InvalidArgument, match="/optimizer/3"):
        to_bytes({}, {"optimizer": {3: thing}})


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "other safetensors", "empty", "cut"])
def test_files_that_are_no_checkpoints_are_refused_and_nothing_in_them_is_run(tmp_path, kind):
    from safetensors.torch import save

    file, target = tmp_path / "checkpoint.safetensors", tmp_path / "ran"
    good = to_bytes({"step": 1}, {"model": {"w": torch.ones(3)}})
    if kind == "torch.save":
        torch.save({"model": Bomb(target)}, file)
    else:
        content = {
            "pickle": pickle.dumps(Bomb(target)),
            "other safetensors": save({"w": torch.ones(1)}),
            "empty": b"",
            "cut": good[: len(good) // 2],
        }
        file.write_bytes(content[kind])
    with pytest.raises(InvalidArgument, match="must be a checkpoint that sordino wrote"):
        read(file)
    assert not target.exists()


def test_a_module_that_differs_is_refused_by_name_and_nothing_is_written():
    saved = module_state(Net())
    other = nn.ModuleDict({"first": nn.Linear(3, 4)})
    before = {name: value.clone() for name, value in module_state(other).items()}
    with pytest.raises(InvalidArgument, match=r"differs in .*kept.*first\.weight"):
        load_module(other, saved)
    assert all(torch.equal(value, before[name]) for name, value in module_state(other).items())


def test_another_optimizer_is_refused_by_name():
    saved = torch.optim.Adam(Net().parameters()).state_dict()
    with pytest.raises(InvalidArgument, match="must be Adam"):
        load_optimizer(torch.optim.SGD(Net().parameters(), lr=1.0), "Adam", saved)
    with pytest.raises(InvalidArgument, match="same groups"):
        load_optimizer(torch.optim.Adam([torch.ones(1, requires_grad=True)]), "Adam", saved)


def test_a_checkpoint_is_json_and_tensors_only():
    content = to_bytes({"step": 3}, {"model": {"w": torch.ones(2)}})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header["__metadata__"]["content"])["facts"] == {"step": 3}
    assert len(content) == 8 + length + 2 * 4


def test_a_commitment_has_one_length_and_differs_by_key_step_and_batch():
    one, other = KeyedRNG(seed=1, reproducible=True), KeyedRNG()
    batch, empty = np.arange(5, dtype=np.int64), np.empty(0, dtype=np.int64)
    found = [
        commit_to_batch(indices, step=step, rng=rng)
        for indices in (batch, empty)
        for step in (0, 1)
        for rng in (one, other)
    ]
    assert len(set(found)) == len(found)
    assert {len(text) for text in found} == {64}
    again = commit_to_batch(batch, step=0, rng=KeyedRNG(seed=1, reproducible=True))
    assert again == found[0]


def test_the_name_of_a_key_is_not_the_key_and_every_run_has_another():
    names = {KeyedRNG().commitment for _ in range(50)}
    assert len(names) == 50
    seeded = KeyedRNG(seed=3, reproducible=True)
    assert seeded.commitment == KeyedRNG(seed=3, reproducible=True).commitment
    assert seeded.commitment != seeded._key.hex()
    assert replace(seeded).commitment == seeded.commitment
