"""Random numbers of a sample, by seed, epoch, stream and ordinal: the same on every machine, in any order, at any time.

Philox 4x32-10, a counter-based generator: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers:
As Easy as 1, 2, 3", SC 2011. It is written out here because no generator of numpy takes an array of counters, and
because numpy guarantees that its raw integers stay the same, but not its distributions.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from dali_pipes.arrays import Int64s, UInt64s

# Multipliers and Weyl constants of Philox 4x32, from the paper's reference implementation.
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[int, int]) -> tuple[UInt64s, ...]:
    """Compute four random 32-bit words for each counter, with a key of two 32-bit words.

    Counters and results are four arrays of one shape each, uint64 holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


class Stream:
    """The random numbers for one purpose in one epoch: ``Stream(7, 0, "crop")``.

    A sample's numbers depend on its ordinal and its occurrence only, not on its batch or on the samples before it.
    """

    def __init__(self, seed: int, epoch: int, name: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=8).digest()
        self._key = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))

    def words(self, ordinals: Int64s, *, occurrence: Int64s | int = 0) -> UInt64s:
        """64 random bits for each ordinal: uint64 [N]."""
        low, high = self._draw(np.asarray(ordinals, np.uint64), np.asarray(occurrence, np.uint64), np.uint64(0))[:2]
        return (high << _SHIFT) | low

    def uniforms(self, ordinals: Int64s, num: int, *, occurrence: Int64s | int = 0) -> npt.NDArray[np.float64]:
        """``num`` numbers in [0, 1) for each ordinal: float64 [N, num], multiples of 2**-32."""
        num_draws = -(-num // 4)
        # [N, 1] against [num_draws]: every sample draws four words at each of its own counters.
        repeats = np.broadcast_to(np.asarray(occurrence, np.uint64), np.shape(ordinals))
        words = self._draw(
            np.asarray(ordinals, np.uint64)[:, None], repeats[:, None], np.arange(num_draws, dtype=np.uint64)[None, :]
        )
        numbers = np.stack(words, axis=-1).reshape(len(ordinals), num_draws * 4)[:, :num]  # [N, draw, word] -> [N, num]
        return numbers.astype(np.float64) * 2.0**-32

    def _draw(self, ordinals: UInt64s, occurrence: UInt64s, draw: UInt64s | np.uint64) -> tuple[UInt64s, ...]:
        shape = np.broadcast_shapes(np.shape(ordinals), np.shape(occurrence), np.shape(draw))
        counter = (
            np.broadcast_to(ordinals & _LOW, shape),
            np.broadcast_to(ordinals >> _SHIFT, shape),
            np.broadcast_to(occurrence, shape),
            np.broadcast_to(draw, shape),
        )
        return philox4x32(counter, self._key)
