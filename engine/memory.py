"""How much memory there is to take: the host's, a container's share of it, and the cap that the user has set."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ptxtrain.engine.errors import PtxtrainError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_CGROUPS = Path("/sys/fs/cgroup")


def limit() -> int | None:
    """`$PTXTRAIN_MEMORY_LIMIT`: bytes that one device may hand out, such as 512M or 6G; None where it is not set.

    Raises:
        PtxtrainError: it is not a size.
    """
    text = os.environ.get("PTXTRAIN_MEMORY_LIMIT", "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise PtxtrainError(f"PTXTRAIN_MEMORY_LIMIT is {text!r}; it takes a size such as 512M or 6G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size(count: float) -> str:
    """Bytes in binary units: 512 B, 1.5 MiB, 23.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def host_free(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this process can still take before the system swaps or ends it; None where that cannot be told.

    What the kernel calls available, or what is left of the container's share where that is less; memory of the page cache that
    it would give back counts as left.
    """
    found = [size for size in (_available(proc / "meminfo"), _share_left(cgroups)) if size is not None]
    return min(found) if found else None


def _available(meminfo: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def _share_left(cgroups: Path) -> int | None:
    """Of the cgroup that a container sees as its own: version 2, then 1."""
    for most, used, stat, reclaimable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            top, taken = int((cgroups / most).read_text()), int((cgroups / used).read_text())
            match = re.search(rf"^{reclaimable} (\d+)$", (cgroups / stat).read_text(), re.MULTILINE)
        except (OSError, ValueError):  # ValueError: "max"
            continue
        return max(top - taken + (int(match[1]) if match else 0), 0)
    return None
