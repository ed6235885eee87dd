"""From a native finding to one line: kernel, place in the PTX, block, thread, address, allocation, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.memory import Region, Table
from ptxtrain.engine.ptxcpu.checked.state import IN_GLOBAL, IN_SHARED, ONE_WARP, Finding
from ptxtrain.engine.ptxcpu.lower.checks import Checked, Site

Dim3 = tuple[int, int, int]

KINDS = {
    state.BOUNDS: "out of bounds",
    state.MISALIGNED: "misaligned",
    state.READ_ONLY: "read-only",
    state.WRONG_SPACE: "wrong space",
    state.UNINITIALISED: "uninitialised",
    state.PENDING: "copy pending",
    state.READ_AFTER_WRITE: "race",
    state.WRITE_AFTER_WRITE: "race",
    state.WRITE_AFTER_READ: "race",
    state.SAME_STORE: "race",
    state.DIVERGENT_BARRIER: "divergent barrier",
    state.BARRIER_COUNT: "barrier count",
    state.BARRIER_NUMBER: "barrier number",
    state.INACTIVE_SOURCE: "inactive lane",
    state.INACTIVE_MEMBER: "inactive lane",
    state.NOT_MEMBER: "inactive lane",
    state.PARTIAL_WARP: "inactive lane",
    state.MISSING_AT_WARP_BARRIER: "divergent barrier",
    state.NO_PROGRESS: "hung",
    state.LANE_OUTSIDE: "inactive lane",
}


NEAR, FAR = (
    64 << 10,
    1 << 30,
)  # bytes within which a miss is told as a distance, before and after freed memory is looked at


class CheckError(DeviceError):
    """A check of the checked mode failed. Exit code 1: the device is well, the kernel is not.

    Attributes:
        kind: what was found, a value of `KINDS` or "deadlock".
        kernel, line, text: the place in the PTX.
        block, thread: their indices.
        address: the host's (global) or an offset (shared, local); None where no memory is concerned.
        allocation, offset, size: the allocation (or variable) that is meant, where in it, and its bytes, if known.
        other_line: of the other access of a race.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.kind, self.kernel, self.line, self.text = "", "", 0, ""
        self.block: Dim3 = (0, 0, 0)
        self.thread: Dim3 = (0, 0, 0)
        self.address: int | None = None
        self.allocation: str | None = None
        self.offset: int | None = None
        self.size: int | None = None
        self.other_line: int | None = None


@dataclass(slots=True)
class Scene:
    """The launch that a finding is of."""

    kernel: str
    path: Path
    checked: Checked
    grid: Dim3
    dynamic: int
    arguments: list[tuple[int, str]]
    table: Table

    def thread(self, linear: int) -> Dim3:
        x, y, _ = self.checked.block
        return linear % x, linear // x % y, linear // (x * y)

    def block(self, linear: int) -> Dim3:
        x, y, _ = self.grid
        return linear % x, linear // x % y, linear // (x * y)

    def site(self, index: int) -> Site:
        return self.checked.sites[index]

    def place(self, site: Site) -> str:
        return f"line {site.ins.span.line}, `{site.ins.text};`"

    def named(self, region: Region) -> str:
        """A region's own name, or the parameters that point to it."""
        if region.name:
            return region.name
        names = [
            name for pointer, name in self.arguments if region.start <= pointer < max(region.end, region.start + 1)
        ]
        return " and ".join(dict.fromkeys(names)) or "an allocation that no argument points to"


def bracket(index: Sequence[int]) -> str:
    return f"({', '.join(map(str, index))})"


def _finish(scene: Scene, finding: Finding, what: str) -> CheckError:
    site = scene.site(finding.site)
    block: Dim3 = (finding.ctaid[0], finding.ctaid[1], finding.ctaid[2])
    thread = scene.thread(finding.warp * 32 + finding.lane)
    kind = KINDS[finding.kind]
    error = CheckError(
        f"{scene.kernel} ({scene.path.name}:{site.ins.span.line}): {kind}: `{site.ins.text};` in block {bracket(block)}, "
        f"thread {bracket(thread)} {what}"
    )
    error.kind, error.kernel, error.line, error.text = kind, scene.kernel, site.ins.span.line, site.ins.text
    error.block, error.thread = block, thread
    return error


def describe(finding: Finding, scene: Scene) -> CheckError:
    """The error of a finding."""
    match finding.kind:
        case state.BOUNDS:
            return _bounds(finding, scene)
        case state.MISALIGNED:
            what = f"{{verb}} at {{where}}, which is no multiple of {scene.site(finding.site).size}"
        case state.READ_ONLY:
            what = "writes at {where}, which is read-only"
        case state.WRONG_SPACE:
            what = "{verb} at {where}, which is not in the state space that the instruction names"
        case state.UNINITIALISED:
            what = "reads {where}, which nothing has written"
        case state.PENDING:
            what = "{verb} at {where}, where a cp.async is under way that its thread has not waited for"
        case state.READ_AFTER_WRITE | state.WRITE_AFTER_WRITE | state.WRITE_AFTER_READ:
            return _race(finding, scene)
        case state.SAME_STORE:
            other = scene.thread(finding.warp * 32 + finding.other)
            what = f"writes {{where}}, where thread {bracket(other)} stores another value by the same instruction"
        case _:
            return _finish(scene, finding, _collective(finding, scene))
    return _of_memory(finding, scene, what)


