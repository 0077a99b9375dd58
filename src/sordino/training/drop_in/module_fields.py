"""Names of Opacus's wrapped modules on a module that was made private (floor 3)."""

from torch import nn

from sordino.training.drop_in.optimizer_fields import NotThere

__all__ = ["ModuleFields"]

_ADVICE = {
    "allow_grad_accumulation": "Leave it out: passes over one batch are added up before clipping",
    "disable_hooks": "Call module.eval() for evaluation, or engine.detach() when training is over",
    "enable_hooks": "Leave it out: make_private puts the hooks on",
    "forbid_grad_accumulation": "Leave it out: every batch of the private loader is stepped",
    "remove_hooks": "Call engine.detach(), which takes all hooks off",
    "to_standard_module": "The module is your own: use it as it is, after engine.detach() without privacy",
}
_PER_RECORD = "No per-record gradients are held; after optimizer.step() parameter.grad is the private gradient"


class ModuleFields:
    """``module._module``, which is the module itself; methods, and ``parameter.grad_sample``, that say what to write.

    A name that the module has already is left alone. They are plain attributes: no parameter, buffer, submodule or name
    in the state changes.

    Args:
        module: gets the attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        given: dict[str, object] = {"_module": module}
        given |= {name: NotThere("module", name, advice) for name, advice in _ADVICE.items()}
        self._given = {name: value for name, value in given.items() if not hasattr(module, name)}
        # Past torch, which would make a submodule of it.
        vars(module).update(self._given)
        self._per_record = NotThere("parameter", "grad_sample", _PER_RECORD)
        for parameter in module.parameters():
            if not hasattr(parameter, "grad_sample"):
                setattr(parameter, "grad_sample", self._per_record)  # noqa: B010 (no attribute of torch's)

    def remove(self) -> None:
        """Take the attributes off."""
        for name, value in self._given.items():
            if vars(self._module).get(name) is value:
                del vars(self._module)[name]
        for parameter in self._module.parameters():
            if vars(parameter).get("grad_sample") is self._per_record:
                del vars(parameter)["grad_sample"]
