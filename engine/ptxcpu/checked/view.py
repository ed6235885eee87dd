"""How the native checks find memory and judge records: resolving addresses, conflicts between accesses, the report."""

from __future__ import annotations

from typing import Final

from ptxtrain.engine.ptxcpu import traps
from ptxtrain.engine.ptxcpu.checked import state
from ptxtrain.engine.ptxcpu.checked.code import Code, Library, Value
from ptxtrain.engine.ptxcpu.checked.state import IN_SHARED, Checker, Entry, Records, Watch, at
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS

SITE: Final = {name: 4 * i for i, name in enumerate(state.SITE_WORDS)}


def checker_of(c: Code, cta: Value) -> Value:
    return c.load("ptr", cta, FIELDS["checker"])


def field(c: Code, chk: Value, name: str, type_: str = "i64") -> Value:
    return c.load(type_, chk, at(Checker, name))


def row(c: Code, chk: Value, name: str, index: Value) -> Value:
    """Where element `index` of an array of u64 lies."""
    return chk + at(Checker, name) + index.to("i64") * 8


def define_report(library: Library) -> None:
    """`report(cta, kind, site, warp, lane, address, other, bytes)`: keep the first finding, end the launch. Gives 1."""
    parameters = ("ptr", "i32", "ptr", "i32", "i32", "i64", "i64", "i32")
    with library.function("report", parameters) as (c, (cta, kind, site, warp, lane, address, other, count)):
        chk = checker_of(c, cta)
        found = chk + at(Checker, "finding")
        f = state.Finding
        with c.when(c.load("i32", found).is_not(0)):
            c.give(1)
        c.store(kind, found, at(f, "kind"))
        c.store(c.load("i32", site, SITE["index"]), found, at(f, "site"))
        c.store(warp, found, at(f, "warp"))
        c.store(lane, found, at(f, "lane"))
        c.store(count, found, at(f, "bytes"))
        c.store(address, found, at(f, "address"))
        c.store(other, found, at(f, "other"))
        for i, axis in enumerate("xyz"):
            c.store(c.load("i32", cta, FIELDS[f"ctaid.{axis}"]), found, at(f, "ctaid") + 4 * i)
        c.store(c.load("i64", cta, FIELDS["shared"]), found, at(f, "shared_base"))
        c.store(c.load("i32", cta, FIELDS["shared.bytes"]).to("i64"), found, at(f, "shared_bytes"))
        c.store(c.load("i64", cta, FIELDS["local"]), found, at(f, "local_base"))
        c.store(c.i32(traps.FOUND), cta, FIELDS["status"])
        c.give(1)


def define_resolve(library: Library) -> None:
    """`resolve(cta, chk, site, address, count, thread)`: the entry that holds the bytes [address, + count), or 0."""
    with library.function("resolve", ("ptr", "ptr", "ptr", "i64", "i64", "i32"), result="i64") as (c, arguments):
        cta, chk, site, address, count, thread = arguments
        space = c.load("i32", site, SITE["space"])
        watch = field(c, chk, "watch", "ptr")
        generic = space.is_(state.GENERIC)
        offset = address - c.load("i64", cta, FIELDS["shared"])
        inside = offset < c.load("i32", cta, FIELDS["shared.bytes"]).to("i64")
        with c.when(space.is_(state.SHARED) | (generic & inside)):
            _search_ranges(c, watch, "shared", offset, count, chk + at(Checker, "shared"), site)
            c.give(0)
        lane_bytes = c.load("i32", watch, at(Watch, "local_bytes")).to("i64")
        offset = address - c.load("i64", cta, FIELDS["local"])
        total = lane_bytes * (c.load("i32", watch, at(Watch, "warps")).to("i64") << 5)
        with c.when(space.is_(state.LOCAL) | (generic & (offset < total))):
            mine = offset - lane_bytes * thread.to("i64")
            with c.when(mine < lane_bytes):
                _search_ranges(c, watch, "local", mine, count, chk + at(Checker, "local"), None)
            c.give(0)
        entries = field(c, chk, "entries")
        with c.when(entries.is_(0)):
            c.give(0)
        table = field(c, chk, "table", "ptr")
        # The last entry that starts at or before the address.
        low, high = c.var(c.i64(0)), c.var(entries)
        with c.loop(lambda: high.get() - low.get() > 1):
            middle = (low.get() + high.get()) >> 1
            before = c.load("i64", table + middle * 64) <= address
            low.set(before.pick(middle, low.get()))
            high.set(before.pick(high.get(), middle))
        found = table + low.get() * 64
        with c.when(_holds(c, found, address, count)):
            c.store(low.get().to("i32"), site, SITE["cache"])
            c.give(found.to("i64"))


