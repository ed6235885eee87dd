"""The native checks of barriers and warp collectives, and the clocks by which accesses are ordered.

`Checker.clock` advances at each synchronisation. `seen[w][r]` is the clock up to which warp w has seen what warp r did: a
barrier gives those it releases what those that came to it had seen, as vector clocks do. `seen[w][w]` is for lanes of one
warp among themselves.
"""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.code import Code, Library, Value
from ptxtrain.engine.ptxcpu.checked.state import WARPS, Checker, Entry, Watch, at
from ptxtrain.engine.ptxcpu.checked.view import SITE, checker_of, field, row
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS

_ROW = 8 * WARPS  # bytes


def _tick(c: Code, chk: Value) -> Value:
    now = field(c, chk, "clock") + 1
    c.store(now, chk, at(Checker, "clock"))
    return now


def _warps(c: Code, chk: Value) -> Value:
    return c.load("i32", field(c, chk, "watch", "ptr"), at(Watch, "warps")).to("i64")


def _raise_to(c: Code, target: Value, source: Value, warps: Value) -> None:
    """target[r] = max(target[r], source[r])"""
    with c.count(warps) as r:
        c.store(c.either("umax", c.load("i64", target, r * 8), c.load("i64", source, r * 8)), target, r * 8)


def _seen(chk: Value, warp: Value) -> Value:
    return chk + at(Checker, "seen") + warp.to("i64") * _ROW


def _meeting(chk: Value, number: Value) -> Value:
    return chk + at(Checker, "barriers") + number.to("i64") * _ROW


def _bounds(c: Code, chk: Value, warp: Value, warps: Value) -> None:
    """Make `low` and `high` of a warp anew."""
    seen = _seen(chk, warp)
    own = c.load("i64", seen, warp.to("i64") * 8)
    low, high = c.var(own), c.var(c.i64(0))
    with c.count(warps) as r:
        one = c.load("i64", seen, r * 8)
        low.set(c.either("umin", low.get(), one))
        high.set(c.either("umax", high.get(), r.is_(warp.to("i64")).pick(0, one)))
    c.store(low.get(), row(c, chk, "low", warp))
    c.store(high.get(), row(c, chk, "high", warp))


def define_starts(library: Library) -> None:
    """`launch_start(cta)` and `block_start(cta, block)`."""
    with library.function("launch_start", ("ptr",), external=True) as (c, (cta,)):
        chk = checker_of(c, cta)
        c.store(field(c, chk, "epoch") + 1, chk, at(Checker, "epoch"))
    with library.function("block_start", ("ptr", "i64"), external=True) as (c, (cta, block)):
        chk = checker_of(c, cta)
        now, warps = _tick(c, chk), _warps(c, chk)
        c.store(block, chk, at(Checker, "block"))
        c.store(c.i64(0), chk, at(Checker, "fenced_globally"))
        c.store(c.i64(0), chk, at(Checker, "queued"))
        with c.count(warps) as w:
            for name in ("low", "high"):
                c.store(now, row(c, chk, name, w))
            for name in ("fenced", "exits", "rounds"):
                c.store(c.i64(0), row(c, chk, name, w))
            seen = _seen(chk, w)
            with c.count(warps) as r:
                c.store(now, seen, r * 8)
        c.fill(chk + at(Checker, "barriers"), 0, c.i64(_ROW * state.BARRIERS))
        # meeting, met, at and groups lie side by side.
        words = 4 * (3 * WARPS + state.THREADS)
        c.fill(chk + at(Checker, "meeting"), 0, c.i64(words))
        base = c.load("i64", cta, FIELDS["shared"])
        count = c.load("i32", cta, FIELDS["shared.bytes"]).to("i64")
        shared = chk + at(Checker, "shared")
        shadow = [c.load("i64", chk, at(Checker, "shadow") + 8 * i) for i in range(5)]
        c.store(shadow[0] - base, shared, at(Entry, "init"))
        for i, name in ((1, "writers"), (2, "readers")):
            c.store(shadow[i] - ((base >> 2) << 3), shared, at(Entry, name))
        for i, name in ((3, "byte_writers"), (4, "byte_readers")):
            c.store(shadow[i] - (base << 3), shared, at(Entry, name))
        c.fill(shadow[0].to("ptr"), 0, count)


def define_meetings(library: Library) -> None:
    """`arrive(cta, number, warp)`, `release(cta, number)` before the waiting warps go on, `leave(cta, warp)`."""
    with library.function("arrive", ("ptr", "i32", "i32"), external=True) as (c, (cta, number, warp)):
        chk = checker_of(c, cta)
        now, meeting = _tick(c, chk), _meeting(chk, number)
        _raise_to(c, meeting, _seen(chk, warp), _warps(c, chk))
        c.store(now, meeting, warp.to("i64") * 8)
    with library.function("release", ("ptr", "i32"), external=True) as (c, (cta, number)):
        chk = checker_of(c, cta)
        now, meeting, warps = _tick(c, chk), _meeting(chk, number), _warps(c, chk)
        waiting = number + 1
        states = cta + FIELDS["states"]
        with c.count(warps) as w, c.when(c.load("i32", states, w * 4).is_(waiting)):
            # Who waits has done nothing since it came.
            c.store(now, meeting, w * 8)
        with c.when(c.load("i32", cta + FIELDS["counts"], number.to("i64") * 4).is_(0)):
            _raise_to(c, meeting, chk + at(Checker, "exits"), warps)
        with c.count(warps) as w, c.when(c.load("i32", states, w * 4).is_(waiting)):
            _raise_to(c, _seen(chk, w), meeting, warps)
            _bounds(c, chk, w, warps)
        c.fill(meeting, 0, c.i64(_ROW))
    with library.function("leave", ("ptr", "i32"), external=True) as (c, (cta, warp)):
        chk = checker_of(c, cta)
        now, exits = _tick(c, chk), chk + at(Checker, "exits")
        _raise_to(c, exits, _seen(chk, warp), _warps(c, chk))
        c.store(now, exits, warp.to("i64") * 8)


