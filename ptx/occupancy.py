"""How many blocks of a kernel a multiprocessor holds at once, from its registers, shared memory and threads.

Source: CUDA C++ Programming Guide, *Technical Specifications per Compute Capability*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LANES = 32
REGISTERS = 65_536  # of a multiprocessor
REGISTER_UNIT = 256  # a warp gets its registers in such pieces
SHARED_UNIT = 128
RESERVED = 1024  # bytes of shared memory that the system keeps for each block


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one holds: warps, blocks, bytes of shared memory."""

    warps: int
    blocks: int
    shared: int


MULTIPROCESSORS: Mapping[str, Multiprocessor] = MappingProxyType(
    {
        "sm_80": Multiprocessor(64, 32, 164 * 1024),
        "sm_86": Multiprocessor(48, 16, 100 * 1024),
        "sm_89": Multiprocessor(48, 24, 100 * 1024),
        "sm_90": Multiprocessor(64, 32, 228 * 1024),
        "sm_100": Multiprocessor(64, 32, 228 * 1024),
        "sm_120": Multiprocessor(48, 24, 100 * 1024),
    }
)


def blocks(architecture: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds; `registers` of a thread, `shared` bytes of a block."""
    holds = MULTIPROCESSORS[architecture]
    warps = -(-threads // LANES)
    of_warp = -(-registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-(shared + RESERVED) // SHARED_UNIT) * SHARED_UNIT
    return min(holds.blocks, holds.warps // warps, REGISTERS // of_warp // warps, holds.shared // of_block)
