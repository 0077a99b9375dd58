"""One record moves the clipped sum by at most C (added or removed) or 2C (replaced), whatever the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

C = 0.7
LOSSES = {
    "mse": F.mse_loss,
    "bce with logits": lambda out, y: F.binary_cross_entropy_with_logits(out, (y > 0).float()),
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def data(outputs=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 5, generator=generator), torch.randn(16, outputs, generator=generator)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: F.mse_loss(model(x), y),
        lambda model, x, y: F.mse_loss(model(x), y, reduction="none"),
        lambda model, x, y: F.mse_loss(model(x), y.T, reduction="none"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_is_not_one_value_per_record_is_refused_natively_with_the_shape_expected(library, loss):
    with pytest.raises(library.refusals, match=r"\(B,\)"):
        library.fit(nn.Linear(5, 1), data(), loss)


def test_an_absurd_noise_multiplier_destroys_accuracy_in_the_trainer_too(library):
    sizes = []
    for noise_multiplier in (0.1, 1000.0):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        loss = lambda m, x, y: F.mse_loss(m(x), y, reduction="none").flatten()  # noqa: E731
        library.fit(model, data(), loss, noise_multiplier=noise_multiplier)
        sizes.append(float(model.weight.detach().norm()))
    assert sizes[1] > 20 * sizes[0]
