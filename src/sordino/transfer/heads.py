"""A fresh head on a public model, and the choice of what is trained (floor 1)."""

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument, UnsupportedModule

__all__ = ["FixedNorm", "TRAINABLE", "replace_head", "set_trainable"]

TRAINABLE = ("head", "norms", "biases", "all")
"""What `replace_head` leaves trainable: the head alone, with the scales and shifts of normalisations, with all biases
(known as BiTFiT), or everything."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def replace_head(model: nn.Module, classes: int, *, trainable: str = "head", head: str | None = None) -> nn.Linear:
    """Put a fresh linear layer in the place of a public model's last one, and freeze what is not to be trained.

    The head starts at zero, so every class begins equally likely and nothing is drawn at random. Every BatchNorm
    becomes the fixed scale and shift that it is in evaluation mode (`FixedNorm`): its public statistics stay, and in
    training no record meets another one in it.

    Guarantee: none is spent: no record is seen. Train the model with `sordino.fit` or `sordino.PrivacyEngine`.

    Args:
        model: changed in place.
        classes: of the new head, ≥ 1.
        trainable: one of `TRAINABLE`. The fewer weights, the less noise: "head" for small budgets and few records.
        head: dotted name of the layer to replace; None takes the last `torch.nn.Linear` in the order of the modules,
            which is the classifier of the common networks for images and texts.

    Returns:
        The head, in its place.

    Raises:
        UnsupportedModule: there is no linear layer, or its weights are tied to another module.
        InvalidArgument: `head` names another kind of module.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 1000))
        >>> replace_head(net, 10)
        Linear(in_features=288, out_features=10, bias=True)
        >>> [name for name, weight in net.named_parameters() if weight.requires_grad]
        ['3.weight', '3.bias']
    """
    checks.integer(1, classes=classes)
    checks.one_of(TRAINABLE, trainable=trainable)
    name, old = _last_linear(model) if head is None else _named_linear(model, head)
    if name == "":
        raise UnsupportedModule("model must hold its head, got the head alone. Make a new nn.Linear instead.")
    _refuse_tied(model, name, old)
    fresh = nn.Linear(old.in_features, classes, device=old.weight.device, dtype=old.weight.dtype)
    nn.init.zeros_(fresh.weight)
    nn.init.zeros_(fresh.bias)
    _put(model, name, fresh)
    for place, part in list(model.named_modules()):
        if isinstance(part, _BATCH_NORMS):
            _put(model, place, FixedNorm(part))
    set_trainable(model, trainable, head=fresh)
    return fresh


def set_trainable(model: nn.Module, trainable: str, *, head: nn.Module) -> None:
    """Freeze every parameter of the model, except for those of the head and those that `trainable` names.

    Args:
        model: its parameters' `requires_grad` is set.
        trainable: one of `TRAINABLE`.
        head: a part of the model that is trained in any case.
    """
    checks.one_of(TRAINABLE, trainable=trainable)
    chosen = {id(weight) for weight in head.parameters()}
    for part in model.modules():
        own = dict(part.named_parameters(recurse=False))
        if trainable == "norms" and not isinstance(part, _NORMS):
            continue
        if trainable != "head":
            chosen |= {id(weight) for name, weight in own.items() if trainable != "biases" or name.endswith("bias")}
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in chosen)


class FixedNorm(nn.Module):
    """A BatchNorm in evaluation mode for good: x ↦ scale·x + shift for each channel; nothing in it is trained.

    Args:
        norm: with stored statistics.

    Raises:
        UnsupportedModule: it has none.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise UnsupportedModule(
                "BatchNorm must have stored statistics to be fixed, got track_running_stats=False. Use a model with "
                "GroupNorm or LayerNorm."
            )
        deviation = torch.sqrt(norm.running_var.detach() + norm.eps)
        scale = (1.0 if norm.weight is None else norm.weight.detach()) / deviation
        shift = (0.0 if norm.bias is None else norm.bias.detach()) - norm.running_mean.detach() * scale
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The map on (B, channels, …), each record by itself."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * self.scale.reshape(shape) + self.shift.reshape(shape)


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if not found:
        raise UnsupportedModule(
            "model must have a torch.nn.Linear as its head, got none. Use its features: sordino.transfer.features."
        )
    return found[-1]


def _named_linear(model: nn.Module, name: str) -> tuple[str, nn.Linear]:
    part = dict(model.named_modules()).get(name)
    if not isinstance(part, nn.Linear):
        raise InvalidArgument(f"head must name a torch.nn.Linear of the model, got {name!r}. See named_modules().")
    return name, part


def _refuse_tied(model: nn.Module, name: str, head: nn.Linear) -> None:
    for other, part in model.named_modules():
        if part is not head and any(weight is head.weight for weight in part.parameters(recurse=False)):
            raise UnsupportedModule(
                f"{name} must have weights of its own, got weights that it shares with {other}. Name another layer as "
                "the head."
            )


def _put(model: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, part)