def resolve(c: Code, cta: Value, chk: Value, site: Value, address: Value, count: Value, thread: Value) -> Value:
    """As `@resolve`, with what the site met last tried in line."""
    space = c.load("i32", site, SITE["space"])
    cached = c.load("i32", site, SITE["cache"]).to("i64")
    found = c.var(c.i64(0))

    def in_shared() -> None:
        watch = field(c, chk, "watch", "ptr")
        offset = address - c.load("i64", cta, FIELDS["shared"])
        known = c.load("i32", watch, at(Watch, "shared_ranges")).to("i64")
        with c.when(cached < known):
            one = c.load("ptr", watch, at(Watch, "shared_at")) + cached * 16
            start, end = c.load("i64", one), c.load("i64", one, 8)
            with c.when((start <= offset) & (offset < end) & (end - offset >= count)):
                found.set((chk + at(Checker, "shared")).to("i64"))

    def in_table() -> None:
        with c.when((space <= state.GLOBAL) & (cached < field(c, chk, "entries"))):
            one = field(c, chk, "table", "ptr") + cached * 64
            with c.when(_holds(c, one, address, count)):
                found.set(one.to("i64"))

    c.choose(space.is_(state.SHARED), in_shared, in_table)
    with c.when(found.get().is_(0)):
        found.set(c.call("resolve", cta, chk, site, address, count, thread))
    return found.get()


def _holds(c: Code, entry: Value, address: Value, count: Value) -> Value:
    start, end = c.load("i64", entry), c.load("i64", entry, at(Entry, "end"))
    return (start <= address) & (address < end) & (end - address >= count)


def _search_ranges(
    c: Code, watch: Value, space: str, offset: Value, count: Value, entry: Value, site: Value | None
) -> None:
    ranges = c.load("ptr", watch, at(Watch, f"{space}_at"))
    number = c.load("i32", watch, at(Watch, f"{space}_ranges")).to("i64")
    with c.count(number) as i:
        one = ranges + i * 16
        start, end = c.load("i64", one), c.load("i64", one, 8)
        with c.when((start <= offset) & (offset < end) & (end - offset >= count)):
            if site is not None:
                c.store(i.to("i32"), site, SITE["cache"])
            c.give(entry.to("i64"))


