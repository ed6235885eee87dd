"""What a launch can end with: a status in 32 bits, and the words for it.

The lowest 4 bits say what happened (0: all is well). Above them a kernel that ended itself puts a number for the place: a
checksum of the message, so that the same kernel compiles to the same code in every process. The messages are kept here
from the moment that a file is loaded.
"""

from __future__ import annotations

import zlib

DEADLOCK, TRAPPED, FOUND = 1, 2, 3  # FOUND: by the checked mode, which knows what

_messages: dict[int, str] = {}


def status_of(message: str) -> int:
    """The status of a trap with this message, as the signed number that IR text takes."""
    place = zlib.crc32(message.encode()) >> 4
    _messages[place] = message
    status = place << 4 | TRAPPED
    return status - (1 << 32) if status >> 31 else status


def apart(place: str) -> str:
    """The message of a barrier that a part of a warp comes to."""
    return f"lanes of a warp came to a barrier that others of the warp did not come to ({place})"


def describe(name: str, status: int) -> str:
    """The error of kernel `name` that ended with a status other than 0."""
    kind, place = status & 15, status >> 4
    if kind == DEADLOCK:
        return f"{name}: deadlock: its warps wait at different barriers, or some left before one"
    if kind == TRAPPED:
        return f"{name}: {_messages.get(place, 'the kernel executed trap')}"
    return f"{name}: ended with status {status}"
