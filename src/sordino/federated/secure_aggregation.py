"""Distributed differential privacy: each client adds a share of the noise, the server sees a sum.

A client clips its update, rotates it, rounds it to whole numbers at random, checks the norm of these, adds its share of
discrete Gaussian noise and sends the result modulo 2^bits through secure aggregation. The server learns only the sum.

The proof is in ``docs/proofs/distributed-gaussian.md``.

References:
    Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation", algorithms 1 and 2, theorem 1 and proposition 26 (norm after rounding).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, PrivacyError
from sordino.events import Event, SelfComposed, ZeroConcentratedDP
from sordino.federated.server import FederatedRound, RoundsOfServer, fed_avg
from sordino.federated.updates import GivenUpdate, as_tensors, client_guarantee, clipped_update, shared_parameters
from sordino.ledger import Account, Reservation
from sordino.mechanisms.base import ratio_at_least
from sordino.mechanisms.samplers import discrete_gaussian
from sordino.randomness import KeyedRNG, RandomStream
from sordino.training.charging import BlockCharger
from sordino.training.distributed import require_single_process
from sordino.training.generators import BatchGenerators

# ----------------------------------------------------------------------------------------------------------------------
# The random rotation that spreads a vector over its coordinates: public and orthogonal.
#
# x ↦ H·D·x: D holds independent random signs, H is the Walsh–Hadamard matrix divided by the root of its size.
# Afterwards every coordinate has about the root of 1/d of the length, so one step of a grid serves all of them.
#
# References:
#     Ailon, Chazelle 2009; Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism", section 3.
# ----------------------------------------------------------------------------------------------------------------------


Floats = npt.NDArray[np.float64]


def signs(size: int, stream: RandomStream) -> Floats:
    """`size` independent signs ±1."""
    return 1.0 - 2.0 * (stream.integers64(size) & np.uint64(1)).astype(np.float64)


def rotate(vector: Floats, turn: Floats) -> Floats:
    """H·D·x, padded with zeros to the size of `turn`, a power of two.

    Args:
        vector: shape (dimension,).
        turn: the signs, shape (size,).

    Example:
        >>> rotated = rotate(np.array([3.0, 4.0]), np.array([1.0, -1.0]))
        >>> [round(float(entry), 3) for entry in rotated], round(float(np.linalg.norm(rotated)), 9)
        ([-0.707, 4.95], 5.0)
    """
    padded = np.zeros(len(turn))
    padded[: len(vector)] = vector
    return _hadamard(padded * turn)


def rotate_back(vector: Floats, turn: Floats, *, dimension: int) -> Floats:
    """The inverse of `rotate`: D·H·y, the first `dimension` entries."""
    return (_hadamard(vector) * turn)[:dimension]


def _hadamard(vector: Floats) -> Floats:
    """The orthonormal fast Walsh–Hadamard transform, in n·log n additions."""
    out, width = vector.copy(), 1
    while width < len(out):
        pairs = out.reshape(-1, 2, width)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    return out / np.sqrt(len(out))


# ----------------------------------------------------------------------------------------------------------------------
# Distributed differential privacy: each client adds a share of the noise, the server sees a sum.
# ----------------------------------------------------------------------------------------------------------------------


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

    Guarantee: one sum of the messages of at least `min_honest_clients` clients that follow `encode` is ``event()``,
        for the server
    and for all other clients together, when one client's update is exchanged for zero while it goes on adding its
    noise (zero out). Nothing is assumed of the other clients, and nothing of the sum's modulus: wrapping around costs
    accuracy only. What a single message shows is up to the secure aggregation.

    Args:
        shapes: the shared parameters, by name, in the order of the model.
        max_update_norm: clipping bound c > 0 of one update.
        noise_multiplier: standard deviation of the honest clients' noise together, over the sensitivity after
            rounding, > 0.
        clients: clients that are planned for a round, n ≥ 1; the divisor of the sum.
        min_honest_clients: least number h of clients in a round that add their noise and don't tell it, 1 … n. Each
            adds 1/h of the variance, so a round in which all n do has n/h times the noise that is needed.
        bits: of the modulus, 8 … 40.

    Raises:
        InvalidArgument: a value out of its range, or a modulus too small for these numbers.

    Example:
        >>> mechanism = DistributedGaussian(shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0,
        ...     clients=100, min_honest_clients=80, bits=20)
        >>> round(mechanism.event().rho, 4)
        0.5
    """

    shapes: Mapping[str, tuple[int, ...]]
    max_update_norm: float
    noise_multiplier: float
    clients: int
    min_honest_clients: int
    bits: int = 20

    def __post_init__(self) -> None:
        checks.positive(max_update_norm=self.max_update_norm)
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.integer(1, clients=self.clients)
        checks.in_range(
            1, self.clients, min_honest_clients=checks.integer(1, min_honest_clients=self.min_honest_clients)
        )
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
        return 1 << max(0, self.dimension - 1).bit_length()

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
            noise = self.clients / self.min_honest_clients * (self.noise_multiplier * self._sensitivity(step)) ** 2
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
        return ratio_at_least(steps / Fraction(math.sqrt(self.min_honest_clients)) * (1 + Fraction(1, 1 << 50)))

    @property
    def stddev(self) -> float:
        """Each client's σ, in steps of the grid."""
        return self._ratio[0] / self._ratio[1]

    @property
    def excess(self) -> float:
        """τ: how far, in log probability of one coordinate, a sum of h discrete Gaussians is from one (theorem 1)."""
        exponent = 2 * math.pi**2 * self.stddev**2
        return 10 * math.fsum(math.exp(-exponent * k / (k + 1)) for k in range(1, self.min_honest_clients))

    def event(self) -> Event:
        """The event of one round, for a client that is exchanged for zero."""
        tau, size = self.excess, self.size
        ratio = math.sqrt(self._largest_square) / (math.sqrt(self.min_honest_clients) * self.stddev)
        epsilon = min(math.sqrt(ratio**2 + tau * size / 2), ratio + tau * math.sqrt(size))
        return ZeroConcentratedDP(rho=epsilon**2 / 2 * (1 + 1e-12))

    def encode(self, update: GivenUpdate, *, round_number: int, rng: KeyedRNG) -> Integers:
        """A client's message, whole numbers 0 … 2^bits − 1, shape (size,). Send it only through secure aggregation.

        An update that is not finite, or of other names or shapes, is encoded as zero.

        Args:
            update: named tensors or arrays, or a list of them in the order of `shapes`.
            round_number: of the round; it names the public rotation.
            rng: the client's own.
        """
        whole = self._rounded(self._flat(update), round_number, rng)
        noise = discrete_gaussian(*self._ratio, self.size, rng.new_stream("noise share"))
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

    def _rounded(self, flat: npt.NDArray[np.float64], round_number: int, rng: KeyedRNG) -> Integers:
        """Rounded up or down at random, without bias, until the norm of the whole numbers is within the bound."""
        turned = rotate(flat, self._turn(round_number)) / self.granularity
        below = np.floor(turned)
        for _ in range(_MOST_ATTEMPTS):
            up = rng.new_stream("rounding").uniform(self.size) < turned - below
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
        centered = (((total + half) & (self.modulus - 1)) - half).astype(np.float64)
        centered *= self.granularity / self.clients
        mean = rotate_back(centered, self._turn(round_number), dimension=self.dimension)
        parts = torch.from_numpy(mean).split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _turn(self, round_number: int) -> npt.NDArray[np.float64]:
        """The signs of a round: public, the same for everybody."""
        public = KeyedRNG(seed=0, reproducible=True)
        return signs(self.size, public.stream("public rotation", step=round_number))


