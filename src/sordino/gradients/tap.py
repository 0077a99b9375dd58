"""Functions of torch that are replaced while their own module runs (floor 1, gradients).

`nn.MultiheadAttention` and the recurrent modules hand all their parameters to one function. While such a module runs,
a `TorchFunctionMode` sees that one call and computes it from public operations in a layout that is ours, with the
linear maps inside captured. Nothing depends on how torch computes the function inside, so a new version of torch
can't move the records to another dimension unnoticed; a call that doesn't come to us sends its parameters an ordinary
gradient and is refused.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sordino.gradients.edge import capture_outputs
from sordino.gradients.hooks import UseReceiver
from sordino.gradients.recording import Recording
from sordino.gradients.rules.rule import LayerRule, Use

__all__ = ["Replacement", "Tap"]

# What stands in for a function of torch: called with the tap and the function's arguments.
Replacement = Callable[..., object]


class Tap(TorchFunctionMode):
    """The capture of one call: which parameters it has, and where what the backward pass brings goes.

    Args:
        module: the module that is called.
        label: its qualified name and class.
        parameters: its captured parameters by name.
        recording: what receives the uses.
        anchor: a scalar that requires grad.
        replacements: what is called instead of a function of torch, with the tap as its first argument.
        order: where the rows of a packed batch come from: record b is row ``order[b]``; None for as they are.
        batched: whether the module was given a batch; a recurrent module hides it from its function.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        label: str,
        parameters: Mapping[str, nn.Parameter],
        recording: Recording,
        anchor: Tensor,
        replacements: Mapping[object, Replacement],
        order: Tensor | None,
        batched: bool,
    ) -> None:
        super().__init__()
        self.module, self.label, self.order, self.batched = module, label, order, batched
        self.records = recording.records
        self.anchor = anchor
        self._recording = recording
        self._replacements = replacements
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def __torch_function__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Route a replaced function to its replacement; everything else runs as it is."""
        del types
        assert callable(func)
        replacement = self._replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, *args, **(kwargs or {}))

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a captured parameter; None for a frozen one or none."""
        return None if parameter is None else self._names.get(id(parameter))

    def receiver(self, rule: LayerRule, names: set[str], context: object, dims: tuple[int, ...]) -> UseReceiver:
        """What takes the backward pass of one use of the parameters `names`; see `Use` for the rest."""
        use = Use(
            module=self.module,
            label=self.label,
            rule=rule,
            parameters={name: self._parameters[name] for name in sorted(names)},
            records=self.records,
            context=context,
        )
        return UseReceiver(recording=self._recording, use=use, dims=dims)

    def capture(
        self,
        rule: LayerRule,
        names: set[str],
        context: object,
        outputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        *,
        dim: int = 0,
    ) -> tuple[Tensor, ...]:
        """`outputs`, with the records at `dim`, passed through a node that reads their gradients for `rule`."""
        if not names:
            return outputs
        receive = self.receiver(rule, names, context, tuple(dim for _ in outputs))
        return capture_outputs(receive, self.anchor, outputs, saved)
