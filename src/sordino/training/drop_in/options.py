"""Options that scripts written for other engines pass (floor 3): accepted where they change nothing, else refused."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from sordino import checks
from sordino.clipping import Clipping, GroupedClipping
from sordino.errors import InvalidArgument, NotOffered
from sordino.schedules import Schedule

__all__ = [
    "accountant_called",
    "check_options",
    "check_own_objects",
    "norm_and_clipping",
    "not_offered",
    "with_old_signatures",
]

_ACCOUNTANTS = {"auto": "auto", "prv": "auto", "rdp": "rdp"}
_GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew")


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
    "DEFAULT_ALPHAS": "Leave it out: PrivacyEngine(accountant='rdp') chooses the orders",
    "attach": "Write model, optimizer, loader = engine.make_private(module=…, optimizer=…, data_loader=…, …)",
    "get_compatible_module": "Nothing rewrites a model: replace BatchNorm by GroupNorm yourself; other layers stay",
    "get_privacy_spent": "Write engine.get_epsilon(delta)",
    "get_optimizer_hook_fn": "Leave it out: every batch is charged when the loader draws it",
    "get_renyi_divergence": "Write sordino.accounting.renyi_divergence(engine.event(), order)",
    "history": "Write engine.event(), everything charged so far",
    "is_compatible": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
    "mechanism": "Write engine.guarantee(delta).accountant",
    "sample_rate": "Write 1 / len(loader), the probability that a record joins a batch",
    "step": "Leave it out: every batch is charged when the loader draws it",
    "steps": "Write engine.next_steps, one number for each private model",
    "validate": "Leave it out: make_private and the first batch refuse, by name, what can't be private",
}


# Arguments of engines elsewhere, or of earlier versions of them, that are taken by no method here.
_OLD_ARGUMENTS = frozenset(
    {"alphas", "batch_size", "clip_per_layer", "experimental", "loss_reduction", "max_grad_norm", "module", "model"}
    | {"max_per_sample_grad_norm", "misc_settings", "noise_multiplier", "poisson", "sample_rate", "sample_size"}
    | {"secure_rng", "target_delta", "target_epsilon", "epochs", "total_steps", "normalize_clipping"}
    | {"target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound", "unclipped_num_std"}
)
_ADAPTIVE = frozenset({"target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound"})

P = ParamSpec("P")
R = TypeVar("R")


def with_old_signatures(method: Callable[P, R]) -> Callable[P, R]:
    """Have arguments by position, and those of other engines by name, refused with what to write instead.

    Any other unknown argument is a TypeError, as ever.
    """
    names = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in names and name in _OLD_ARGUMENTS]
        # The first one is the engine.
        if len(args) > 1 or unknown:
            raise _old_signature(method.__name__, unknown)
        return method(*args, **kwargs)

    return checked


def _old_signature(method: str, unknown: Sequence[str]) -> InvalidArgument:
    got = ", ".join(f"{name}=" for name in unknown) or "arguments by position"
    if _ADAPTIVE.intersection(unknown):
        return InvalidArgument(
            f"{method} must get its own arguments, got {got}. For a clipping norm that adapts pass "
            "clipping=QuantileClipping(…) of sordino.clipping."
        )
    where = "PrivacyEngine" if method == "__init__" else method
    return InvalidArgument(
        f"{where} must get its own arguments by name, got {got}. Write engine = PrivacyEngine(), then "
        "model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, "
        "noise_multiplier=…, max_grad_norm=…), and engine.get_epsilon(delta); instead of noise_multiplier= "
        "make_private_with_epsilon takes target_epsilon=, target_delta= and epochs=."
    )


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
    """Refuse what `make_private` can't do; "hooks", "functorch" and "ew" are all the same here."""
    checks.one_of((True,), batch_first=batch_first, hint="Move the records to the first dimension.")
    if "ghost" in grad_sample_mode:
        raise InvalidArgument(
            f"grad_sample_mode must be left out, got {grad_sample_mode!r}, with which other engines return the "
            "criterion as a fourth object. Write model, optimizer, loader = engine.make_private(…) without "
            "grad_sample_mode= and criterion=: no per-record gradients are held by default either, and the loop calls "
            "its own loss, on outputs.logits for example."
        )
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
