"""The digest of a training state: what a run prints last, and what two runs with the same bits share."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 24  # numbers hashed at once


def state_digest(
    params: NDArray[np.float32],  # flat, as m and v
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    step: int,
    position: tuple[int, int],  # the loader's (file, token)
) -> str:
    """The first 16 hex digits of the SHA-256 over step, position, weights, m and v (little-endian f32 and u64)."""
    digest = hashlib.sha256(b"ptxtrain state 1\n")
    for number in (step, *position, params.size):
        digest.update(int(number).to_bytes(8, "little"))
    for array in (params, m, v):
        assert array.dtype == np.dtype("<f4") and array.ndim == 1 and array.size == params.size
        for start in range(0, array.size, _PIECE):
            digest.update(np.ascontiguousarray(array[start : start + _PIECE]).data)
    return digest.hexdigest()[:16]
