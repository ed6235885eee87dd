"""What the native checks and Python share: structures in memory, and the numbers that stand for things.

A *record* is 64 bits that say who touched a word last: who, whether by a strong operation, where in the kernel, and when.
In shared memory `who` is a thread and `when` the block's clock, which every synchronisation advances; in global memory
`who` is a block and `when` the number of the launch. A word that threads touch in parts is marked `mixed` and has one
record for each byte.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# What an access does (bits).
READ, WRITE, STRONG, COLLECTIVE, NO_INIT = 1, 2, 4, 8, 16

# State spaces as an instruction names them.
GENERIC, GLOBAL, SHARED, LOCAL, CONST = 0, 1, 2, 3, 4
SPACES = {"generic": GENERIC, "global": GLOBAL, "shared": SHARED, "local": LOCAL, "const": CONST}

# What memory is (bits of an entry).
WRITABLE, IS_CONST, IS_SHARED, IS_LOCAL = 1, 2, 4, 8

# Shadow of a byte: never written, written, promised by a cp.async that nothing has waited for.
UNWRITTEN, WRITTEN, PENDING_COPY = 0, 1, 2

# Findings.
BOUNDS, MISALIGNED, READ_ONLY, WRONG_SPACE, UNINITIALISED, PENDING = 1, 2, 3, 4, 5, 6
READ_AFTER_WRITE, WRITE_AFTER_WRITE, WRITE_AFTER_READ, SAME_STORE = 7, 8, 9, 10
DIVERGENT_BARRIER, BARRIER_COUNT, BARRIER_NUMBER = 11, 12, 13
INACTIVE_SOURCE, INACTIVE_MEMBER, NOT_MEMBER, PARTIAL_WARP, MISSING_AT_WARP_BARRIER = 14, 15, 16, 17, 18
NO_PROGRESS, LANE_OUTSIDE = 19, 20

WARPS, BARRIERS, THREADS = 32, 16, 1024
QUEUE = 1 << 16  # copies under way in a block


class Entry(ctypes.Structure):
    """One allocation. The shadow pointers are biased: byte `a` has its init byte at `init + a`, its word's records at
    `writers + (a >> 2) * 8`, its own at `byte_writers + a * 8`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("start", "end", "flags", "init", "writers", "readers", "byte_writers", "byte_readers")
    )


class Watch(ctypes.Structure):
    """One launch: its shape, its shared and local variables, and the order in which it is run."""

    _fields_ = (
        ("checker", ctypes.c_void_p),
        ("blocks", ctypes.c_uint64),
        ("block_factor", ctypes.c_uint64),  # block number b runs as (b * factor + offset) % blocks
        ("block_offset", ctypes.c_uint64),
        ("warp_factor", ctypes.c_uint32),  # the same for warps; the offset is stirred with the block's number
        ("warp_offset", ctypes.c_uint32),
        ("warp_stir", ctypes.c_uint32),
        ("warps", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),  # of one lane
        ("shared_ranges", ctypes.c_uint32),
        ("local_ranges", ctypes.c_uint32),
        ("shared_at", ctypes.c_void_p),  # pairs of u64: start, end
        ("local_at", ctypes.c_void_p),
    )


class Copy(ctypes.Structure):
    """A cp.async under way."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("count", ctypes.c_uint32),  # bytes from the source; zeros behind them
        ("size", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("_pad", ctypes.c_uint32),
    )


class Finding(ctypes.Structure):
    """The first thing found; kind 0: nothing."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("lane", ctypes.c_uint32),
        ("ctaid", ctypes.c_uint32 * 3),
        ("bytes", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("other", ctypes.c_uint64),  # a record, a lane or a mask, as the kind has it
        ("shared_base", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("local_base", ctypes.c_uint64),
    )


FUNCTIONS = (
    *("access_uniform", "access_run", "access_lanes", "launch_start", "block_start", "barrier", "arrive", "release"),
    *(
        "leave",
        "warp_barrier",
        "fence",
        "members",
        "whole_warp",
        "fail",
        "turn",
        "copy_issue",
        "copy_commit",
        "copy_wait",
    ),
)


class Checker(ctypes.Structure):
    """The state of one worker; there is one, so that findings come in a fixed order."""

    _fields_ = (
        ("functions", ctypes.c_void_p * len(FUNCTIONS)),
        ("watch", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("entries", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),  # rounds of a warp's loops
        ("epoch", ctypes.c_uint64),  # the launch
        ("clock", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("fenced_globally", ctypes.c_uint64),
        ("addresses", ctypes.c_void_p),  # of the lanes of the instruction at hand, or null
        ("values", ctypes.c_void_p),  # what they store, or null
        ("mask", ctypes.c_uint64),
        ("finding", Finding),
        ("shared", Entry),
        ("local", Entry),
        (
            "shadow",
            ctypes.c_uint64 * 5,
        ),  # shared memory's init bytes, writers, readers, of words and of bytes, unbiased
        ("queue", ctypes.c_void_p),
        ("queued", ctypes.c_uint64),
        ("low", ctypes.c_uint64 * WARPS),  # records before it are settled for the warp, whoever made them
        ("high", ctypes.c_uint64 * WARPS),  # records from it on are not settled, whichever other warp made them
        ("fenced", ctypes.c_uint64 * WARPS),
        ("exits", ctypes.c_uint64 * WARPS),
        ("rounds", ctypes.c_uint64 * WARPS),
        ("seen", ctypes.c_uint64 * WARPS * WARPS),  # [w][r]: what warp r did before this clock is ordered before warp w
        ("barriers", ctypes.c_uint64 * WARPS * BARRIERS),  # what those that have arrived had seen
        ("meeting", ctypes.c_uint32 * WARPS),  # lanes that bar.warp.sync waits for
        ("met", ctypes.c_uint32 * WARPS),  # and those that are there
        ("at", ctypes.c_uint32 * WARPS),  # the barrier that each warp came to last, as a site + 1
        ("groups", ctypes.c_uint32 * THREADS),
    )


def at(structure: type[ctypes.Structure], name: str) -> int:
    """A field's offset in bytes."""
    return int(getattr(structure, name).offset)


@dataclass(frozen=True, slots=True)
class Records:
    """How a record is packed, from the lowest bit: who, strong, site, when."""

    who_bits: int
    site_bits: int
    mixed: int  # codes of `who`
    many: int

    @property
    def site_shift(self) -> int:
        return self.who_bits + 1

    @property
    def when_shift(self) -> int:
        return self.who_bits + 1 + self.site_bits

    @property
    def last_site(self) -> int:
        """The highest site that fits; it stands for any from there on."""
        return (1 << self.site_bits) - 1

    def unpack(self, record: int) -> tuple[int, bool, int]:
        """who, strong, site."""
        who = record & ((1 << self.who_bits) - 1)
        return who, bool(record >> self.who_bits & 1), record >> self.site_shift & self.last_site


ONE_WARP = 1024  # + w: several lanes of warp w
IN_SHARED = Records(11, 16, mixed=2046, many=2047)
IN_GLOBAL = Records(24, 15, mixed=0xFFFFFE, many=0xFFFFFF)
BLOCK_CODES = 0xFFFFF0  # blocks are told apart modulo this
LAST_EPOCH = (1 << 24) - 2

# A site as native code reads it: eight 32-bit words.
SITE_WORDS = ("index", "size", "kind", "space", "cache", "element", "shift", "align")