class View:
    """How records look to the thread (or block) that makes an access. `who` is its code in the records' space."""

    def __init__(self, c: Code, chk: Value, warp: Value, records: Records) -> None:
        self.c, self.chk, self.warp, self.records = c, chk, warp.to("i64"), records
        self.shared = records is IN_SHARED
        if self.shared:
            self.now = field(c, chk, "clock")
            self.low = c.load("i64", row(c, chk, "low", warp))
            self.high = c.load("i64", row(c, chk, "high", warp))
            self.seen = chk + at(Checker, "seen") + self.warp * (8 * state.WARPS)
            self.own = c.load("i64", self.seen, self.warp * 8)
            self.team = self.warp + state.ONE_WARP
        else:
            self.now = field(c, chk, "epoch")
            self.block = field(c, chk, "block") % state.BLOCK_CODES

    def who(self, record: Value) -> Value:
        return record & ((1 << self.records.who_bits) - 1)

    def when(self, record: Value) -> Value:
        return record >> self.records.when_shift

    def strong(self, record: Value) -> Value:
        return (record & (1 << self.records.who_bits)).is_not(0)

    def site(self, record: Value) -> Value:
        return (record >> self.records.site_shift) & self.records.last_site

    def stamp(self, site: Value, strong: Value) -> Value:
        """A record of this instruction now, `who` to be added."""
        index = self.c.either("umin", site.to("i64"), self.c.i64(self.records.last_site))
        tag = strong.to("i64") << self.records.who_bits
        return (self.now << self.records.when_shift) | (index << self.records.site_shift) | tag

    def mixed(self, record: Value) -> Value:
        return self.who(record).is_(self.records.mixed)

    def same_warp(self, who: Value) -> Value:
        return (who >> 5).is_(self.warp) | who.is_(self.team)

    def settled(self, record: Value, who: Value) -> Value:
        """Surely no conflict, judged in a few operations; what is not settled is looked at closely."""
        other, when = self.who(record), self.when(record)
        if self.shared:
            own = other.is_(who) & (other < state.ONE_WARP)
            return (when < self.low) | own | (self.same_warp(other) & (when < self.own))
        return when.is_not(self.now) | other.is_(self.block)

    def alive(self, record: Value) -> Value:
        """Whether a later reader must not simply replace the record."""
        if self.shared:
            return self.when(record) >= self.same_warp(self.who(record)).pick(self.own, self.low)
        return self.when(record).is_(self.now)

    def conflict(self, record: Value, who: Value, strong: Value) -> Value:
        """Whether an access by `who` is in conflict with the one that the record is of (one of them writes)."""
        c, other, when = self.c, self.who(record), self.when(record)
        both_strong = self.strong(record) & strong
        if not self.shared:
            free = field(c, self.chk, "fenced_globally").is_not(0)
            return when.is_(self.now) & other.is_not(self.block) & ~(both_strong | free)
        single = other < state.ONE_WARP
        warp = single.pick(other >> 5, other - state.ONE_WARP)
        known = warp < state.WARPS
        index = known.pick(warp, 0)
        bound = known.pick(c.load("i64", self.seen, index * 8), self.high)
        fence = c.load("i64", row(c, self.chk, "fenced", index))
        fenced = (when < c.load("i64", row(c, self.chk, "fenced", self.warp))) & ((when < fence) | ~known)
        ordered = (when < bound) | (fenced & warp.is_not(self.warp))
        own = single & other.is_(who)
        return ~(ordered | own | both_strong)

    def merge(self, old: Value, who: Value, stamp: Value) -> Value:
        """A reader's record, after earlier readers that still matter."""
        other = self.who(old)
        joins = self.alive(old) & other.is_not(who if self.shared else self.block)
        if self.shared:
            several = self.same_warp(other).pick(self.team, self.c.i64(self.records.many))
            return joins.pick(several, who) | stamp
        return joins.pick(self.c.i64(self.records.many), self.block) | stamp

    def stamped(self, stamp: Value, who: Value) -> Value:
        return (who if self.shared else self.block) | stamp


def word_records(c: Code, entry: Value, name: str, address: Value) -> Value:
    """The record of the word at `address`."""
    return (c.load("i64", entry, at(Entry, name)) + ((address >> 2) << 3)).to("ptr")


def byte_records(c: Code, entry: Value, name: str, address: Value) -> Value:
    return (c.load("i64", entry, at(Entry, f"byte_{name}")) + (address << 3)).to("ptr")


def init_bytes(c: Code, entry: Value, address: Value) -> Value:
    return (c.load("i64", entry, at(Entry, "init")) + address).to("ptr")


def kind_bit(kind: Value, bit: int) -> Value:
    return (kind & bit).is_not(0)
