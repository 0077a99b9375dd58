"""Options that scripts written for other engines pass (floor 3): accepted where they change nothing, else refused."""

import math
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from sordino import checks
from sordino.clipping import Clipping, GroupedClipping
from sordino.errors import InvalidArgument, NotOffered
from sordino.schedules import Schedule

__all__ = ["accountant_called", "check_options", "check_own_objects", "norm_and_clipping", "not_offered"]

_ACCOUNTANTS = {"auto": "auto", "prv": "auto", "rdp": "rdp"}
_GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew", "ghost")


def accountant_called(name: str) -> str:
    """Our name of the accountant that is called `name` elsewhere."""
    if name == "gdp":
        raise InvalidArgument(
            "accountant must be auto, prv or rdp, got 'gdp': its central limit approximation can understate ε. "
            "Use 'prv'."
        )
    checks.one_of(_ACCOUNTANTS, accountant=name)
    return _ACCOUNTANTS[name]


# What engines elsewhere have, and what to write here.
_NOT_OFFERED = {
    "attach": "Write model, optimizer, loader = engine.make_private(module=…, optimizer=…, data_loader=…, …)",
    "get_compatible_module": "Nothing rewrites a model: replace BatchNorm by GroupNorm yourself; other layers stay",
    "get_privacy_spent": "Write engine.get_epsilon(delta)",
    "is_compatible": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
    "validate": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
}


def not_offered(name: str) -> AttributeError:
    """What is raised for an attribute that the engine doesn't have."""
    if name in _NOT_OFFERED:
        return NotOffered(f"engine must be used by its own methods, got {name}. {_NOT_OFFERED[name]}.")
    return AttributeError(f"'PrivacyEngine' object has no attribute {name!r}")


def check_own_objects(module: nn.Module, optimizer: Optimizer, data_loader: object) -> None:
    """Refuse what Opacus wrapped already.

    Raises:
        InvalidArgument: the module, the optimizer or the loader is one of Opacus's.
    """
    given = {
        "module": (module, "Pass your own module: module._module"),
        "optimizer": (optimizer, "Pass your own optimizer: optimizer.original_optimizer"),
        "data_loader": (data_loader, "Pass the DataLoader you would train with"),
    }
    for name, (value, advice) in given.items():
        origin = next((kind for kind in type(value).__mro__ if kind.__module__.split(".")[0] == "opacus"), None)
        if origin is not None:
            raise InvalidArgument(
                f"{name} must not be wrapped by another engine, got {origin.__module__.split('.')[0]}'s "
                f"{origin.__name__}. {advice}."
            )


def norm_and_clipping(
    max_grad_norm: float | Schedule | Sequence[float], clipping: str | Clipping
) -> tuple[float | Schedule, str | Clipping]:
    """One clipping norm and the method; a list of norms, one per parameter, becomes `GroupedClipping`.

    Raises:
        InvalidArgument: a list of norms without ``clipping="per_layer"``.
    """
    if not isinstance(max_grad_norm, list | tuple):
        return max_grad_norm, clipping  # pyright: ignore[reportReturnType]
    if clipping != "per_layer":
        raise InvalidArgument(
            f"max_grad_norm must be one number for all parameters, got {len(max_grad_norm)} numbers. For a norm for "
            "each parameter pass clipping='per_layer'."
        )
    norms = tuple(checks.positive(max_grad_norm=norm) for norm in max_grad_norm)
    return math.hypot(*norms), GroupedClipping(by="parameter", weights=norms)


def check_options(
    batch_first: bool,
    noise_generator: None,
    grad_sample_mode: str,
    loss_reduction: str,
    wrap_model: bool,
    rand_on_empty: bool,
) -> None:
    """Refuse what `make_private` can't do; "hooks", "functorch", "ew" and "ghost" are all the same here."""
    checks.one_of((True,), batch_first=batch_first, hint="Move the records to the first dimension.")
    checks.one_of(_GRAD_SAMPLE_MODES, grad_sample_mode=grad_sample_mode)
    checks.one_of(("mean", "sum"), loss_reduction=loss_reduction)
    checks.one_of((True, False), rand_on_empty=rand_on_empty)
    checks.one_of(
        (True,),
        wrap_model=wrap_model,
        hint="Leave it out: make_private returns your own module; engine.detach() takes its hooks off.",
    )
    if noise_generator is not None:
        raise InvalidArgument(
            "noise_generator must be None, got a generator: noise is drawn from a cryptographic generator keyed by run "
            "and step. For a repeatable test run use PrivacyEngine(seed=…, reproducible=True)."
        )
