"""What a layer rule is, and the table of rules (floor 1, gradients).

A rule knows one family of layers: what to keep from the forward pass, and how the per-record gradients, their
squared norms and their weighted sum follow from what was kept and from the gradient at the layer's output.
Legend of shapes: B records, T positions, d inputs, p outputs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sordino.errors import PrivacyError, RecordCountMismatch
from sordino.gradients.numerics import compute_dtype, row_squared_norms
from sordino.gradients.rules.cost import CHUNK_ENTRIES, chunk_records
from sordino.gradients.rules.rounding import Rounding
from sordino.gradients.rules.timings import KernelTimings

__all__ = ["LayerRule", "Use", "layer_rule", "rule_for", "weigh"]


@dataclass(eq=False, kw_only=True)
class Use:
    """One call of one module: what its rule kept, and the gradient that reached its output.

    Args:
        module: the module that was called.
        label: its qualified name, for messages.
        rule: the rule that reads this use.
        parameters: the module's captured parameters by name.
        records: number of records B; every kept tensor and every gradient has B as its first dimension.
        saved: what `rule.save` kept.
        grads: gradient at each output; None where no gradient arrived.
        context: what else the rule needs (never a tensor that depends on records).
        memo: intermediate results that a rule keeps between norms and sums.
        lean: whether rules spare memory, at the price of time.
        timings: where the fastest kernels are measured and kept; None takes the cost model's.
    """

    module: nn.Module
    label: str
    rule: "LayerRule"
    parameters: Mapping[str, nn.Parameter]
    records: int
    saved: tuple[Tensor, ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    context: object = None
    memo: dict[str, Tensor] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    lean: bool = False
    timings: KernelTimings | None = None

    @property
    def grad(self) -> Tensor:
        """The gradient at the only output."""
        (grad,) = self.grads
        if grad is None:
            raise PrivacyError(f"{self.label} must have a gradient at its output to be read, got none.")
        return grad

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(iter(self.parameters.values())).device

    def select(self, index: Tensor) -> "Use":
        """The same use, restricted to the records in `index`."""
        return replace(
            self,
            records=index.numel(),
            saved=tuple(tensor.index_select(0, index) for tensor in self.saved),
            grads=tuple(None if grad is None else grad.index_select(0, index) for grad in self.grads),
            memo={name: tensor.index_select(0, index) for name, tensor in self.memo.items()},
            versions=(),
        )

    def release(self) -> None:
        """Drop the kept tensors once the rule has kept every parameter's per-record gradient instead."""
        if self.memo.keys() >= self.parameters.keys():
            self.saved, self.grads, self.versions = (), (), ()

    def weighted_sums(self, weights: Float[Tensor, " B"]) -> dict[str, Tensor]:
        """``Σ_b weights[b] · gradient[b]`` for each captured parameter."""
        if not self.grads:
            return {name: weigh(self.memo[name], weights) for name in self.parameters}
        return self.rule.weighted_sums(self, self.parameters, weights)

    def check_unmodified(self) -> None:
        """Refuse when a kept tensor was modified in place since the backward pass.

        Raises:
            PrivacyError: norms and sums would come from different values.
        """
        if self.versions and self.versions != tuple(tensor._version for tensor in self.saved):
            raise PrivacyError(
                f"the input of {self.label} must stay as it was until the private gradient is taken, got an "
                "in-place change after the backward pass. Copy the batch instead of overwriting it."
            )