# ----------------------------------------------------------------------------------------------------------------------
# Secure aggregation, simulated in one process: the server adds masked messages.
#
# Each pair of clients shares a mask; one adds it, the other subtracts it, so masks cancel in the sum and a single
# message is uniformly random. Clients that drop out after masks were agreed on leave theirs behind, and the others give
# them up. Here both sides run in one process and share keys in the clear: the arithmetic is the protocol's, its secrecy
# is not.
#
# References:
#     Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", section 4.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimulatedSecureAggregation:
    """One round's masks.

    Guarantee: in a real deployment the server sees the sum of at least `least` messages and nothing else. In this
    simulation every party can look.

    Args:
        clients: who agreed on masks, by number.
        size: numbers in a message.
        bits: of the modulus.
        least: fewest messages that a sum is opened for, ≥ 1; with `DistributedGaussian` it is the honest count and as
            many as may collude.
        rng: of the masks.
    """

    clients: Sequence[int]
    size: int
    bits: int
    least: int
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False)

    def __post_init__(self) -> None:
        checks.integer(1, size=self.size)
        checks.integer(1, least=self.least)
        if len(set(self.clients)) != len(self.clients):
            raise InvalidArgument("clients must each appear once, got one twice. Give their numbers.")

    def mask(self, client: int, message: Integers) -> Integers:
        """What `client` sends: its message plus its masks, modulo 2^bits."""
        others = [other for other in self.clients if other != client]
        return (message + self._between(client, others)) & ((1 << self.bits) - 1)

    def _between(self, client: int, others: Sequence[int]) -> Integers:
        """The sum of the masks that `client` shares with `others`, with its signs."""
        total = np.zeros(self.size, dtype=np.int64)
        index = {number: index for index, number in enumerate(self.clients)}
        for other in others:
            low, high = sorted((index[client], index[other]))
            pair = self.rng.stream("pair", step=low, tensor=high).integers64(self.size)
            shared = (pair & np.uint64((1 << self.bits) - 1)).astype(np.int64)
            total += shared if index[client] == low else -shared
        return total

    def unmask(self, sent: Mapping[int, Integers]) -> Integers:
        """The sum of the messages of those who sent, modulo 2^bits; the masks of the others are taken out.

        Raises:
            PrivacyError: fewer than `least` sent: the sum stays closed.
            InvalidArgument: somebody sent who had no masks.
        """
        if not set(sent) <= set(self.clients):
            raise InvalidArgument("sent must come from the round's clients, got another. Leave it out.")
        if len(sent) < self.least:
            raise PrivacyError(
                f"sent must hold at least {self.least} messages, got fewer: the noise in the sum would be too small. "
                "This round is lost."
            )
        gone = [client for client in self.clients if client not in sent]
        total = np.zeros(self.size, dtype=np.int64)
        for client, message in sent.items():
            total += message - self._between(client, gone)
        return total & ((1 << self.bits) - 1)


