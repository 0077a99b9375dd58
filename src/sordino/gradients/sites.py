"""Where a model is captured: one site per module that owns parameters (floor 1, gradients)."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from sordino.errors import UnsupportedModule
from sordino.gradients.rules.rule import LayerRule, rule_for

__all__ = ["Site", "find_sites", "may_couple", "refuse_coupling"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """A module whose calls are captured.

    Args:
        module: the module.
        label: its qualified name and class, for messages.
        rule: the rule that reads it; None for the functional fallback, which then owns the whole subtree.
    """

    module: nn.Module
    label: str
    rule: LayerRule | None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters this site answers for, now: direct ones, or the whole subtree's for the fallback."""
        if self.rule is None:
            return list(self.module.named_parameters())
        return list(self.module.named_parameters(recurse=False, remove_duplicate=False))


def find_sites(model: nn.Module) -> list[Site]:
    """A site for every module that owns parameters, in the order of ``model.named_modules()``."""
    sites = []
    for name, module in model.named_modules():
        if _owns_parameters(module):
            label = f"{name or 'the model'} ({type(module).__name__})"
            sites.append(Site(module=module, label=label, rule=rule_for(module)))
    return sites


def _owns_parameters(module: nn.Module) -> bool:
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return False
    holders = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    return (
        any(True for _ in module.parameters(recurse=False))
        or hasattr(module, "parametrizations")
        or any(True for holder in holders for _ in holder.parameters())
    )


def may_couple(module: nn.Module) -> bool:
    """Whether `module` is of a kind that `refuse_coupling` has to look at before each call."""
    return isinstance(module, _BatchNorm | _InstanceNorm)


def refuse_coupling(module: nn.Module, label: str) -> None:
    """Refuse a normalisation whose output for one record depends on the others, or that stores what it saw.

    Raises:
        UnsupportedModule: batch statistics are in use, or running statistics would be updated.
    """
    batch_statistics = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    running_statistics = isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None
    if batch_statistics or running_statistics:
        reason = "mixes the records of a batch" if batch_statistics else "stores statistics of the records"
        remedy = "nn.GroupNorm, or call .eval() on it" if batch_statistics else "track_running_stats=False"
        raise UnsupportedModule(f"{label} must treat every record alone, got a layer that {reason}. Use {remedy}.")
