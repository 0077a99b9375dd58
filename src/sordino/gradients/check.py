"""The check that a layer rule gives autograd's gradients (floor 1, gradients)."""

import copy

import torch
from torch import Tensor, nn

from sordino.errors import PrivacyError
from sordino.gradients.capture import GradientCapture
from sordino.gradients.rules.rule import Use, rule_for

__all__ = ["check_layer_rule"]


def check_layer_rule(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> None:
    """Compare what a module's rule computes with plain autograd, one record at a time.

    Call it in a test of every rule you write, with inputs that reach each of its options. Norms, weighted sums and
    per-record gradients are compared, for the module called once and called twice.

    Args:
        module: the layer; its rule is looked up as it will be in training, and the functional fallback is checked
            where there is none.
        inputs: public example tensors with the records as their first dimension, at least one record.
        tolerance: largest difference allowed, relative to the largest gradient.

    Raises:
        PrivacyError: the rule disagrees with autograd; the message says in what.

    Example:
        >>> check_layer_rule(nn.Linear(3, 2), torch.randn(4, 5, 3))
    """
    records = inputs[0].shape[0]
    layer = copy.deepcopy(module).requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        output = layer(*inputs)
    cotangents = [torch.randn(output.shape, generator=generator).to(output) for _ in range(2)]
    expected = _one_by_one(layer, inputs, cotangents[0])
    twice = _one_by_one(layer, inputs, cotangents[0] + cotangents[1])
    weights = torch.rand(records, generator=generator, dtype=torch.float64).to(output.device)
    _compare(layer, inputs, cotangents[:1], expected, weights, tolerance)
    _compare(layer, inputs, cotangents, twice, weights, tolerance)
    _compare_per_example(layer, inputs, cotangents[0], expected, tolerance)


def _one_by_one(layer: nn.Module, inputs: tuple[Tensor, ...], cotangent: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in layer.named_parameters()]
    rows = []
    for b in range(cotangent.shape[0]):
        loss = (layer(*(tensor[b : b + 1] for tensor in inputs)) * cotangent[b : b + 1]).sum()
        rows.append(torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def _compare(
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    cotangents: list[Tensor],
    expected: dict[str, Tensor],
    weights: Tensor,
    tolerance: float,
) -> None:
    capture = GradientCapture(layer)
    try:
        with capture.recording(cotangents[0].shape[0]):
            torch.stack([(layer(*inputs) * cotangent).sum() for cotangent in cotangents]).sum().backward()
        squared = capture.squared_norms()
        sums: dict[nn.Parameter, Tensor] = {}
        capture.add_weighted_sums(weights, sums)
    finally:
        capture.detach()
    calls = "called once" if len(cotangents) == 1 else "called twice"
    true = torch.stack([gradient.double().flatten(1).square().sum(1) for gradient in expected.values()]).sum(0)
    _agree(squared.sqrt(), true.sqrt(), f"norms, {calls}", layer, tolerance)
    for name, parameter in layer.named_parameters():
        wanted = torch.tensordot(weights, expected[name].double(), dims=1)
        _agree(sums.get(parameter, torch.zeros_like(wanted)), wanted, f"the sum for {name}, {calls}", layer, tolerance)


def _compare_per_example(
    layer: nn.Module, inputs: tuple[Tensor, ...], cotangent: Tensor, expected: dict[str, Tensor], tolerance: float
) -> None:
    rule = rule_for(layer)
    if rule is None:
        return
    output = layer(*inputs)
    parameters = dict(layer.named_parameters())
    use = Use(module=layer, label="", rule=rule, parameters=parameters, records=cotangent.shape[0])
    use.saved = tuple(tensor.detach() for tensor in rule.save(layer, inputs, {}, output))
    use.grads = (cotangent,)
    for name in parameters:
        _agree(rule.per_example(use, name), expected[name], f"the gradients for {name}", layer, tolerance)


def _agree(got: Tensor, wanted: Tensor, what: str, layer: nn.Module, tolerance: float) -> None:
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    if got.shape != wanted.shape or not bool(
        (got.double() - wanted.double()).abs().le(tolerance * largest + 1e-12).all()
    ):
        raise PrivacyError(
            f"the rule of {type(layer).__name__} must give autograd's gradients, got other values for {what}. "
            "Correct the rule before training with it."
        )
