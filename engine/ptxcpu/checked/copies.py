"""cp.async at its latest: the target is poisoned when the copy is issued, and written when the thread waits for it.

A missing wait then reads 0xFF bytes, and is reported besides: bytes under way carry their own shadow. Groups are counted
for each thread.
"""

from __future__ import annotations

import ctypes

from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.code import Library
from ptxtrain.engine.ptxcpu.checked.state import IN_SHARED, Checker, Copy, at
from ptxtrain.engine.ptxcpu.checked.view import SITE, View, checker_of, field, init_bytes, kind_bit, word_records

_BYTES = ctypes.sizeof(Copy)


def define_copies(library: Library) -> None:
    """`copy_issue(cta, warp, targets, sources, mask, counts, site_of_source, site_of_target)`; counts may be null.

    `copy_commit(cta, warp, mask)` and `copy_wait(cta, warp, mask, groups)`; groups -1 waits for every copy.
    """
    _perform(library)
    parameters = ("ptr", "i32", "ptr", "ptr", "i32", "ptr", "ptr", "ptr")
    with library.function("copy_issue", parameters, external=True) as (c, arguments):
        cta, warp, targets, sources, mask, counts, from_site, to_site = arguments
        chk = checker_of(c, cta)
        size = c.load("i32", to_site, SITE["size"])
        whole = counts.is_(c.null())

        def all_sources() -> None:
            with c.when(c.call("access_lanes", cta, warp, sources, mask, from_site, c.null()).is_not(0)):
                c.give(1)

        def each_source() -> None:
            c.store(c.null(), chk, at(Checker, "values"))
            with c.count(32) as lane, c.when(((mask.to("i64") >> lane) & 1).is_not(0)):
                count = c.either("umin", c.load("i32", counts, lane * 4), size).to("i64")
                thread = (warp.to("i64") << 5) + lane
                address = c.load("i64", sources, lane * 8)
                with c.when(count.is_not(0)):
                    given = (cta, chk, warp, from_site, address, count, thread, lane.to("i32"))
                    with c.when(c.call("single", *given).is_not(0)):
                        c.give(1)

        c.choose(whole, all_sources, each_source)
        with c.when(c.call("access_lanes", cta, warp, targets, mask, to_site, c.null()).is_not(0)):
            c.give(1)
        with c.count(32) as lane, c.when(((mask.to("i64") >> lane) & 1).is_not(0)):
            with c.when(field(c, chk, "queued").is_(state.QUEUE)):
                c.call("perform", chk, warp, c.i32(0), c.i32(-1), c.i32(1))
            queued = field(c, chk, "queued")
            one = field(c, chk, "queue", "ptr") + queued * _BYTES
            thread = (warp.to("i64") << 5) + lane
            target = c.load("i64", targets, lane * 8)
            count = c.var(size)
            with c.when(~whole):
                count.set(c.either("umin", c.load("i32", counts, lane * 4), size))
            c.store(target, one, at(Copy, "target"))
            c.store(c.load("i64", sources, lane * 8), one, at(Copy, "source"))
            c.store(count.get(), one, at(Copy, "count"))
            c.store(size, one, at(Copy, "size"))
            c.store(thread.to("i32"), one, at(Copy, "thread"))
            c.store(c.load("i32", chk + at(Checker, "groups"), thread * 4), one, at(Copy, "group"))
            c.store(c.load("i32", to_site, SITE["index"]), one, at(Copy, "site"))
            c.store(queued + 1, chk, at(Checker, "queued"))
            c.fill(target.to("ptr"), -1, size.to("i64"))
            c.fill(init_bytes(c, chk + at(Checker, "shared"), target), state.PENDING_COPY, size.to("i64"))
    with library.function("copy_commit", ("ptr", "i32", "i32"), external=True) as (c, (cta, warp, mask)):
        chk = checker_of(c, cta)
        with c.count(32) as lane:
            place = chk + at(Checker, "groups") + ((warp.to("i64") << 5) + lane) * 4
            c.store(c.load("i32", place) + ((mask.to("i64") >> lane) & 1).to("i32"), place)
    with library.function("copy_wait", ("ptr", "i32", "i32", "i32"), external=True) as (c, (cta, warp, mask, groups)):
        c.give(c.call("perform", checker_of(c, cta), warp, mask, groups, c.i32(0)))


def _perform(library: Library) -> None:
    """`perform(chk, warp, mask, groups, everything)`: make the copies that are waited for, keep the others."""
    with library.function("perform", ("ptr", "i32", "i32", "i32", "i32")) as (c, arguments):
        chk, warp, mask, groups, everything = arguments
        queue, shared = field(c, chk, "queue", "ptr"), chk + at(Checker, "shared")
        kept = c.var(c.i64(0))
        with c.count(field(c, chk, "queued")) as i:
            one = queue + i * _BYTES
            thread = c.load("i32", one, at(Copy, "thread"))
            mine = (thread >> 5).is_(warp) & ((mask >> (thread & 31)) & 1).is_not(0)
            committed = c.load("i32", chk + at(Checker, "groups"), thread.to("i64") * 4)
            group = c.load("i32", one, at(Copy, "group"))
            # All but the newest `groups` of those committed.
            due = groups.is_(-1) | ((group < committed) & (committed - group > groups))

            def make() -> None:
                target = c.load("i64", one, at(Copy, "target"))
                count = c.load("i32", one, at(Copy, "count")).to("i64")
                size = c.load("i32", one, at(Copy, "size")).to("i64")
                c.fill(target.to("ptr"), 0, size)
                c.copy(target.to("ptr"), c.load("i64", one, at(Copy, "source")).to("ptr"), count)
                c.fill(init_bytes(c, shared, target), state.WRITTEN, size)
                view = View(c, chk, thread >> 5, IN_SHARED)
                stamp = view.stamp(c.load("i32", one, at(Copy, "site")), kind_bit(c.i32(0), 1))
                words = word_records(c, shared, "writers", target)
                with c.count(size, 4) as at_byte:
                    c.store(view.stamped(stamp, thread.to("i64")), words, at_byte * 2)

            def keep() -> None:
                with c.when(kept.get().is_not(i)):
                    c.copy(queue + kept.get() * _BYTES, one, c.i64(_BYTES))
                kept.set(kept.get() + 1)

            c.choose(everything.is_not(0) | (mine & due), make, keep)
        c.store(kept.get(), chk, at(Checker, "queued"))
