"""What can still be done to a private gradient, and optimizers that know how noisy it is (floor 1).

All of it is post-processing: filters and optimizers read released gradients and public numbers, and cost no privacy.
Filters are attached to any torch optimizer and work in a loop of one's own as well as in `sordino.fit`.

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> handle = DebiasedMomentum(momentum=0.9).attach(optimizer)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> round(float(weight.detach()), 6)
    -1.0
"""

from sordino.optimizers.adam import AdamBC
from sordino.optimizers.filters import GradientFilter
from sordino.optimizers.kalman import Kalman, settle
from sordino.optimizers.low_pass import DebiasedMomentum, LowPass

__all__ = ["AdamBC", "DebiasedMomentum", "GradientFilter", "Kalman", "LowPass", "settle"]
