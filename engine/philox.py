"""Philox4x32-10, a counter-based generator: the bits at a position are a function of seed, purpose, stream and position.

So any part of a sequence can be made alone, in any order, on any machine, and nothing has to be carried along but numbers.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the Random123 library).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U32: TypeAlias = npt.NDArray[np.uint32]
F64: TypeAlias = npt.NDArray[np.float64]

# What the bits are for: no two purposes share any.
INITIAL_WEIGHTS = 1
SAMPLING = 2
GRADIENT_CHECK = 3
ROUNDING = 4  # of bf16 master weights

ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: npt.ArrayLike,  # [..., 4] u32
    key: tuple[int, int],  # two 32-bit words
) -> U32:
    """The 128 bits that belong to each counter, as u32 [..., 4]."""
    words = np.asarray(counter, np.uint64)
    assert words.shape[-1] == 4 and 0 <= key[0] < 2**32 and 0 <= key[1] < 2**32, (words.shape, key)
    c0, c1, c2, c3 = (words[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(seed: int, purpose: int, stream: int, start: int, count: int) -> U32:
    """The 32-bit words [start, start + count) of a stream, u32 [count].

    `seed` is taken modulo 2^64. A stream has 2^66 words; word i is word i % 4 of the block with counter
    (i / 4 low, i / 4 high, stream, purpose).
    """
    assert 0 <= purpose < 2**32 and 0 <= stream < 2**32 and start >= 0 and count >= 0
    first, last = start // 4, (start + count + 3) // 4
    blocks = np.arange(first, last, dtype=np.uint64)
    counter = np.empty((blocks.size, 4), np.uint64)
    counter[:, 0] = blocks & _LOW
    counter[:, 1] = blocks >> _HALF
    counter[:, 2] = stream
    counter[:, 3] = purpose
    seed %= 2**64
    bits = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)
    return bits[start - 4 * first : start - 4 * first + count]


def uniform(seed: int, purpose: int, stream: int, start: int, count: int) -> F64:
    """Numbers [start, start + count) of a stream, f64 [count], evenly spread over the open interval (0, 1).

    Each is (k + 1/2) / 2^52 with k the top 52 of 64 bits: exact, never 0 or 1, and as likely as its mirror image 1 - u.
    """
    pairs = words(seed, purpose, stream, 2 * start, 2 * count).astype(np.uint64).reshape(count, 2)
    k = (pairs[:, 1] << np.uint64(20)) | (pairs[:, 0] >> np.uint64(12))
    return (k.astype(np.float64) + 0.5) * 2.0**-52
