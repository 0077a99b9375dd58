"""Local differential privacy of updates (floor 4, federated): each client adds the noise itself and trusts nobody.

Kept apart from `PrivateServer`, whose noise is added once for all: at the same ε the mean over n clients is noisier by
a factor of about √n here.

References:
    Dwork, Roth 2014, section 12.1 (local model); Balle, Wang 2018, theorem 8 (analytic Gaussian).
"""

from dataclasses import dataclass, field

from torch import Tensor

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import PrivacyError
from sordino.events import Event, Gaussian, SelfComposed
from sordino.federated.updates import Update, as_tensors, clipped_update
from sordino.mechanisms import GaussianMechanism
from sordino.randomness import Randomness
from sordino.training.fitting.freshness import fresh

__all__ = ["LocalPrivacy"]


@dataclass(kw_only=True)
class LocalPrivacy:
    """Clips and noises one client's updates on the client.

    Guarantee: all updates that `privatize` returns, up to `rounds` of them, are together (epsilon, delta)-
    differentially private for everything that this client holds: any two of its data sets are neighbours. Two clipped
    updates are at most twice the bound apart, and that is the sensitivity; it can't be set to anything else.

    Args:
        epsilon: ε > 0 over all rounds, never exceeded.
        delta: δ in (0, 1).
        max_update_norm: clipping bound > 0 of one update.
        rounds: the most updates that this client will send, ≥ 1.
        randomness: the client's own; a fresh key by default.

    Example:
        >>> import torch
        >>> local = LocalPrivacy(epsilon=8.0, delta=1e-5, max_update_norm=1.0, rounds=10)
        >>> sent = local.privatize({"weight": torch.zeros(3)})
        >>> sent["weight"].shape, local.sent
        (torch.Size([3]), 1)
    """

    epsilon: float
    delta: float
    max_update_norm: float
    rounds: int = 1
    randomness: Randomness = field(default_factory=Randomness, repr=False)
    sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        fresh(self.randomness)
        checks.positive(epsilon=self.epsilon)
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.positive(max_update_norm=self.max_update_norm)
        checks.integer(1, rounds=self.rounds)
        multiplier = accounting.calibrate_noise_multiplier(
            lambda noise: _events(noise, self.rounds),
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            relation=NeighboringRelation.REPLACE_ONE,
        )
        self._mechanism = GaussianMechanism(noise_multiplier=multiplier, l2_sensitivity=2 * self.max_update_norm)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on every entry of an update."""
        return self._mechanism.stddev

    def event(self) -> Event:
        """All that was sent so far, as one event."""
        return _events(self._mechanism.noise_multiplier, self.sent)

    def privatize(self, update: Update) -> dict[str, Tensor]:
        """The update as it may leave the client; one that is not finite counts as zero.

        Raises:
            PrivacyError: `rounds` updates were sent already; nothing is returned.
        """
        if self.sent >= self.rounds:
            raise PrivacyError(
                f"update must be one of the {self.rounds} that were declared, got one more. Declare more rounds before "
                "the first: each then gets more noise."
            )
        # In double precision before it is clipped: half precision rounds an update beyond its bound.
        given = as_tensors(update, tuple(update))
        exact = {name: value.double().clone() for name, value in given.items()}
        noisy = clipped_update(exact, max_update_norm=self.max_update_norm)
        self.sent += 1
        self._mechanism.add_noise_(list(noisy.values()), randomness=self.randomness, step=self.sent)
        return {name: value.to(given[name].dtype) for name, value in noisy.items()}

    def guarantee(self) -> Guarantee:
        """What was sent so far guarantees, for everything that this client holds."""
        spent = accounting.epsilon(self.event(), self.delta, relation=NeighboringRelation.REPLACE_ONE)
        seeded = (FIXED_SEED,) if self.randomness.reproducible else ()
        return Guarantee(
            epsilon=spent.upper,
            delta=self.delta,
            accountant=spent.accountant,
            sampler="none",
            relation=NeighboringRelation.REPLACE_ONE,
            unit=PrivacyUnit.CLIENT,
            caveats=(*seeded, "local: holds against the server too", "any two data sets of the client are neighbours"),
        )


def _events(noise_multiplier: float, count: int) -> Event:
    return SelfComposed(event=Gaussian(noise_multiplier=noise_multiplier), count=count)
