"""Cases: one record moves the clipped sum by at most the clipping norm, and nothing but a private step is taken."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from sordino.audit.case import Case, Wrong, case
from sordino.audit.library import Library, Loss
from sordino.audit.made_up import determined, distance, must_be_exact, must_stay_within, normal

__all__ = ["SENSITIVITY"]

SENSITIVITY: dict[str, Case] = {}
_LOSSES = {
    "squared": F.mse_loss,
    "logistic": lambda out, y, **options: F.binary_cross_entropy_with_logits(out, (y > 0).to(out), **options),
    "absolute": F.l1_loss,
    "Huber": F.huber_loss,
}


def _linear() -> nn.Module:
    return nn.Linear(5, 1)


def _loss(name: str) -> Loss:
    function = _LOSSES[name]
    return Loss(
        mean=lambda model, batch: function(model(batch[0]), batch[1]),
        each=lambda model, batch: function(model(batch[0]), batch[1], reduction="none").flatten(1).mean(1),
    )


def _records(outputs: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = normal(16, 5), normal(16, outputs)
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
        must_stay_within(library, lambda: nn.Linear(5, 3), (x, y), (x[1:], y[1:]), _loss(name))

    @case(SENSITIVITY, f"the mean of a {name} loss over (B, 1) is the mean over records")
    def mean(library: Library) -> None:
        must_be_exact(library, _linear, _records(1), _loss(name))


for _name in _LOSSES:
    _of_losses(_name)


@case(SENSITIVITY, "targets that broadcast over the batch are refused", expects="refusal")
def _broadcast(library: Library) -> None:
    x, y = _records(1)
    loss = Loss.of(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1))
    must_stay_within(library, _linear, (x, y[:, 0]), (x[1:], y[1:, 0]), loss)


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))


def _sum_with_dropout(library: Library, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    model = determined(_dropping())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return library.clipped_sum(model, batch, _loss("squared"), max_grad_norm=0.7)


@case(SENSITIVITY, "dropout masks don't follow from a public seed, under which they belong to places", expects="either")
def _public_masks(library: Library) -> None:
    one, other = (_sum_with_dropout(library, _records(1)) for _ in range(2))
    if distance(one, other) == 0:
        raise Wrong("equal seeds give equal masks: one record less gives every later record another one")


class _Noisy(nn.Module):
    """Adds random numbers to its inputs, as augmentations and diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x + 10 * torch.randn_like(x))


def _in_loop(model: nn.Module, x: Tensor) -> Tensor:
    return model(x * torch.bernoulli(torch.full(x.shape, 0.5)))


def _drawn_by(name: str, build: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    loss = Loss.of(lambda model, batch: (call(model, batch[0]) - batch[1]).square().mean(1))

    @case(SENSITIVITY, f"{name} don't follow from a public seed: one record less moves no other's", expects="either")
    def check(library: Library) -> None:
        x, y = _records(1)
        sums = []
        # Equal numbers for equal places would give twice the same sum, and one record less another one's numbers.
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(42)
                sums.append(library.clipped_sum(determined(build()), (x, y), loss, max_grad_norm=0.7))
        if distance(*sums) == 0:
            raise Wrong("equal seeds give equal numbers: one record less gives every later record another one's")


_drawn_by("random numbers inside a model", _Noisy, lambda model, x: model(x))
_drawn_by("random masks in the loop", _linear, _in_loop)


@case(SENSITIVITY, "the state of torch's generator after a step doesn't tell how many records were drawn")
def _told_by_state(library: Library) -> None:
    x, y = _records(1)
    states = []
    for records in ((x, y), (x[1:], y[1:])):
        model = determined(_dropping())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                library.clipped_sum(model, records, _loss("squared"), max_grad_norm=0.7)
            except library.refusals:
                continue
            states.append(torch.get_rng_state())
    if len(states) == 2 and not torch.equal(*states):
        raise Wrong("neighbours leave different states, which checkpoints keep")


def _unchanged(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


@case(SENSITIVITY, "a step without a clipped backward pass raises and changes nothing")
def _step_alone(library: Library) -> None:
    model = _linear()
    private = library.make_private(model, TensorDataset(*_records(1)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    raised = True
    try:
        private.optimizer.step()
        raised = False
    except library.refusals:
        pass
    finally:
        private.detach()
    if not raised or not _unchanged(model, before):
        raise Wrong("a gradient that was never clipped reached the parameters" if not raised else "it changed them")


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
        raise Wrong("it steps without noise")


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
        raise Wrong("it steps on gradients past the bill")


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
        raise Wrong("the weights are not mostly noise")