class LayerRule:
    """Base of the rules. A subclass needs `save` and `per_example`; the rest has slow, correct defaults.

    `names` are the parameters the rule knows; a module with other direct parameters, or with parametrizations, is
    not matched and goes to the functional fallback.
    """

    names: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})

    def accepts(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Whether this rule reads every option that `module` has set."""
        return True

    def refusal(self, module: nn.Module) -> str | None:  # noqa: ARG002
        """What `module` must be and isn't ("X=…, got …"), when no per-record gradient of it is meaningful."""
        return None

    def save(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, ...]:
        """The tensors to keep from a call, each with the records first. By default the only input."""
        return (only_input(args, kwargs),)

    def record_dims(self, module: nn.Module) -> int:  # noqa: ARG002
        """The least number of dimensions of the first kept tensor, the records' included."""
        return 2

    def per_example(self, use: Use, name: str) -> Float[Tensor, "B *shape"]:
        """The gradient of each record for parameter `name`."""
        raise NotImplementedError

    def squared_norms(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """Each record's squared gradient norm over the parameters `names`, in float64."""
        total = torch.zeros(use.records, dtype=torch.float64, device=use.grad.device)
        for name in names:
            use.memo[name] = self.per_example(use, name)
            total += row_squared_norms(use.memo[name])
        return total

    def weighted_sums(
        self, use: Use, names: Iterable[str], weights: Float[Tensor, " B"]
    ) -> dict[str, Float[Tensor, "*shape"]]:
        """``Σ_b weights[b] · gradient[b]`` for each parameter in `names`."""
        sums = {}
        for name in names:
            stored = use.memo.get(name)
            sums[name] = weigh(self.per_example(use, name) if stored is None else stored, weights)
        return sums

    def rounding(self, use: Use, names: Iterable[str]) -> Rounding | None:  # noqa: ARG002
        """How far `weighted_sums` may be from what `squared_norms` measured; read after the norms.

        None where the very gradients that were measured are weighed and added. A rule that computes its norms or its
        sums in another way must say how far apart they can be when a record's terms cancel.
        """
        return None

    def term_lengths(self, use: Use, names: Iterable[str]) -> Float[Tensor, " B"]:
        """``Σ_t ‖term t‖`` of each record over the terms that its gradient is added up from, or more, in float64.

        By default the gradients themselves, kept where they are small enough so that the sum weighs the same values.
        """
        total = torch.zeros(use.records, dtype=torch.float64, device=use.device)
        for name in names:
            entries = use.parameters[name].numel()
            if name not in use.memo and use.records * entries <= 4 * CHUNK_ENTRIES:
                use.memo[name] = self.per_example(use, name)
            if name in use.memo:
                total += row_squared_norms(use.memo[name])
                continue
            for index in torch.arange(use.records, device=use.device).split(chunk_records(use.records, entries)):
                total[index] += row_squared_norms(self.per_example(use.select(index), name))
        return total.sqrt_()

    def terms(self, use: Use) -> int:  # noqa: ARG002
        """How many terms `term_lengths` counts."""
        return 1

    def merge(self, uses: list[Use], names: frozenset[str]) -> Use | None:  # noqa: ARG002
        """One use whose gradient for `names` is the sum over `uses`, or None where this rule can't build it."""
        return None

    def inner_products(self, use: Use, other: Use) -> Float[Tensor, " B"] | None:  # noqa: ARG002
        """Per record ⟨gradient of `use`, gradient of `other`⟩ for a shared weight, or None where it isn't known."""
        return None


def weigh(per_example: Float[Tensor, "B *shape"], weights: Float[Tensor, " B"]) -> Float[Tensor, "*shape"]:
    """``Σ_b weights[b] · per_example[b]``."""
    rows = per_example.flatten(1) if per_example.dim() > 1 else per_example[:, None]
    dtype = compute_dtype(rows)
    return (weights.to(dtype) @ rows.to(dtype)).view(per_example.shape[1:])


def only_input(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """The one tensor that a simple layer was called with, however it was passed."""
    values = [*args, *kwargs.values()]
    if not values or not isinstance(values[0], Tensor):
        raise RecordCountMismatch("a captured layer must be called with a tensor, got something else.")
    return values[0]


_RULES: dict[type[nn.Module] | str, LayerRule] = {}
_Rule = TypeVar("_Rule", bound=LayerRule)


def layer_rule(*modules: type[nn.Module] | str) -> Callable[[type[_Rule]], type[_Rule]]:
    """Class decorator: register a rule for module classes, and for subclasses that don't override `forward`.

    A later registration for the same class replaces the earlier one. Check a new rule with `check_layer_rule`.

    Args:
        modules: the classes the rule reads, or their full names where they should not be imported for it.

    Returns:
        The decorator; the rule class must be constructible without arguments.
    """

    def register(rule: type[_Rule]) -> type[_Rule]:
        instance = rule()
        for module in modules:
            _RULES[module] = instance
        return rule

    return register


def runs_own_forward(module: nn.Module) -> bool:
    """Whether the forward of the module's class runs, at most between moves of its tensors to its device.

    `dispatch_model` of accelerate (``device_map=``) wraps every layer so; other replacements are somebody's own.
    """
    held = vars(module)
    if "forward" not in held:
        return True
    hook, inner = held.get("_hf_hook"), held.get("_old_forward")
    moves = f"{type(hook).__module__}.{type(hook).__qualname__}" == "accelerate.hooks.AlignDevicesHook"
    wraps = getattr(held["forward"], "__wrapped__", None) is inner and inner is not None
    own = getattr(inner, "__func__", None) is type(module).forward
    return moves and wraps and own and not getattr(hook, "offload", True)


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule that reads `module`, or None when only the functional fallback can.

    A rule matches the module's class or a base class whose `forward` is the one that runs, and only when every
    direct parameter is a plain `nn.Parameter` that the rule knows and nothing is parametrized.
    """
    if not runs_own_forward(module) or hasattr(module, "parametrizations"):
        return None
    for base in type(module).__mro__:
        rule = _RULES.get(base, _RULES.get(f"{base.__module__}.{base.__qualname__}"))
        if rule is None:
            continue
        own = {name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
        # A known name that is a tensor but no parameter is computed from something else (old-style weight norm).
        computed = any(isinstance(getattr(module, name, None), Tensor) for name in rule.names - own)
        plain = own <= rule.names and not computed
        return rule if type(module).forward is base.forward and plain and rule.accepts(module) else None
    return None
