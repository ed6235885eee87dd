"""The native checks of memory accesses: bounds, alignment, space, initialisation, and races.

Each instruction calls one of `access_uniform` (one address), `access_run` (neighbouring lanes at neighbouring addresses)
and `access_lanes` (any). All come down to spans: bytes of consecutive lanes. A span is first looked at as a whole, in
loops over words that LLVM vectorises; where anything is unusual, its lanes are looked at one after another and byte by
byte, which is exact and says who did what. A span that passes as a whole leaves the same shadow behind.

When two accesses of one byte are in conflict:

- shared memory: by different threads, at least one a write, not both strong, and not ordered by a barrier. Each warp
  carries the clocks up to which it has seen the others (`Checker.seen`), as barriers, their named and counted forms and
  `bar.arrive` order them; `bar.warp.sync` orders lanes of a warp. A write of one instruction that leaves what is there
  (all threads setting the same flag) is no conflict.
- global memory: by different blocks of a launch. Blocks that have fenced at device scope are taken to synchronise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.code import Code, Library, Value
from ptxtrain.engine.ptxcpu.checked.state import Entry, Records, at
from ptxtrain.engine.ptxcpu.checked.view import (
    SITE,
    View,
    byte_records,
    field,
    init_bytes,
    kind_bit,
    resolve,
    word_records,
)
from ptxtrain.engine.ptxcpu.lower.emitter import vec

Report: TypeAlias = Callable[..., None]


CHUNK = 8  # words that the quick checks take at once

# Init bytes of a word: all of them written; the bit that says that a copy is under way.
_ALL_WRITTEN, _ANY_PENDING = 0x01010101, 0x02020202


def define_quick(library: Library, name: str, records: Records) -> None:
    """`name(chk, warp, site, entry, address, count, who, shift)`: whole words; 1 where a closer look is needed.

    Lane i of the span is `who + i`, its bytes 1 << shift. Words that pass are entered into the records at once: what is
    looked at again afterwards finds the thread's own records there, which changes nothing.
    """
    parameters = ("ptr", "i32", "ptr", "ptr", "i64", "i64", "i64", "i64")
    with library.function(name, parameters) as (c, (chk, warp, site, entry, address, count, who, shift)):
        view = View(c, chk, warp, records)
        kind = c.load("i32", site, SITE["kind"])
        init = init_bytes(c, entry, address)
        writers, readers = (word_records(c, entry, n, address) for n in ("writers", "readers"))
        stamp = view.stamp(c.load("i32", site, SITE["index"]), kind_bit(kind, state.STRONG))
        needs = (kind & (state.READ | state.NO_INIT)).is_(state.READ)
        mask, expected = needs.pick(c.i32(-1), c.i32(_ANY_PENDING)), needs.pick(c.i32(_ALL_WRITTEN), c.i32(0))
        words = count >> 2
        bad = c.var(c.i32(0))

        def look(i: Value, lanes: int, writes: bool) -> None:
            thread = ((c.numbers(i, lanes) << 2) >> shift) + who
            shadow = c.load(vec("i32", lanes), init, i << 2)
            writer, reader = (c.load(vec("i64", lanes), p, i << 3) for p in (writers, readers))
            wrong = ((shadow & mask) ^ expected).is_not(0) | ~view.settled(writer, thread)
            if writes:
                wrong = wrong | ~view.settled(reader, thread)
                c.store(wrong.pick(writer, view.stamped(stamp, thread)), writers, i << 3)
            else:
                split = view.mixed(reader) & view.alive(reader)
                wrong = wrong | split
                c.store(wrong.pick(reader, view.merge(reader, thread, stamp)), readers, i << 3)
            bad.set(bad.get() | wrong.any().to("i32"))

        def all_words(writes: bool) -> None:
            whole = words & ~(CHUNK - 1)
            index = c.var(c.i64(0))
            for lanes, end in ((CHUNK, whole), (1, words)):
                with c.loop(lambda end=end: index.get() < end):  # type: ignore[misc]
                    look(index.get(), lanes, writes)
                    index.set(index.get() + lanes)

        c.choose(kind_bit(kind, state.WRITE), lambda: all_words(True), lambda: all_words(False))
        with c.when(bad.get().is_not(0)):
            c.give(1)
        with c.when(kind_bit(kind, state.WRITE)):
            c.fill(init, state.WRITTEN, count)


def define_exact(library: Library, name: str, records: Records) -> None:
    """`name(cta, chk, warp, site, entry, address, count, who, lane)`: one lane's bytes, one by one; 1 if found."""
    parameters = ("ptr", "ptr", "i32", "ptr", "ptr", "i64", "i64", "i64", "i32")
    with library.function(name, parameters) as (c, (cta, chk, warp, site, entry, address, count, who, lane)):
        view = View(c, chk, warp, records)
        kind = c.load("i32", site, SITE["kind"])
        reads, writes = kind_bit(kind, state.READ), kind_bit(kind, state.WRITE)
        strong = kind_bit(kind, state.STRONG)

        def report(what: int, where: Value, other: Value | None = None) -> None:
            given = (cta, c.i32(what), site, warp, lane, where, other or c.i64(0), count.to("i32"))
            c.give(c.call("report", *given))

        def record_of(which: str, where: Value) -> Value:
            whole = c.load("i64", word_records(c, entry, which, where))
            found = c.var(whole)
            with c.when(view.mixed(whole)):
                found.set(c.load("i64", byte_records(c, entry, which, where)))
            return found.get()

        with c.count(count) as i:
            where = address + i
            shadow = c.load("i8", init_bytes(c, entry, where))
            with c.when(shadow.is_(state.PENDING_COPY)):
                report(state.PENDING, where)
            needs = (kind & (state.READ | state.NO_INIT)).is_(state.READ)
            with c.when(needs & shadow.is_(state.UNWRITTEN)):
                report(state.UNINITIALISED, where)
            writer = record_of("writers", where)
            with c.when(view.conflict(writer, who, strong)):
                with c.when(reads):
                    report(state.READ_AFTER_WRITE, where, writer)
                if view.shared:
                    _excuse(c, chk, site, view, writer, where, i, lane, report)
                else:
                    report(state.WRITE_AFTER_WRITE, where, writer)
            with c.when(writes):
                reader = record_of("readers", where)
                with c.when(view.conflict(reader, who, strong)):
                    report(state.WRITE_AFTER_READ, where, reader)
        stamp = view.stamp(c.load("i32", site, SITE["index"]), strong)
        c.choose(
            writes,
            lambda: _put(c, view, entry, "writers", address, count, who, stamp),
            lambda: _put(c, view, entry, "readers", address, count, who, stamp),
        )
        with c.when(writes):
            c.fill(init_bytes(c, entry, address), state.WRITTEN, count)


