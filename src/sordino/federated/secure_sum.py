"""Secure aggregation, simulated in one process (floor 4, federated): the server adds masked messages.

Each pair of clients shares a mask; one adds it, the other subtracts it, so masks cancel in the sum and a single message
is uniformly random. Clients that drop out after masks were agreed on leave theirs behind, and the others give them up.
Here both sides run in one process and share keys in the clear: the arithmetic is the protocol's, its secrecy is not.

References:
    Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument, PrivacyError
from sordino.randomness import Randomness

__all__ = ["SimulatedSecureSum"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SimulatedSecureSum:
    """One round's masks.

    Guarantee: in a real deployment the server sees the sum of at least `least` messages and nothing else. In this
    simulation nobody is kept from looking.

    Args:
        clients: who agreed on masks, by number.
        size: numbers in a message.
        bits: of the modulus.
        least: fewest messages that a sum is opened for, ≥ 1; with `DistributedGaussian` it is the honest count and as
            many as may collude.
        randomness: of the masks.
    """

    clients: Sequence[int]
    size: int
    bits: int
    least: int
    randomness: Randomness = field(default_factory=Randomness, repr=False)

    def __post_init__(self) -> None:
        checks.integer(1, size=self.size)
        checks.integer(1, least=self.least)
        if len(set(self.clients)) != len(self.clients):
            raise InvalidArgument("clients must each appear once, got one twice. Give their numbers.")

    def mask(self, client: int, message: Integers) -> Integers:
        """What `client` sends: its message plus its masks, modulo 2^bits."""
        return (message + self._masks(client)) & ((1 << self.bits) - 1)

    def _masks(self, client: int) -> Integers:
        return self._between(client, [other for other in self.clients if other != client])

    def _between(self, client: int, others: Sequence[int]) -> Integers:
        """The sum of the masks that `client` shares with `others`, with its signs."""
        total = np.zeros(self.size, dtype=np.int64)
        place = {number: index for index, number in enumerate(self.clients)}
        for other in others:
            low, high = sorted((place[client], place[other]))
            pair = self.randomness.stream("pair", step=low, tensor=high).integers64(self.size)
            shared = (pair & np.uint64((1 << self.bits) - 1)).astype(np.int64)
            total += shared if place[client] == low else -shared
        return total

    def open(self, sent: Mapping[int, Integers]) -> Integers:
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
