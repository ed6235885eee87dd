"""Shared memory's banks: how many lanes of an access get in each other's way.

Shared memory has 32 banks of 4 bytes, and serves one word of each bank at a time; lanes that want the same word share it.
Wide accesses go in parts: 8 bytes a lane in two halves of the warp, 16 bytes in four quarters. `ldmatrix` takes one 8 x 8 matrix
at a time, eight rows of 16 bytes, and so does `cp.async` of 16 bytes with eight lanes.
Source: CUDA C++ Programming Guide, *Shared Memory* of compute capability 5.x and later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

BANKS = 32
BANK_BYTES = 4
LANES = 32


def waves(addresses: Iterable[int], nbytes: int) -> int:
    """Rounds that one part of an access takes: lanes at these byte addresses, `nbytes` each. 1 is free of conflicts."""
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        assert address % min(nbytes, 16) == 0, f"address {address} is not aligned to {nbytes} bytes"
        for word in range(address // BANK_BYTES, -(-(address + nbytes) // BANK_BYTES)):
            words[word % BANKS].add(word)
    return max((len(found) for found in words.values()), default=0)


def conflicts(address_of: Callable[[int], int], nbytes: int, lanes: int = LANES) -> int:
    """Rounds beyond the least for a load, store or copy of 4, 8 or 16 bytes a lane."""
    part = {4: 32, 8: 16, 16: 8}[nbytes]
    return _over([[address_of(lane) for lane in range(first, first + part)] for first in range(0, lanes, part)], nbytes)


def matrix_conflicts(address_of: Callable[[int], int], matrices: int = 4) -> int:
    """Rounds beyond the least for `ldmatrix`: lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i."""
    return _over([[address_of(lane) for lane in range(8 * i, 8 * i + 8)] for i in range(matrices)], 16)


def _over(parts: Sequence[Sequence[int]], nbytes: int) -> int:
    return sum(waves(part, nbytes) - 1 for part in parts)