# ----------------------------------------------------------------------------------------------------------------------
# A server that never sees an update: rounds of sums from secure aggregation.
# ----------------------------------------------------------------------------------------------------------------------


_RELATION = NeighboringRelation.REPLACE_SPECIAL
_CHARGED: dict[str, Any] = {
    "note": "federated",
    "neighboring_relation": _RELATION,
    "privacy_unit": PrivacyUnit.CLIENT,
}


class DistributedServer(RoundsOfServer):
    """Asks cohorts, decodes the sums of their messages, steps the model, and keeps the charges, in a ``with`` block.

    Guarantee: all rounds together are (ε, δ)-differentially private for one client, as `guarantee` states, against the
    server and all other clients, if in every round at least ``mechanism.min_honest_clients`` clients added their
    noise and the aggregation showed only sums. Every round is charged to every client: nothing is gained from who is
    asked.

    Args:
        model: holds the shared parameters; changed in place.
        mechanism: what clients and server agreed on.
        rounds: ≥ 1.
        delta: δ in (0, 1).
        num_clients: public number of clients, at least ``mechanism.clients``.
        optimizer: the server's; `fed_avg` by default.
        rng: draws the cohorts.
        ledger: the clients' account; its neighboring_relation must be zero out.

    Example:
        >>> from sordino.federated import SimulatedSecureAggregation
        >>> model = nn.Linear(3, 1, bias=False)
        >>> mechanism = DistributedGaussian(shapes={"weight": (1, 3)}, max_update_norm=1.0, noise_multiplier=1.0,
        ...     clients=5, min_honest_clients=4)
        >>> with DistributedServer(model, mechanism, rounds=1, delta=1e-5, num_clients=20) as server:
        ...     for cohort in server.rounds():
        ...         asked, update = cohort.clients.tolist(), {"weight": model.weight.detach() * 0}
        ...         masks = SimulatedSecureAggregation(clients=asked, size=mechanism.size, bits=mechanism.bits, least=4)
        ...         sent = {client: masks.mask(client, mechanism.encode(
        ...             update, round_number=cohort.number, rng=KeyedRNG())) for client in asked}
        ...         server.finish_round(cohort, masks.unmask(sent))
        >>> round(server.guarantee().epsilon, 2)
        4.73
    """

    def __init__(
        self,
        model: nn.Module,
        mechanism: DistributedGaussian,
        *,
        rounds: int,
        delta: float,
        num_clients: int,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] = fed_avg,
        rng: KeyedRNG | None = None,
        ledger: Account | Reservation | None = None,
    ) -> None:
        require_single_process("server")
        self._shared = shared_parameters(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in self._shared.items()}
        if {name: tuple(shape) for name, shape in mechanism.shapes.items()} != shapes:
            raise InvalidArgument(
                "mechanism must have the shapes of the model's shared parameters. Build it from them."
            )
        self.model, self.mechanism = model, mechanism
        self._planned = checks.integer(1, rounds=rounds)
        self._delta = checks.probability(zero=False, one=False, delta=delta)
        self._population = checks.integer(mechanism.clients, num_clients=num_clients)
        self._optimizer = optimizer(list(self._shared.values()))
        self._randomness = KeyedRNG() if rng is None else rng
        self._generators = BatchGenerators(self._randomness)
        self._ledger = ledger
        self._charged = self.done = 0

    def __enter__(self) -> Self:
        """Reserve all rounds on the ledger."""
        with ExitStack() as stack:
            account = self._ledger
            if account is not None:
                account = stack.enter_context(account.reserve(self._events(self._planned), **_CHARGED))
            self._blocks = BlockCharger(account, lambda _step: self.mechanism.event(), **_CHARGED)
            self._within = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what was not drawn."""
        assert self._within is not None
        within, self._within = self._within, None
        self._generators.close()
        within.__exit__(kind, error, trace)

    def _events(self, rounds: int) -> Event:
        return SelfComposed(event=self.mechanism.event(), count=rounds)

    def rounds(self) -> Iterator[FederatedRound]:
        """The rounds, each charged before its clients are asked; who is asked is no secret.

        Until a round's end, clients that are trained in this process draw torch's, NumPy's and Python's random numbers
        from secret states.
        """
        for number in range(self._charged, self._planned):
            self._check_running()
            self._generators.close()
            self._blocks.charge(number, coming=self._planned - number)
            self._charged = number + 1
            yield self._give_out(number, self._cohort(number))
        self._generators.close()
        self._open = None

    def _cohort(self, number: int) -> np.ndarray:
        """``mechanism.clients`` different clients, each set of them equally likely.

        The first different ones of independent draws where the cohort is a small part of the population, in time and
        memory of the cohort; otherwise those with the least random keys.
        """
        stream, wanted = self._randomness.stream("cohort", step=number), self.mechanism.clients
        if 4 * wanted > self._population:
            keys = stream.integers64(self._population)
            return np.sort(np.argsort(keys, kind="stable")[:wanted]).astype(np.int64)
        drawn = np.empty(0, dtype=np.int64)
        while len(drawn) < wanted:
            more = (stream.uniform(2 * wanted) * self._population).astype(np.int64)
            drawn = np.concatenate([drawn, more])
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return np.sort(drawn[:wanted])

    def finish_round(self, cohort: FederatedRound, total: Integers) -> None:
        """Decode the sum of the cohort's messages and step the optimizer on minus the mean.

        Args:
            cohort: what `rounds` gave last.
            total: what the secure aggregation opened.

        Raises:
            NonPrivateStep: the round is not the open one.
            InvalidArgument: `total` is no sum of messages.
        """
        self._check_open(cohort)
        mean = self.mechanism.decode(total, round_number=cohort.number)
        self._open = None
        self._generators.close()
        for name, parameter in self._shared.items():
            parameter.grad = -mean[name].to(parameter.device, parameter.dtype)
        self._step(cohort)

    def guarantee(self) -> Guarantee:
        """What the rounds charged so far guarantee for one client."""
        return client_guarantee(
            self._events(self._charged),
            self._delta,
            _RELATION,
            self._randomness,
            f"at least {self.mechanism.min_honest_clients} clients of every round add their noise and keep it secret",
            "the server sees sums only: the aggregation is taken to be secure",
        )