def _of_memory(finding: Finding, scene: Scene, what: str) -> CheckError:
    site = scene.site(finding.site)
    spot = _spot(finding, scene)
    error = _finish(scene, finding, what.format(verb=_verb(site, finding.bytes), where=spot.text))
    error.address, error.allocation, error.offset, error.size = spot.address, spot.allocation, spot.offset, spot.size
    return error


def _verb(site: Site, count: int) -> str:
    kind = site.kind & (state.READ | state.WRITE)
    verb = {state.READ: "reads", state.WRITE: "writes"}.get(kind, "updates")
    return f"{verb} {count} byte{'s' if count != 1 else ''}"


@dataclass(slots=True)
class _Spot:
    """Where a finding's address is: the text, and the parts."""

    text: str
    address: int
    allocation: str | None = None
    offset: int | None = None
    size: int | None = None


def _windows(finding: Finding, scene: Scene) -> tuple[str, int]:
    """The space that an address lies in, and its offset there; global addresses as they are."""
    site, address = scene.site(finding.site), finding.address
    shared, local = address - finding.shared_base, address - finding.local_base
    lane_bytes = scene.checked.local_bytes
    if site.space == "shared" or 0 <= shared < finding.shared_bytes:
        return "shared", shared
    if site.space == "local" or 0 <= local < lane_bytes * 32 * scene.checked.warps:
        return "local", local - (finding.warp * 32 + finding.lane) * lane_bytes
    return "global", address


def _variables(space: str, scene: Scene) -> list[tuple[int, int, str]]:
    if space == "local":
        return scene.checked.local
    found = list(scene.checked.shared)
    if scene.dynamic:
        start = scene.checked.shared_bytes
        found.append((start, start + scene.dynamic, "dynamic shared memory"))
    return found


def _spot(finding: Finding, scene: Scene) -> _Spot:
    """The place of an address that is inside an allocation."""
    space, address = _windows(finding, scene)
    if space != "global":
        for start, end, name in _variables(space, scene):
            if start <= address < end:
                text = f"byte {address - start:,} of {name} ({end - start:,} bytes, at {space} offset {address:#x})"
                return _Spot(text, address, name, address - start, end - start)
        return _Spot(f"{space} offset {address:,}", address)
    region = scene.table.find(address)
    if region is None:
        return _Spot(f"{address:#x}", address)
    name, offset = scene.named(region), address - region.start
    return _Spot(
        f"byte {offset:,} of {name} ({region.nbytes:,} bytes, at {address:#x})", address, name, offset, region.nbytes
    )


def _bounds(finding: Finding, scene: Scene) -> CheckError:
    site = scene.site(finding.site)
    space, address = _windows(finding, scene)
    spot, kind = _outside(finding, scene, site, space, address)
    error = _finish(scene, finding, f"{_verb(site, finding.bytes)} {spot.text}")
    if kind is not None:
        error.args = (error.args[0].replace(": out of bounds: ", f": {kind}: ", 1),)
        error.kind = kind
    error.address, error.allocation, error.offset, error.size = spot.address, spot.allocation, spot.offset, spot.size
    return error


def _outside(finding: Finding, scene: Scene, site: Site, space: str, address: int) -> tuple[_Spot, str | None]:
    """The place of an address that is in no allocation, and "wrong space" where it is in one of another space."""
    count = finding.bytes
    if space == "global" or site.space in ("global", "const"):
        if space != "global":
            text = f"at {finding.address:#x}, which lies in {space} memory"
            return _Spot(text, finding.address), "wrong space"
        region = scene.table.find(address) or scene.table.nearest(address)
        near = region is not None and -NEAR < address - region.start < region.nbytes + NEAR
        freed = next((f for f in reversed(scene.table.freed) if f[0] <= address < f[0] + f[1]), None)
        if freed is not None and not near:
            text = f"at {address:#x}, in an allocation of {freed[1]:,} bytes that has been freed"
            return _Spot(text, address, freed[2] or None, address - freed[0], freed[1]), None
        if region is None or not -FAR < address - region.start < region.nbytes + FAR:
            return _Spot(f"at {address:#x}, which is in no allocation", address), None
        text, offset = _relation(address, count, region.start, region.end, scene.named(region))
        return _Spot(f"at {address:#x}, {text}", address, scene.named(region), offset, region.nbytes), None
    # An offset into a window.
    region = scene.table.find(address % (1 << 64))
    in_window = finding.shared_base <= address % (1 << 64) < finding.shared_base + finding.shared_bytes
    if region is not None or in_window:
        where = "shared memory as a generic address" if in_window else f"{scene.named(region)} in global memory"  # type: ignore[arg-type]
        text = f"at {address % (1 << 64):#x}, which is an address in {where}"
        return _Spot(text, address), "wrong space"
    variables = _variables(space, scene)
    if not variables:
        return _Spot(f"at {space} offset {address:,}, and the kernel has no {space} memory", address), None
    start, end, name = min(variables, key=lambda v: min(abs(address - v[0]), abs(address - v[1])))
    text, offset = _relation(address, count, start, end, name)
    return _Spot(f"at {space} offset {address:,}, {text}", address, name, offset, end - start), None


