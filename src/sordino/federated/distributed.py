"""Distributed differential privacy (floor 4, federated): each client adds a share of the noise, the server sees a sum.

A client clips its update, rotates it, rounds it to whole numbers at random, checks the norm of these, adds its share of
discrete Gaussian noise and sends the result modulo 2^bits through secure aggregation. The server learns only the sum.

The proof is in ``docs/proofs/distributed-gaussian.md``.

References:
    Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation", algorithms 1 and 2, theorem 1 and proposition 26 (norm after rounding).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, ZeroConcentratedDP
from sordino.federated.rotation import padded_size, rotate, rotate_back, signs
from sordino.federated.updates import GivenUpdate, as_tensors, clipped_update
from sordino.mechanisms.exact import discrete_gaussian
from sordino.mechanisms.grid import ratio_at_least
from sordino.randomness import Randomness

__all__ = ["DistributedGaussian"]

Integers = npt.NDArray[np.int64]

# Rounding at random is repeated until the norm is small enough; the bound is passed with probability at least 1 − β.
_LOG_INVERSE_BETA = 0.5
# How many standard deviations of a coordinate of the sum the modulus has room for, on each side.
_ROOM = 5.0
_MOST_ATTEMPTS = 1000
# A grid whose step is so many updates long holds nothing of them.
_COARSEST = 1000.0


@dataclass(frozen=True, kw_only=True)
class DistributedGaussian:
    """What clients and server agree on, all of it public and fixed before the first round.

    Guarantee: one sum of the messages of at least `honest` clients that follow `encode` is ``event()``, for the server
    and for all other clients together, when one client's update is exchanged for zero while it goes on adding its
    noise (zero out). Nothing is assumed of the other clients, and nothing of the sum's modulus: wrapping around costs
    accuracy only. What a single message shows is up to the secure aggregation.

    Args:
        shapes: the shared parameters, by name, in the order of the model.
        max_update_norm: clipping bound c > 0 of one update.
        noise_multiplier: standard deviation of the honest clients' noise together, over the sensitivity after
            rounding, > 0.
        clients: clients that are planned for a round, n ≥ 1; the divisor of the sum.
        honest: least number h of clients in a round that add their noise and don't tell it, 1 … n. Each adds 1/h of the
            variance, so a round in which all n do has n/h times the noise that is needed.
        bits: of the modulus, 8 … 40.

    Raises:
        InvalidArgument: a value out of its range, or a modulus too small for these numbers.

    Example:
        >>> mechanism = DistributedGaussian(shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0,
        ...     clients=100, honest=80, bits=20)
        >>> round(mechanism.event().rho, 4)
        0.5
    """

    shapes: Mapping[str, tuple[int, ...]]
    max_update_norm: float
    noise_multiplier: float
    clients: int
    honest: int
    bits: int = 20

    def __post_init__(self) -> None:
        checks.positive(max_update_norm=self.max_update_norm)
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.integer(1, clients=self.clients)
        checks.in_range(1, self.clients, honest=checks.integer(1, honest=self.honest))
        checks.in_range(8, 40, bits=checks.integer(8, bits=self.bits))
        if self.dimension < 1:
            raise InvalidArgument("shapes must hold at least one number, got none. Give the model's parameters.")
        if self.stddev < 1.0:
            raise InvalidArgument(
                f"bits must leave each client's noise a standard deviation of a step of the grid, got {self.bits} bits "
                f"and {self.stddev:.2g} steps. Take more bits, or more noise."
            )

    @property
    def dimension(self) -> int:
        """Numbers in one update."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def size(self) -> int:
        """Numbers in one message: the dimension padded to a power of two."""
        return padded_size(self.dimension)

    @property
    def modulus(self) -> int:
        """Messages and sums are taken modulo this."""
        return 1 << self.bits

    @cached_property
    def granularity(self) -> float:
        """Step γ of the grid: 2^bits steps hold ±5 standard deviations of a coordinate of the sum.

        After the rotation a coordinate of the sum has variance at most (cn)²/d, rounding adds n·γ²/4 and noise at most
        n/h times z²Δ². γ is the least solution of 2·5·√(…) = 2^bits · γ, found by iteration from below.
        """
        step = self.max_update_norm * 2.0**-60
        while True:
            signal = (self.max_update_norm * self.clients) ** 2 / self.size
            noise = self.clients / self.honest * (self.noise_multiplier * self._sensitivity(step)) ** 2
            needed = 2 * _ROOM * math.sqrt(signal + self.clients * step**2 / 4 + noise) / self.modulus
            if needed <= step * (1 + 1e-9):
                return step
            if needed > _COARSEST * self.max_update_norm:
                raise InvalidArgument(
                    f"bits must be enough for {self.clients} clients, got {self.bits}: the grid would be far "
                    "coarser than an update. Take more bits."
                )
            step = needed

    def _sensitivity(self, step: float) -> float:
        """Largest ℓ2 norm of a rounded update: proposition 26, or every coordinate moved by a whole step."""
        bound, root = self.max_update_norm, math.sqrt(self.size)
        likely = (
            bound**2 + step**2 * self.size / 4 + math.sqrt(2 * _LOG_INVERSE_BETA) * step * (bound + step / 2 * root)
        )
        return min(math.sqrt(likely), bound + step * root)

    @property
    def sensitivity(self) -> float:
        """Δ: no honest client's rounded update is longer, in units of the parameters."""
        return self._sensitivity(self.granularity)

    @cached_property
    def _largest_square(self) -> int:
        """Δ² in squared grid steps, whole."""
        return math.floor((Fraction(self.sensitivity) / Fraction(self.granularity)) ** 2)

    @cached_property
    def _ratio(self) -> tuple[int, int]:
        """Each client's σ in grid steps, as a ratio of integers, rounded up."""
        steps = Fraction(self.noise_multiplier) * Fraction(self.sensitivity) / Fraction(self.granularity)
        return ratio_at_least(steps / Fraction(math.sqrt(self.honest)) * (1 + Fraction(1, 1 << 50)))

    @property
    def stddev(self) -> float:
        """Each client's σ, in steps of the grid."""
        return self._ratio[0] / self._ratio[1]

    @property
    def excess(self) -> float:
        """τ: how far, in log probability of one coordinate, a sum of h discrete Gaussians is from one (theorem 1)."""
        exponent = 2 * math.pi**2 * self.stddev**2
        return 10 * math.fsum(math.exp(-exponent * k / (k + 1)) for k in range(1, self.honest))

    def event(self) -> Event:
        """The event of one round, for a client that is exchanged for zero."""
        tau, size = self.excess, self.size
        ratio = math.sqrt(self._largest_square) / (math.sqrt(self.honest) * self.stddev)
        epsilon = min(math.sqrt(ratio**2 + tau * size / 2), ratio + tau * math.sqrt(size))
        return ZeroConcentratedDP(rho=epsilon**2 / 2 * (1 + 1e-12))

    def encode(self, update: GivenUpdate, *, round_number: int, randomness: Randomness) -> Integers:
        """A client's message, whole numbers 0 … 2^bits − 1, shape (size,). Send it only through secure aggregation.

        An update that is not finite, or of other names or shapes, is encoded as zero.

        Args:
            update: named tensors or arrays, or a list of them in the order of `shapes`.
            round_number: of the round; it names the public rotation.
            randomness: the client's own.
        """
        whole = self._rounded(self._flat(update), round_number, randomness)
        noise = discrete_gaussian(*self._ratio, self.size, randomness.fresh("noise share"))
        return (whole + noise) & (self.modulus - 1)

    def _flat(self, given: GivenUpdate) -> npt.NDArray[np.float64]:
        update = as_tensors(given, tuple(self.shapes))
        fits = set(update) == set(self.shapes) and all(
            tuple(update[name].shape) == tuple(shape) for name, shape in self.shapes.items()
        )
        if not fits:
            return np.zeros(self.dimension)
        clipped = clipped_update(
            {name: value.detach().double() for name, value in update.items()}, max_update_norm=self.max_update_norm
        )
        return np.concatenate([clipped[name].cpu().numpy().ravel() for name in self.shapes])

    def _rounded(self, flat: npt.NDArray[np.float64], round_number: int, randomness: Randomness) -> Integers:
        """Rounded up or down at random, without bias, until the norm of the whole numbers is within the bound."""
        turned = rotate(flat, self._turn(round_number)) / self.granularity
        below = np.floor(turned)
        for _ in range(_MOST_ATTEMPTS):
            up = randomness.fresh("rounding").uniform(self.size) < turned - below
            whole = below.astype(np.int64) + up
            if sum(int(entry) for entry in (whole * whole).tolist()) <= self._largest_square:
                return whole
        # Happens to an honest client with probability below e^(−500); zero keeps the bound.
        return np.zeros(self.size, dtype=np.int64)

    def decode(self, total: Integers, *, round_number: int) -> dict[str, Tensor]:
        """The noisy mean update: the sum modulo 2^bits, read as a number around zero, turned back, over `clients`.

        Args:
            total: sum of the messages modulo 2^bits, shape (size,).
            round_number: of the round.
        """
        if total.shape != (self.size,) or not np.issubdtype(total.dtype, np.integer):
            raise InvalidArgument(f"total must be {self.size} whole numbers, got others. Sum the clients' messages.")
        half = self.modulus >> 1
        centred = (((total + half) & (self.modulus - 1)) - half).astype(np.float64)
        centred *= self.granularity / self.clients
        mean = rotate_back(centred, self._turn(round_number), dimension=self.dimension)
        parts, place = {}, 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            parts[name] = torch.from_numpy(mean[place : place + count].reshape(shape))
            place += count
        return parts

    def _turn(self, round_number: int) -> npt.NDArray[np.float64]:
        """The signs of a round: public, the same for everybody."""
        public = Randomness(seed=0, reproducible=True)
        return signs(self.size, public.stream("public rotation", step=round_number))
