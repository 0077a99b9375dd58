"""The one place noise and sampling randomness come from.

A `KeyedRNG` holds a 256-bit master key, drawn from the operating system. Every use asks for a stream by
name: (purpose, step, tensor, rank). The stream's own key is a keyed hash of the master key and that name, and
its bits are AES-256 in counter mode, so streams are independent, any stream can be made without the others,
and no state is shared between threads or processes. On another device a stream goes on as ChaCha20 under a key of its
own (`device_key`). ``torch.manual_seed`` has no part in it.

A resumed run makes a new `KeyedRNG`, hence a new key: no noise value is ever used twice. A forked process goes on
with other streams than its parent and its siblings: every stream's name holds a mark of the process that asks for it.

Example:
    >>> from sordino.randomness import KeyedRNG
    >>> first, second = KeyedRNG(), KeyedRNG()
    >>> bool((first.stream("noise", step=0).uniform(4) == second.stream("noise", step=0).uniform(4)).any())
    False

References:
    NIST SP 800-38A, section 6.5 (counter mode); RFC 7693 (BLAKE2, used as a keyed hash).
"""

import hashlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["KeyedRNG", "RandomStream"]

_KEY_BYTES = 32
_BLOCK_BYTES = 16
# A view: a slice of it is no copy.
_ZEROS = memoryview(bytes(1 << 20))
_process, _process_id = "", os.getpid()


def _mark() -> str:
    """This process's mark, drawn again in every child.

    A forked child holds copies of its parent's keys and counters; without a mark of its own both would draw alike.
    """
    global _process, _process_id
    # Asking for the number each time also finds children that were forked past Python.
    if os.getpid() != _process_id:
        _process, _process_id = secrets.token_hex(16), os.getpid()
    return _process


def _unmark() -> None:
    global _process_id  # noqa: PLW0603 (a child could have been given its grandparent's number)
    _process_id = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unmark)


def _encryptor(key: bytes, position: int = 0) -> CipherContext:
    """The bits of `key` from byte `position` on: the counter of its block, and the rest of that block thrown away."""
    counter, rest = divmod(position, _BLOCK_BYTES)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
    if rest:
        encryptor.update(bytes(rest))
    return encryptor