def _excuse(
    c: Code, chk: Value, site: Value, view: View, writer: Value, where: Value, i: Value, lane: Value, report: Report
) -> None:
    """A write over another thread's write: fine where the same instruction stores the same byte; else it is reported."""
    values = field(c, chk, "values", "ptr")
    same_site = view.site(writer).is_(c.load("i32", site, SITE["index"]).to("i64"))
    harmless = c.var(c.i32(0))
    with c.when(same_site & values.is_not(c.null())):
        mine = value_byte(c, site, values, lane.to("i64"), i)
        addresses = field(c, chk, "addresses", "ptr")
        other = view.who(writer)
        in_warp = (other < state.ONE_WARP) & (other >> 5).is_(view.warp)
        partner = other & 31
        with c.when(in_warp & addresses.is_not(c.null()) & (partner < lane.to("i64"))):
            there = c.load("i64", addresses, partner * 8)
            size = c.load("i32", site, SITE["size"]).to("i64")
            acts = ((field(c, chk, "mask") >> partner) & 1).is_not(0)
            with c.when(acts & (where - there < size)):
                # Both lanes store to this byte now.
                with c.when(value_byte(c, site, values, partner, where - there).is_not(mine)):
                    report(state.SAME_STORE, where, partner)
                harmless.set(1)
        with c.when(harmless.get().is_(0) & c.load("i8", where.to("ptr")).is_(mine)):
            harmless.set(1)
    with c.when(harmless.get().is_(0)):
        report(state.WRITE_AFTER_WRITE, where, writer)


def value_byte(c: Code, site: Value, values: Value, lane: Value, i: Value) -> Value:
    """Byte i of what a lane stores; values lie element by element, 32 lanes each."""
    element = c.load("i32", site, SITE["element"]).to("i64")
    number = c.op("i64", f"udiv i64 {i.name}, {element.name}")
    return c.load("i8", values, number * element * 32 + lane * element + (i - number * element))


def _put(c: Code, view: View, entry: Value, which: str, address: Value, count: Value, who: Value, stamp: Value) -> None:
    """Enter an access into the records: whole words where it covers them, else byte by byte."""
    done = c.var(c.i64(0))
    fresh = view.stamped(stamp, who)
    mixed = (stamp >> view.records.when_shift << view.records.when_shift) | view.records.mixed
    is_read = which == "readers"
    with c.loop(lambda: done.get() < count):
        where = address + done.get()
        word = word_records(c, entry, which, where)
        old = c.load("i64", word)
        split = view.mixed(old) & view.alive(old)
        whole = (where & 3).is_(0) & (count - done.get() >= 4)
        # A writer of a whole word supersedes its bytes' records; a reader must not hide other readers of single bytes.
        simple = (whole & ~split) if is_read else whole

        def enter_word(word: Value = word, old: Value = old) -> None:
            c.store(view.merge(old, who, stamp) if is_read else fresh, word)
            done.set(done.get() + 4)

        def enter_byte(word: Value = word, old: Value = old, where: Value = where) -> None:
            with c.when(~view.mixed(old)):
                first = byte_records(c, entry, which, where & ~3)
                for i in range(4):
                    c.store(old, first, 8 * i)
            c.store(mixed, word)
            place = byte_records(c, entry, which, where)
            c.store(view.merge(c.load("i64", place), who, stamp) if is_read else fresh, place)
            done.set(done.get() + 1)

        c.choose(simple, enter_word, enter_byte)


