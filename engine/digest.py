"""The digest of a training state: what a run prints last, and what two runs with the same bits share.

Weights, m and v go into two sums of 32 bits, mod 2^32, over a hash of each number's bits and its place. Integer sums have
no order, so the device computes them with one thread or thousands (`ptx/state_digest_partial.ptx`, after every step), and
NumPy here over any pieces (whoever writes or reads a checkpoint): the same number. One changed number always changes both sums,
since the hash is a permutation; two or more go unseen once in 2^64. It finds faults and does not withstand an attacker, for
whom files have their SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxtrain.ptx.specs import DigestSpec

_SPEC = DigestSpec()
_PIECE = 1 << 15  # numbers at once: with what is made of them they fit a core's cache
_BUFFERS = 3  # weights, m, v

Words = NDArray[np.uint32]


class SumOfBuffer:
    """The sums of one flat buffer, fed with its numbers piece by piece, in order."""

    def __init__(self, buffer: int) -> None:  # 0 weights, 1 m, 2 v
        assert 0 <= buffer < _BUFFERS
        self._salt = buffer * _SPEC.salt
        self._at = 0
        self._lo = self._hi = 0
        self._x, self._t = (np.empty(_PIECE, np.uint32) for _ in range(2))

    def feed(self, numbers: NDArray[Any]) -> None:
        """Take the next numbers, [n] f32 or their bits as u32, little-endian."""
        assert numbers.ndim == 1 and numbers.dtype.itemsize == 4
        words = numbers.view(np.uint32)
        for start in range(0, words.size, _PIECE):
            self._feed(words[start : start + _PIECE])

    def _feed(self, words: Words) -> None:
        x, t = self._x[: words.size], self._t[: words.size]
        first = np.uint32((self._at * _SPEC.golden + self._salt) & 0xFFFFFFFF)
        np.add(_ramp()[: words.size], first, out=x)
        np.bitwise_xor(x, words, out=x)
        for shift, factor in _SPEC.mix:
            _xor_shift(x, t, shift)
            np.multiply(x, np.uint32(factor), out=x)
        _xor_shift(x, t, _SPEC.last)
        self._lo += int(x.sum(dtype=np.uint64))
        factor, shift = _SPEC.mix_3
        np.multiply(x, np.uint32(factor), out=x)
        _xor_shift(x, t, shift)
        self._hi += int(x.sum(dtype=np.uint64))
        self._at += words.size

    def halves(self) -> tuple[int, int]:
        """(lo, hi), not yet taken mod 2^32."""
        return self._lo, self._hi


def _xor_shift(x: Words, t: Words, shift: int) -> None:
    np.right_shift(x, np.uint32(shift), out=t)
    np.bitwise_xor(x, t, out=x)


@functools.cache
def _ramp() -> Words:
    return (np.arange(_PIECE, dtype=np.uint64) * _SPEC.golden).astype(np.uint32)  # mod 2^32


def join(sums: list[SumOfBuffer]) -> int:
    """The 64 bits of a whole state: lo below, hi above."""
    lo: int = sum(one.halves()[0] for one in sums) & 0xFFFFFFFF
    hi: int = sum(one.halves()[1] for one in sums) & 0xFFFFFFFF
    return hi << 32 | lo


def state_sum(
    params: NDArray[np.float32],  # flat, as m and v
    m: NDArray[np.float32],
    v: NDArray[np.float32],
) -> int:
    """The 64 bits that `engine.ops.state_digest` computes on the device."""
    sums = []
    for buffer, array in enumerate((params, m, v)):
        assert array.dtype == np.dtype("<f4") and array.ndim == 1 and array.size == params.size
        sums.append(SumOfBuffer(buffer))
        sums[-1].feed(array)
    return join(sums)


def state_digest(
    total: int,  # state_sum(params, m, v)
    count: int,  # numbers in each of them
    step: int,
    position: tuple[int, int],  # the loader's (file, token)
) -> str:
    """16 hex digits over a state: the first of the SHA-256 of step, position, count and sum, each as a little-endian u64."""
    digest = hashlib.sha256(b"ptxtrain state 2\n")
    for number in (step, *position, count, total):
        digest.update(int(number).to_bytes(8, "little"))
    return digest.hexdigest()[:16]
