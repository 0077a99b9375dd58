"""The audit passes the engine and catches every way of breaking it: tests that could not fail would prove nothing."""

import pytest
import torch

from sabotage.engine_audit import audit
from sordino.clipping import FlatClipping
from sordino.mechanisms import GaussianMechanism
from sordino.training.step import PrivateStep

add_noise, factors, finish, add = (
    GaussianMechanism.add_noise_,
    FlatClipping.factors,
    PrivateStep.finish,
    PrivateStep.add,
)


def no_noise(self, tensors, *, randomness, step, rank=0):
    return None


def too_little_noise(self, tensors, *, randomness, step, rank=0):
    weaker = GaussianMechanism(noise_multiplier=0.95 * self.noise_multiplier, l2_sensitivity=self.l2_sensitivity)
    add_noise(weaker, tensors, randomness=randomness, step=step, rank=rank)


def noise_reused(self, tensors, *, randomness, step, rank=0):
    add_noise(self, tensors, randomness=randomness, step=0, rank=rank)


def one_noise_for_all_coordinates(self, tensors, *, randomness, step, rank=0):
    for tensor in tensors:
        single = torch.zeros(1)
        add_noise(self, [single], randomness=randomness, step=step, rank=rank)
        tensor.add_(single)


def no_clipping(self, squared_norms, *, max_grad_norm):
    return torch.ones_like(squared_norms)


def twice_the_norm(self, squared_norms, *, max_grad_norm):
    return factors(self, squared_norms, max_grad_norm=2 * max_grad_norm)


def norms_not_square_rooted(self, squared_norms, *, max_grad_norm):
    return factors(self, squared_norms.sqrt(), max_grad_norm=max_grad_norm)


def noise_on_the_mean(self):
    now, totals = self._at(self._step), self._totals()
    for total in totals:
        total.div_(now.expected_batch_size)
    now.mechanism.add_noise_(totals, randomness=self._randomness, step=self._step)
    for parameter, total in zip(self._summed, totals, strict=True):
        parameter.grad = total
    self._close()


def clipping_after_the_sum(self):
    now = self._at(self._step)
    norm = torch.stack([total.square().sum() for total in self._totals()]).sum().sqrt()
    for total in self._sums.values():
        total.mul_((now.max_grad_norm * now.expected_batch_size / norm).clamp(max=1))
    finish(self)


def realised_batch_size(self):
    counted = max(self._records, 1)
    scale = self._at(self._step).expected_batch_size / counted
    self._records = 0
    finish(self)
    for parameter in self._capture.trainable():
        parameter.grad.mul_(scale)


def counting_add(self, chunk):
    self._records = getattr(self, "_records", 0) + chunk.records
    add(self, chunk)


def chunks_counted_twice(self, chunk):
    before = {parameter: total.clone() for parameter, total in self._sums.items()}
    add(self, chunk)
    for parameter, total in self._sums.items():
        total.add_(total - before.get(parameter, 0))


SABOTAGE = {
    "no noise": [(GaussianMechanism, "add_noise_", no_noise)],
    "5 % too little noise": [(GaussianMechanism, "add_noise_", too_little_noise)],
    "noise reused": [(GaussianMechanism, "add_noise_", noise_reused)],
    "one noise for all coordinates": [(GaussianMechanism, "add_noise_", one_noise_for_all_coordinates)],
    "noise on the mean": [(PrivateStep, "finish", noise_on_the_mean)],
    "no clipping": [(FlatClipping, "factors", no_clipping)],
    "wrong clipping norm": [(FlatClipping, "factors", twice_the_norm)],
    "norms not squared": [(FlatClipping, "factors", norms_not_square_rooted)],
    "clipping after the sum": [
        (FlatClipping, "factors", no_clipping),
        (PrivateStep, "finish", clipping_after_the_sum),
    ],
    "division by the realised size": [
        (PrivateStep, "add", counting_add),
        (PrivateStep, "finish", realised_batch_size),
    ],
    "records counted twice": [(PrivateStep, "add", chunks_counted_twice)],
}


def test_the_engine_itself_passes_the_audit():
    assert audit() == set()


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_broken_engine_is_caught(name, monkeypatch):
    for owner, attribute, replacement in SABOTAGE[name]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert audit()
