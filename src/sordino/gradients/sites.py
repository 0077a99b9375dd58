"""Where a model is captured: one site per module that owns parameters (floor 1, gradients)."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]

from sordino.errors import UnsupportedModule
from sordino.gradients.rules.rule import LayerRule, rule_for, runs_own_forward

__all__ = ["Site", "find_sites", "may_couple", "per_record", "refuse_absent", "refuse_complex", "refuse_coupling"]


# Tables that Hugging Face's T5 and its kin look up by distances between positions: no record goes in.
_POSITION_TABLES = frozenset(("relative_attention_bias",))
_TAPPED: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """A module whose calls are captured.

    Args:
        module: the module.
        label: its qualified name and class, for messages.
        rule: the rule that reads it; None for the functional fallback.
        dim: where its input and output have the records: 1 inside a transformer layer of torch that has time first.
        is_model: it is the captured model itself.
        tapped: it hands its parameters to a function of torch that is replaced while it runs.
        whole: it is read with everything inside it, as `per_record` asked.
    """

    module: nn.Module
    label: str
    rule: LayerRule | None
    is_model: bool = False
    tapped: bool = False
    dim: int = 0
    whole: bool = False

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the module's own forward reads: direct ones, and those of children that only hold."""
        if self.whole:
            return list(self.module.named_parameters())
        own = [(name, value) for name, value in vars(self.module)["_parameters"].items() if value is not None]
        if self.rule is None:
            for prefix, child in _holders(self.module):
                own += child.named_parameters(prefix)
        return own


# Modules that are read as a whole, by the wish of whoever built the model.
_WHOLE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

Module = TypeVar("Module", bound=nn.Module)


def per_record(module: Module) -> Module:
    """Have `module` read as a whole: each record's gradient by running it again with that record alone.

    When: what is inside folds records into rows, routes tokens or uses parameters in a way that no rule reads, but the
    module's own inputs and outputs have the records as their first dimension (or one row for all of them). It is
    slower than rules: the module runs once more, vectorised over records by `torch.func.vmap` where it can be, else
    record by record.

    Call it before the model is made private. It changes nothing of the module, and a copy is not marked.

    Args:
        module: draws no random numbers and changes no buffer in its forward pass; what does is refused then.

    Returns:
        `module` itself, so that it can be called where a layer is built.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(per_record(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), nn.Linear(4, 2))
    """
    _WHOLE.add(module)
    return module


def find_sites(model: nn.Module) -> list[Site]:
    """A site for the model and for every module that owns parameters, in the order of ``model.named_modules()``."""
    sites = []
    time_first: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if module in _WHOLE:
            inside.update(module.modules())
            label = f"{name or 'the model'} ({type(module).__name__})"
            sites.append(Site(module=module, label=label, rule=None, whole=True))
            continue
        time_first.update(_time_first_children(module))
        # A parametrization is part of the layer it belongs to, a table of positions part of its attention.
        part = "parametrizations" in name.split(".") or _position_table(name.rpartition(".")[2], module)
        if module is model and not _owns_parameters(module):
            sites.append(Site(module=module, label=f"the model ({type(module).__name__})", rule=None, is_model=True))
        elif _owns_parameters(module) and not part:
            label = f"{name or 'the model'} ({type(module).__name__})"
            rule = rule_for(module)
            reason = None if rule is None else rule.refusal(module)
            if reason is not None:
                raise UnsupportedModule(f"{label} must have {reason}. Set it before making the model private.")
            tapped = rule is None and _tapped(module)
            dim = int(rule is not None and module in time_first)
            sites.append(Site(module=module, label=label, rule=rule, is_model=module is model, tapped=tapped, dim=dim))
    return sites


def _owns_parameters(module: nn.Module) -> bool:
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return False
    held = (parameter for _, child in _holders(module) for parameter in child.parameters())
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in held)