def define_single(library: Library) -> None:
    """`single(cta, chk, warp, site, address, count, who, lane)`: one lane's access, wherever it goes; 1 if found."""
    parameters = ("ptr", "ptr", "i32", "ptr", "i64", "i64", "i64", "i32")
    with library.function("single", parameters) as (c, (cta, chk, warp, site, address, count, who, lane)):

        def report(what: int) -> None:
            given = (cta, c.i32(what), site, warp, lane, address, c.i64(0), count.to("i32"))
            c.give(c.call("report", *given))

        align = c.load("i32", site, SITE["align"]).to("i64")
        thread = (warp << 5) + lane
        found = c.call("resolve", cta, chk, site, address, count, thread)
        with c.when(found.is_(0)):
            report(state.BOUNDS)
        with c.when((address & (align - 1)).is_not(0)):
            report(state.MISALIGNED)
        entry = found.to("ptr")
        flags = c.load("i64", entry, at(Entry, "flags"))
        kind, space = c.load("i32", site, SITE["kind"]), c.load("i32", site, SITE["space"])
        with c.when(kind_bit(kind, state.WRITE) & (flags & state.WRITABLE).is_(0)):
            report(state.READ_ONLY)
        is_const = (flags & state.IS_CONST).is_not(0)
        with c.when((space.is_(state.CONST) & ~is_const) | (space.is_(state.GLOBAL) & is_const)):
            report(state.WRONG_SPACE)
        with c.when((flags & state.IS_LOCAL).is_not(0)):
            c.give(0)
        given = (cta, chk, warp, site, entry, address, count, who, lane)
        with c.when((flags & state.IS_SHARED).is_not(0)):
            c.give(c.call("exact_shared", *given))
        c.give(c.call("exact_global", *given))


def define_span(library: Library) -> None:
    """`span(cta, chk, warp, site, address, count, lane, who, step)`: consecutive lanes' bytes; 1 if found.

    The lanes from `lane` on have 1 << shift bytes each (the site's), and are `who`, `who + step`, …; step is 0 or 1.
    """
    parameters = ("ptr", "ptr", "i32", "ptr", "i64", "i64", "i32", "i64", "i64")
    with library.function("span", parameters) as (c, (cta, chk, warp, site, address, count, lane, who, step)):
        align = c.load("i32", site, SITE["align"]).to("i64")
        kind, space = c.load("i32", site, SITE["kind"]), c.load("i32", site, SITE["space"])
        shift = c.load("i32", site, SITE["shift"]).to("i64")
        found = resolve(c, cta, chk, site, address, count, (warp << 5) + lane)
        with c.when(found.is_not(0) & (address & (align - 1)).is_(0)):
            entry = found.to("ptr")
            flags = c.load("i64", entry, at(Entry, "flags"))
            is_const = (flags & state.IS_CONST).is_not(0)
            wrong = (space.is_(state.CONST) & ~is_const) | (space.is_(state.GLOBAL) & is_const)
            refused = kind_bit(kind, state.WRITE) & (flags & state.WRITABLE).is_(0)
            with c.when(~(wrong | refused)):
                with c.when((flags & state.IS_LOCAL).is_not(0)):
                    c.give(0)
                with c.when((flags & state.IS_SHARED).is_not(0)):
                    whole = ((address | count) & 3).is_(0) & ((shift >= 2) | step.is_(0))
                    with c.when(whole):
                        per_who = step.is_(0).pick(c.i64(63), shift)
                        given = (chk, warp, site, entry, address, count, who, per_who)
                        with c.when(c.call("quick_shared", *given).is_(0)):
                            c.give(0)
                with c.when((flags & state.IS_SHARED).is_(0)):
                    _global_span(c, cta, chk, warp, site, entry, address, count, lane, shift)
        # Something is unusual: lane by lane.
        size = c.either("umin", count, c.load("i32", site, SITE["size"]).to("i64"))
        done = c.var(c.i64(0))
        with c.loop(lambda: done.get() < count):
            number = done.get() >> shift
            given = (
                *(cta, chk, warp, site, address + done.get(), size),
                *(who + number * step, lane + number.to("i32")),
            )
            with c.when(c.call("single", *given).is_not(0)):
                c.give(1)
            done.set(done.get() + size)


def _global_span(
    c: Code, cta: Value, chk: Value, warp: Value, site: Value, entry: Value, address: Value, count: Value, lane: Value,
    shift: Value,
) -> None:  # fmt: skip
    """The words of a span as a whole, its ragged ends byte by byte."""
    first, last = (address + 3) & ~3, (address + count) & ~3
    zero = c.i64(0)
    with c.when(first < last):
        given = (chk, warp, site, entry, first, last - first, zero, c.i64(63))
        with c.when(c.call("quick_global", *given).is_(0)):
            for start, end in ((address, first), (last, address + count)):
                with c.when(start < end):
                    at_lane = lane + ((start - address) >> shift).to("i32")
                    ends = (cta, chk, warp, site, entry, start, end - start, zero, at_lane)
                    with c.when(c.call("exact_global", *ends).is_not(0)):
                        c.give(1)
            c.give(0)