def _fail(c: Code, cta: Value, kind: int, site: Value, warp: Value, lanes: Value, other: Value) -> None:
    given = (cta, c.i32(kind), site, warp, c.trailing_zeros(lanes) & 31, c.i64(0), other.to("i64"), c.i32(0))
    c.give(c.call("report", *given))


def define_fail(library: Library) -> None:
    """`fail(cta, warp, kind, lanes, site, other)`: a finding that the kernel's own code made."""
    parameters = ("ptr", "i32", "i32", "i32", "ptr", "i64")
    with library.function("fail", parameters, external=True) as (c, (cta, warp, kind, lanes, site, other)):
        given = (cta, kind, site, warp, c.trailing_zeros(lanes) & 31, c.i64(0), other, c.i32(0))
        c.give(c.call("report", *given))


def define_barrier(library: Library) -> None:
    """`barrier(cta, warp, here, alive, number, count, site)`: before a warp comes to a barrier of its block."""
    parameters = ("ptr", "i32", "i32", "i32", "i32", "i32", "ptr")
    with library.function("barrier", parameters, external=True) as (c, arguments):
        cta, warp, here, alive, number, count, site = arguments
        chk = checker_of(c, cta)
        watch = field(c, chk, "watch", "ptr")
        missing = alive & ~here
        with c.when(missing.is_not(0)):
            _fail(c, cta, state.DIVERGENT_BARRIER, site, warp, here, missing)
        _still_waiting(c, cta, chk, warp, alive, site)
        with c.when(number >= state.BARRIERS):
            _fail(c, cta, state.BARRIER_NUMBER, site, warp, here, number)
        threads = c.load("i32", watch, at(Watch, "warps")) << 5
        with c.when((count & 31).is_not(0) | (count > threads)):
            _fail(c, cta, state.BARRIER_COUNT, site, warp, here, count)
        c.store(c.load("i32", site, SITE["index"]) + 1, chk + at(Checker, "at"), warp.to("i64") * 4)


def _still_waiting(c: Code, cta: Value, chk: Value, warp: Value, alive: Value, site: Value) -> None:
    met = c.load("i32", chk + at(Checker, "met"), warp.to("i64") * 4)
    expected = c.load("i32", chk + at(Checker, "meeting"), warp.to("i64") * 4)
    absent = expected & alive & ~met
    with c.when(met.is_not(0) & absent.is_not(0)):
        _fail(c, cta, state.MISSING_AT_WARP_BARRIER, site, warp, absent, met)


def define_warp(library: Library) -> None:
    """What lanes of one warp do together: `warp_barrier`, `members`, `whole_warp`, and `fence`, `turn`."""
    five = ("ptr", "i32", "i32", "i32", "i32", "ptr")
    with library.function("warp_barrier", five, external=True) as (c, (cta, warp, here, members, alive, site)):
        chk = checker_of(c, cta)
        strangers = here & ~members
        with c.when(strangers.is_not(0)):
            _fail(c, cta, state.NOT_MEMBER, site, warp, strangers, members)
        place = warp.to("i64") * 4
        met = c.load("i32", chk + at(Checker, "met"), place) | here
        c.store(met, chk + at(Checker, "met"), place)
        c.store(members, chk + at(Checker, "meeting"), place)
        with c.when((members & alive & ~met).is_(0)):
            c.store(c.i32(0), chk + at(Checker, "met"), place)
            c.store(_tick(c, chk), _seen(chk, warp), warp.to("i64") * 8)
    with library.function("members", five, external=True) as (c, (cta, warp, here, members, alive, site)):
        strangers = here & ~members
        with c.when(strangers.is_not(0)):
            _fail(c, cta, state.NOT_MEMBER, site, warp, strangers, members)
        absent = members & alive & ~here
        with c.when(absent.is_not(0)):
            _fail(c, cta, state.INACTIVE_MEMBER, site, warp, here, absent)
    with library.function("whole_warp", ("ptr", "i32", "i32", "ptr"), external=True) as (c, (cta, warp, here, site)):
        missing = ~here
        with c.when(missing.is_not(0)):
            _fail(c, cta, state.PARTIAL_WARP, site, warp, here, missing)
    with library.function("fence", ("ptr", "i32", "i32"), external=True) as (c, (cta, warp, globally)):
        chk = checker_of(c, cta)
        c.store(_tick(c, chk), row(c, chk, "fenced", warp))
        with c.when(globally.is_not(0)):
            c.store(c.i64(1), chk, at(Checker, "fenced_globally"))
    with library.function("turn", ("ptr", "i32", "i32", "ptr"), external=True) as (c, (cta, warp, here, site)):
        chk = checker_of(c, cta)
        place = row(c, chk, "rounds", warp)
        rounds = c.load("i64", place) + 1
        c.store(rounds, place)
        with c.when(rounds > field(c, chk, "limit")):
            _fail(c, cta, state.NO_PROGRESS, site, warp, here, rounds)
