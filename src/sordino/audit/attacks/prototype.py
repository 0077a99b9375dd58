"""Model inversion (floor 4): the input that a model holds for most typical of a class.

What comes out is a prototype, a property of the class that the model was meant to learn. It is no record, and it shows
no membership: only where a class is one person (a face, a voice) does it give a person away, and then
differential privacy for single records of that person does not help either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks

__all__ = ["ClassPrototype", "class_prototype"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassPrototype:
    """An input that the model is sure of.

    Args:
        features: the input, with the shape of one record.
        label: the class.
        confidence: the model's probability of it there, in [0, 1].
    """

    features: Tensor
    label: int
    confidence: float


def class_prototype(
    model: nn.Module,
    label: int,
    *,
    shape: Sequence[int],
    steps: int = 200,
    learning_rate: float = 0.1,
    smoothness: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
) -> ClassPrototype:
    """Gradient descent on 1 − confidence from the middle grey, as the attack on face recognition did (MI-Face).

    The attacker knows the model and its weights, or can ask for gradients.

    Args:
        model: features ↦ logits; used in evaluation mode, and left in the mode it was in.
        label: the class, ≥ 0.
        shape: of one record.
        steps: ≥ 1.
        learning_rate: of Adam, > 0.
        smoothness: weight ≥ 0 of the squared differences between neighbouring pixels.
        low: smallest value of a feature.
        high: largest value of a feature.

    References:
        Fredrikson, Jha, Ristenpart 2015, "Model inversion attacks that exploit confidence information", algorithm 1.
    """
    checks.integer(0, label=label)
    checks.non_negative(smoothness=smoothness)
    checks.positive(learning_rate=learning_rate)
    modes = [(module, module.training) for module in model.modules()]
    like = next(model.parameters())
    model.eval()
    x = torch.full((1, *shape), (low + high) / 2, dtype=like.dtype, device=like.device, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    try:
        for _ in range(checks.integer(1, steps=steps)):
            loss = F.cross_entropy(model(x), torch.tensor([label], device=like.device))
            if smoothness > 0 and len(shape) >= 2:
                rough = (x[..., 1:, :] - x[..., :-1, :]).square().sum() + (x[..., 1:] - x[..., :-1]).square().sum()
                loss = loss + smoothness * rough
            x.grad = torch.autograd.grad(loss, x)[0]
            optimizer.step()
            with torch.no_grad():
                x.clamp_(low, high)
        with torch.no_grad():
            confidence = model(x).softmax(dim=1)[0, label].item()
    finally:
        for module, mode in modes:
            module.training = mode
    return ClassPrototype(features=x.detach()[0], label=label, confidence=confidence)
