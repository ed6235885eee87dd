"""The checks that kernels call for an access: at one address, at neighbouring ones, at any; all cut it into spans."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.access import value_byte
from ptxtrain.engine.ptxcpu.checked.code import Code, Library, Value
from ptxtrain.engine.ptxcpu.checked.state import Checker, at
from ptxtrain.engine.ptxcpu.checked.view import SITE, checker_of, kind_bit
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS


def _forget(c: Code, chk: Value, addresses: Value, values: Value, mask: Value) -> None:
    c.store(addresses, chk, at(Checker, "addresses"))
    c.store(values, chk, at(Checker, "values"))
    c.store(mask.to("i64"), chk, at(Checker, "mask"))


def define_uniform(library: Library) -> None:
    """`access_uniform(cta, warp, address, mask, site, values)`: all lanes at one address."""
    parameters = ("ptr", "i32", "i64", "i32", "ptr", "ptr")
    with library.function("access_uniform", parameters, external=True) as (c, arguments):
        cta, warp, address, mask, site, values = arguments
        chk = checker_of(c, cta)
        _forget(c, chk, c.null(), values, mask)
        size = c.load("i32", site, SITE["size"]).to("i64")
        kind = c.load("i32", site, SITE["kind"])
        last = (c.i32(31) - c.leading_zeros(mask)) & 31
        first = c.trailing_zeros(mask) & 31
        alone = last.is_(first)
        only_writes = (kind & (state.READ | state.WRITE)).is_(state.WRITE)
        with c.when(only_writes & ~alone & values.is_not(c.null())):
            inside = address - c.load("i64", cta, FIELDS["shared"])
            shared = c.load("i32", site, SITE["space"]).is_(state.SHARED)
            with c.when(shared | (inside < c.load("i32", cta, FIELDS["shared.bytes"]).to("i64"))):
                _compare_values(c, cta, warp, address, mask, site, values, size, last)
        own = (warp.to("i64") << 5) + last.to("i64")
        who = (alone | only_writes).pick(own, warp.to("i64") + state.ONE_WARP)
        lane = only_writes.pick(last, first)
        c.give(c.call("span", cta, chk, warp, site, address, size, lane, who, c.i64(0)))


def _compare_values(
    c: Code, cta: Value, warp: Value, address: Value, mask: Value, site: Value, values: Value, size: Value, last: Value
) -> None:
    """Lanes that store to one address must store one value."""
    left = c.var(mask)
    with c.loop(lambda: left.get().is_not(0)):
        lane = c.trailing_zeros(left.get())
        left.set(left.get() & (left.get() - 1))
        with c.count(size) as i:
            mine = value_byte(c, site, values, lane.to("i64"), i)
            theirs = value_byte(c, site, values, last.to("i64"), i)
            with c.when(mine.is_not(theirs)):
                given = (cta, c.i32(state.SAME_STORE), site, warp, lane, address, last.to("i64"), size.to("i32"))
                c.give(c.call("report", *given))


def define_run(library: Library) -> None:
    """`access_run(cta, warp, address, mask, site, values)`: lane l at address + l * size."""
    parameters = ("ptr", "i32", "i64", "i32", "ptr", "ptr")
    with library.function("access_run", parameters, external=True) as (c, arguments):
        cta, warp, address, mask, site, values = arguments
        chk = checker_of(c, cta)
        _forget(c, chk, c.null(), values, mask)
        shift = c.load("i32", site, SITE["shift"]).to("i64")
        first_thread = warp.to("i64") << 5
        left = c.var(mask.to("i64"))
        with c.loop(lambda: left.get().is_not(0)):
            start = c.trailing_zeros(left.get())
            length = c.trailing_zeros(~(left.get() >> start))
            given = (
                *(cta, chk, warp, site, address + (start << shift), length << shift),
                *(start.to("i32"), first_thread + start, c.i64(1)),
            )
            with c.when(c.call("span", *given).is_not(0)):
                c.give(1)
            left.set(left.get() & ~(((c.i64(1) << length) - 1) << start))


def define_lanes(library: Library) -> None:
    """`access_lanes(cta, warp, addresses, mask, site, values)`: 32 addresses in memory, joined to spans where they can be."""
    parameters = ("ptr", "i32", "ptr", "i32", "ptr", "ptr")
    with library.function("access_lanes", parameters, external=True) as (c, arguments):
        cta, warp, addresses, mask, site, values = arguments
        chk = checker_of(c, cta)
        _forget(c, chk, addresses, values, mask)
        size = c.load("i32", site, SITE["size"]).to("i64")
        kind = c.load("i32", site, SITE["kind"])
        together = kind_bit(kind, state.COLLECTIVE)
        step = together.pick(c.i64(0), c.i64(1))
        left = c.var(mask.to("i64"))
        with c.loop(lambda: left.get().is_not(0)):
            start = c.trailing_zeros(left.get())
            address = c.load("i64", addresses, start * 8)
            length = c.var(c.i64(1))

            def goes_on(start: Value = start, address: Value = address) -> Value:
                following = start + length.get()
                acts = ((left.get() >> following) & 1).is_not(0) & (following < 32)
                index = acts.pick(following, start)
                return acts & c.load("i64", addresses, index * 8).is_(address + length.get() * size)

            with c.loop(goes_on):
                length.set(length.get() + 1)
            own = (warp.to("i64") << 5) + start
            who = together.pick(warp.to("i64") + state.ONE_WARP, own)
            given = (
                *(cta, chk, warp, site, address, length.get() * size),
                *(start.to("i32"), who, step),
            )
            with c.when(c.call("span", *given).is_not(0)):
                c.give(1)
            left.set(left.get() & ~(((c.i64(1) << length.get()) - 1) << start))