class RandomStream:
    """An endless stream of secret random bits, read in order; in a forked child it goes on with other bits."""

    def __init__(self, key: bytes, *, position: int = 0) -> None:
        self._home = _mark()
        self._key, self._position = key, position
        self._made: CipherContext | None = None

    def fill(self, buffer: memoryview) -> None:
        """Overwrite a writable, contiguous byte buffer with the next random bytes."""
        self._leave_parent()
        encryptor, view = self._encryptor(), buffer.cast("B")
        self._position += len(view)
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: len(part)], part)

    def ahead(self, count: int) -> "RandomStream":
        """Another reader of this stream, `count` bytes further on; this one stays where it is."""
        self._leave_parent()
        return RandomStream(self._key, position=self._position + checks.integer(0, count=count))

    def skip(self, count: int) -> None:
        """Go `count` bytes further on."""
        self._leave_parent()
        self._position += checks.integer(0, count=count)
        self._made = None

    def key_and_position(self) -> tuple[bytes, int]:
        """The key, 32 bytes, and the byte of the stream that is read next: for compiled code that makes the same bits.

        The code that reads them this way calls `skip`.
        """
        self._leave_parent()
        return self._key, self._position

    def device_key(self) -> bytes:
        """A key, 32 bytes, for bits that another generator makes on another device, in the place of those from here on.

        Every place of every stream has its own, from which neither this stream's bits nor its key can be found.
        """
        self._leave_parent()
        place = self._position.to_bytes(_BLOCK_BYTES, "big")
        return hashlib.blake2b(place, key=self._key, digest_size=_KEY_BYTES, person=b"sordino-device").digest()

    def _encryptor(self) -> CipherContext:
        """Made when bits are read: places in a stream that no one reads cost nothing."""
        if self._made is None:
            self._made = _encryptor(self._key, self._position)
        return self._made

    def _leave_parent(self) -> None:
        mark = _mark()
        if mark != self._home:
            copied = self._encryptor().update(bytes(_KEY_BYTES))
            self._key = hashlib.blake2b(mark.encode(), key=copied, digest_size=_KEY_BYTES).digest()
            self._home, self._position, self._made = mark, 0, None

    def integers64(self, count: int) -> np.ndarray:
        """`count` independent uniform uint64."""
        words = np.empty(checks.integer(0, count=count), dtype=np.uint64)
        if count:
            self.fill(words.data)
        return words

    def uniform(self, count: int) -> np.ndarray:
        """`count` independent uniforms in the open interval (0, 1): odd multiples of 2⁻⁵³."""
        return ((self.integers64(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True)
class KeyedRNG:
    """The master key of one run, and the streams made from it.

    Args:
        seed: only together with `reproducible=True`; then the key is a hash of the seed.
        reproducible: a run with a chosen seed is not private against anyone who knows the seed, so everything
            made with it carries the watermark "not for release".

    Raises:
        InvalidArgument: a seed without `reproducible=True`, or the reverse.
    """

    seed: int | None = None
    reproducible: bool = False
    _key: bytes = field(default=b"", init=False, repr=False, compare=False)
    _count: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)
    _home: str = field(default_factory=_mark, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.seed is None and self.reproducible:
            raise InvalidArgument("seed must be an integer with reproducible=True, got None. Give seed=… or drop it.")
        if self.seed is not None and not self.reproducible:
            raise InvalidArgument(
                f"seed must be None unless reproducible=True, got {self.seed!r}. "
                "A chosen seed voids the guarantee; for a test run pass reproducible=True."
            )
        if self.seed is None:
            key = secrets.token_bytes(_KEY_BYTES)
        else:
            text = str(checks.integer(seed=self.seed)).encode()
            key = hashlib.blake2b(text, digest_size=_KEY_BYTES, person=b"sordino-seed").digest()
        object.__setattr__(self, "_key", key)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("Randomness can't be pickled or copied: a copy would repeat its noise. Make a new one.")

    def with_shared_key(self, exchange: Callable[[bytes], bytes]) -> "KeyedRNG":
        """The same randomness in all processes of one run: its key is what `exchange` makes of this one's.

        The noise can be subtracted with the key: it may only be sent between processes that hold the records.

        Args:
            exchange: this object's key ↦ the key that all processes agree on, 32 bytes.
        """
        other = KeyedRNG(seed=self.seed, reproducible=self.reproducible)
        object.__setattr__(other, "_key", exchange(self._key))
        return other

    @property
    def commitment(self) -> str:
        """A name for the key, 64 hexadecimal digits, that binds to it without giving it away; every key has another."""
        mark = _mark()
        text = b"" if mark == self._home else mark.encode()
        return hashlib.blake2b(text, key=self._key, digest_size=_KEY_BYTES, person=b"sordino-commit").hexdigest()

    def stream(self, purpose: str, *, step: int, tensor: int = 0, rank: int = 0) -> RandomStream:
        """The stream named by (purpose, step, tensor, rank); the same name gives the same bits again.

        In a process that was forked after this object was made, the name gives other bits.
        """
        mark = _mark()
        forked = "" if mark == self._home else f"\x00{mark}"
        name = f"{purpose}\x00{step}\x00{tensor}\x00{rank}{forked}".encode()
        return RandomStream(
            hashlib.blake2b(name, key=self._key, digest_size=_KEY_BYTES, person=b"sordino-stream").digest()
        )

    def new_stream(self, purpose: str) -> RandomStream:
        """A stream that this object hands out only once: for draws that have no step number of their own.

        Everyone who holds this object shares one counter, and a forked process has other streams, so no two releases
        made with one `KeyedRNG` ever use the same bits.
        """
        return self.stream(f"\x00{purpose}", step=next(self._count))