def _relation(address: int, count: int, start: int, end: int, name: str) -> tuple[str, int]:
    size = f"{end - start:,} bytes"
    if address >= end:
        how = f"{address - end:,} bytes past the end of" if address > end else "just past the end of"
    elif address >= start:
        how = f"{address + count - end:,} of them past the end of"
    else:
        how = f"{start - address:,} bytes before the start of"
    return f"{how} {name} ({size})", address - start


def _race(finding: Finding, scene: Scene) -> CheckError:
    space, _ = _windows(finding, scene)
    records = IN_SHARED if space == "shared" else IN_GLOBAL
    who, _, number = records.unpack(finding.other)
    if space == "shared":
        if who < ONE_WARP:
            other = f"thread {bracket(scene.thread(who))}"
        elif who < ONE_WARP + 32:
            other = f"several threads of warp {who - ONE_WARP}"
        else:
            other = "threads of several warps"
        missing = "no barrier between"
    else:
        other = "several blocks" if who >= state.BLOCK_CODES else f"block {bracket(scene.block(who))}"
        missing = "blocks of one launch are not ordered"
    known = number < len(scene.checked.sites) and number < records.last_site
    site = scene.site(number) if known else None
    at = f" in {scene.place(site)}" if site else ""
    mine, theirs = {
        state.READ_AFTER_WRITE: ("reads", "wrote"),
        state.WRITE_AFTER_WRITE: ("writes", "wrote"),
        state.WRITE_AFTER_READ: ("writes", "read"),
    }[finding.kind]
    error = _of_memory(
        finding, scene, f"{mine} {{where}}, which {other} {theirs}{at.replace('{', '{{').replace('}', '}}')}: {missing}"
    )
    error.other_line = site.ins.span.line if site else None
    return error


def _lanes(mask: int) -> str:
    lanes = [i for i in range(32) if mask >> i & 1]
    shown = ", ".join(map(str, lanes[:6])) + (", …" if len(lanes) > 6 else "")
    return f"lane{'s' if len(lanes) > 1 else ''} {shown}"


def _collective(finding: Finding, scene: Scene) -> str:
    other = finding.other
    match finding.kind:
        case state.DIVERGENT_BARRIER:
            return f"comes to a barrier without {_lanes(other)} of its warp"
        case state.BARRIER_COUNT:
            threads = 32 * scene.checked.warps
            return f"waits for {other} threads; the count must be a multiple of 32 up to the block's {threads}"
        case state.BARRIER_NUMBER:
            return f"names barrier {other}; there are 0 to 15"
        case state.INACTIVE_SOURCE:
            return f"takes the value of lane {other}, which is not active or not in the mask"
        case state.LANE_OUTSIDE:
            return "asks for a lane outside of its segment, and does not ask whether it got one"
        case state.INACTIVE_MEMBER:
            return f"names {_lanes(other)} in its mask, which do not come to this instruction"
        case state.NOT_MEMBER:
            return f"is not in the instruction's own mask {other:#010x}"
        case state.PARTIAL_WARP:
            return f"needs the whole warp, and {_lanes(other)} are not there"
        case state.MISSING_AT_WARP_BARRIER:
            return "never came to the bar.warp.sync that other lanes of its warp wait at"
        case _:
            return f"has gone round its loops {other:,} times: the kernel hangs"


def deadlock(at: Sequence[int], scene: Scene) -> CheckError:
    """The error of a block whose warps wait for each other; `at` is each warp's last barrier as a site + 1, or 0."""
    places: dict[str, list[int]] = {}
    for warp in range(scene.checked.warps):
        where = f"at line {scene.site(at[warp] - 1).ins.span.line}" if at[warp] else "at no barrier"
        places.setdefault(where, []).append(warp)
    told = "; ".join(f"warp{'s' if len(w) > 1 else ''} {', '.join(map(str, w))} {p}" for p, w in places.items())
    error = CheckError(
        f"{scene.kernel} ({scene.path.name}): deadlock: warps wait at different barriers, or some left before one; "
        f"last seen: {told}"
    )
    error.kind, error.kernel = "deadlock", scene.kernel
    first = next((a for a in at[: scene.checked.warps] if a), 0)
    if first:
        error.line, error.text = scene.site(first - 1).ins.span.line, scene.site(first - 1).ins.text
    return error