def _holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children whose parameters the module reads without calling them."""
    return [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
        or name == "parametrizations"
        or _position_table(name, child)
        or isinstance(module, nn.MultiheadAttention)
    ]


def _position_table(name: str, module: nn.Module) -> bool:
    return name in _POSITION_TABLES and isinstance(module, nn.Embedding)


def _time_first_children(module: nn.Module) -> list[nn.Module]:
    """Children that torch's own transformer calls with time as the first dimension."""
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    own = next(
        (base for base in (*layers, nn.TransformerEncoder, nn.TransformerDecoder) if isinstance(module, base)), None
    )
    if own is None or type(module).forward is not own.forward or not runs_own_forward(module):
        return []
    attentions = [child for child in module.modules() if isinstance(child, nn.MultiheadAttention)]
    if not attentions or any(attention.batch_first for attention in attentions):
        return []
    return [child for child in module.children() if isinstance(child, nn.Linear | nn.LayerNorm | nn.RMSNorm)]


def _tapped(module: nn.Module) -> bool:
    """Whether `module` hands its parameters to one function of torch: a module of torch's with torch's forward."""
    if not runs_own_forward(module) or hasattr(module, "parametrizations"):
        return False
    base = next((base for base in _TAPPED if isinstance(module, base)), None)
    if base is None or type(module).forward is not base.forward:
        return False
    return all(isinstance(value, nn.Parameter) for value in _read(module))


def _read(module: nn.Module) -> list[Tensor]:
    """The tensors that the module hands over as parameters: computed ones (weight norm) belong to no one."""
    if isinstance(module, nn.RNNBase):
        return [weight for layer in module.all_weights for weight in layer]
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
    inner = getattr(module, "out_proj")  # noqa: B009
    values = [*(getattr(module, name, None) for name in names), inner.weight, inner.bias]
    if hasattr(inner, "parametrizations"):
        return [torch.zeros(())]
    return [value for value in values if value is not None]


def refuse_absent(model: nn.Module) -> None:
    """Refuse a model whose parameters are elsewhere between its forward passes.

    Raises:
        UnsupportedModule: one is on the meta device, as accelerate leaves what it offloads.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModule(
                f"{name} must be in memory while it is trained, got a parameter on the meta device, as offloading by "
                "accelerate leaves it. Load the model without offloading: a device_map of devices alone, none of its "
                'parts on "disk", nor on "cpu" beside an accelerator.'
            )


def refuse_complex(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Refuse complex parameters: norms, sums and noise are those of real numbers.

    Raises:
        UnsupportedModule: one of `parameters` is complex.
    """
    for parameter in parameters:
        if parameter.is_complex():
            raise UnsupportedModule(
                f"{names[parameter]} must be real, got a complex parameter. Keep real and imaginary part in a last "
                "dimension of 2, and use torch.view_as_complex in forward."
            )


def may_couple(module: nn.Module) -> bool:
    """Whether `module` is of a kind that `refuse_coupling` has to look at before each call."""
    return isinstance(module, _BatchNorm | _InstanceNorm | _SpectralNorm)


def refuse_coupling(module: nn.Module, label: str) -> None:
    """Refuse a normalisation whose output for one record depends on the others, or that stores what it saw.

    Raises:
        UnsupportedModule: batch statistics are in use, or running statistics would be updated.
    """
    if isinstance(module, _SpectralNorm) and module.training:
        raise UnsupportedModule(
            f"{label} must leave its buffers alone in training, got spectral normalisation, which takes a step of its "
            "power iteration in each forward pass. Call .eval() on it, the parametrization alone, after model.train()."
        )
    batch_statistics = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    running_statistics = isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None
    if batch_statistics or running_statistics:
        reason = "mixes the records of a batch" if batch_statistics else "stores statistics of the records"
        remedy = "nn.GroupNorm, or call .eval() on it" if batch_statistics else "track_running_stats=False"
        raise UnsupportedModule(f"{label} must treat every record alone, got a layer that {reason}. Use {remedy}.")
