"""Instructions of a warp and of a block whose member masks or counts are not the plain ones, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from both import entry

from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.ptxcpu import load

STORE = "st.global.u32 [%out], %x;"


def run(body: str, values: npt.NDArray[np.uint32], declarations: str = "", block: int = 0) -> Any:
    """`entry(body)` over one block of as many threads as there are values."""
    out = np.zeros_like(values)
    module = load(entry("ld.global.u32 %x, [%in];" + body + STORE, declarations))
    module.launch("k", grid=(1, 1, 1), block=(block or values.size, 1, 1), args=[values, out])
    return out


def some(count: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(count).integers(0, 1000, count, dtype=np.uint32)


# Four groups of eight neighbouring lanes, each with its own member mask.
GROUPS = "shr.u32 %r1, %lane, 3; shl.b32 %r1, %r1, 3; mov.u32 %r2, 255; shl.b32 %r2, %r2, %r1;"


@pytest.mark.parametrize("count", [32, 80])
def test_reductions_of_groups_with_masks_of_their_own(count: int) -> None:
    values = some(count)
    groups = [values[i : i + 8] for i in range(0, count, 8)]
    total = run(GROUPS + "redux.sync.add.u32 %x, %x, %r2;", values)
    assert (total == np.concatenate([np.full(g.size, g.sum()) for g in groups])).all()
    most = run(GROUPS + "redux.sync.max.u32 %x, %x, %r2;", values)
    assert (most == np.concatenate([np.full(g.size, g.max()) for g in groups])).all()
    text = GROUPS + "setp.gt.u32 %p1, %x, 500; vote.sync.any.pred %p2, %p1, %r2; selp.u32 %x, 1, 0, %p2;"
    assert (run(text, values) == np.concatenate([np.full(g.size, (g > 500).any()) for g in groups])).all()
    text = GROUPS + "setp.gt.u32 %p1, %x, 500; vote.sync.ballot.b32 %x, %p1, %r2;"
    ballots = [sum(int(v > 500) << (8 * i % 32 + j) for j, v in enumerate(g)) for i, g in enumerate(groups)]
    assert (run(text, values) == np.repeat(np.array(ballots, np.uint32), 8)[:count]).all()


def test_matches_of_groups_with_masks_of_their_own() -> None:
    values = some(32) % 3
    got = run(GROUPS + "match.any.sync.b32 %x, %x, %r2;", values)
    for lane in range(32):
        same = [other for other in range(lane // 8 * 8, lane // 8 * 8 + 8) if values[other] == values[lane]]
        assert got[lane] == sum(1 << other for other in same)
    values[8:16] = 7
    got = run(GROUPS + "match.all.sync.b32 %x|%p1, %x, %r2; @!%p1 mov.u32 %x, 5;", values)
    assert (got[8:16] == 0xFF00).all() and (got[:8] == 5).all()


def test_elect_names_the_lowest_member() -> None:
    values = some(64)
    got = run(GROUPS + "elect.sync %x|%p1, %r2; selp.u32 %r3, 100, 0, %p1; add.u32 %x, %x, %r3;", values)
    lanes = np.arange(64) % 32
    assert (got == lanes // 8 * 8 + np.where(lanes % 8 == 0, 100, 0)).all()


@pytest.mark.parametrize("operation", ["min", "max", "min.abs", "max.NaN"])
def test_float_reductions(operation: str) -> None:
    numbers = np.random.default_rng(3).normal(size=32).astype(np.float32)
    numbers[5] = np.nan
    text = f"mov.b32 %f2, %x; redux.sync.{operation}.f32 %f1, %f2, 0xFFFF00FF; mov.b32 %x, %f1;"
    got = run(text, numbers.view(np.uint32)).view(np.float32)
    members = np.delete(numbers, np.arange(8, 16))
    members = np.abs(members) if "abs" in operation else members
    if "NaN" in operation:
        assert np.isnan(got).all()
    else:
        assert (got == (np.nanmin(members) if "min" in operation else np.nanmax(members))).all()


@pytest.mark.parametrize("block", [32, 96, 128, 200])
def test_barriers_that_reduce(block: int) -> None:
    """Twice in a row, so that votes of the second must not mix with those of the first; also as `barrier`."""
    values = some(block)
    for limit in (0, 500, 1000):
        yes = values >= limit
        text = f"setp.ge.u32 %p1, %x, {limit}; bar.red.popc.u32 %r1, 0, %p1; bar.red.popc.u32 %r2, 0, !%p1;"
        assert (run(text + "mad.lo.u32 %x, %r1, 1000, %r2;", values) == yes.sum() * 1000 + (~yes).sum()).all()
        for op, expected in (("and", yes.all()), ("or", yes.any())):
            text = (
                f"setp.ge.u32 %p1, %x, {limit}; barrier.cta.red.{op}.aligned.pred %p2, 1, %p1; selp.u32 %x, 1, 0, %p2;"
            )
            assert (run(text, values) == int(expected)).all()


def test_threads_that_left_do_not_vote() -> None:
    values = some(96)
    text = (
        "setp.ge.u32 %p1, %t, 70; @%p1 bra OUT; setp.ge.u32 %p2, %x, 0; bar.red.popc.u32 %x, 0, %p2;"
        + STORE
        + "OUT: ret;"
    )
    out = np.zeros_like(values)
    load(entry("ld.global.u32 %x, [%in];" + text)).launch("k", grid=(1, 1, 1), block=(96, 1, 1), args=[values, out])
    assert (out[:70] == 70).all() and not out[70:].any()


def test_producers_arrive_and_consumers_wait() -> None:
    """Named barriers with counts; the barrier's number is known only when run."""
    text = """
    mov.u32 %r1, tile; shr.u32 %r2, %t, 5; and.b32 %r3, %t, 31; and.b32 %r4, %r2, 1;
    shr.u32 %r5, %r2, 1; add.u32 %r5, %r5, 3; setp.eq.u32 %p1, %r4, 0;
    xor.b32 %r6, %t, 32; mad.lo.u32 %r7, %t, 4, %r1; mad.lo.u32 %r8, %r6, 4, %r1;
    @%p1 bra CONSUME;
    st.shared.u32 [%r7], %x; barrier.cta.arrive %r5, 64; bra DONE;
    CONSUME: barrier.cta.sync %r5, 64; ld.shared.u32 %x, [%r8];
    DONE:
    """
    values = some(128)
    got = run(text, values, ".shared .align 4 .b8 tile[512];\n")
    expected = values.copy()
    expected[:32], expected[64:96] = values[32:64], values[96:]
    assert (got == expected).all()


def test_a_barrier_that_a_part_of_a_warp_comes_to_ends_the_launch() -> None:
    """On one path of a branch, and under a guard; where all the warp's lanes take the path it is a barrier as any."""
    branch = "setp.lt.u32 %p1, %t, {n}; @!%p1 bra SKIP; bar.sync 0; SKIP:"
    for text in (branch, "setp.lt.u32 %p1, %t, {n}; @%p1 bar.sync 0;"):
        values = some(64)
        assert (run(text.format(n=64), values) == values).all()
        with pytest.raises(DeviceError, match=r"k: lanes of a warp came to a barrier .*<text>:\d+"):
            run(text.format(n=40), values)


def test_hints_do_nothing() -> None:
    text = """nanosleep.u32 20; prefetch.global.L2 [%in]; prefetchu.L1 [%in]; discard.global.L2 [%in], 128;
    applypriority.global.L2::evict_normal [%in], 128; griddepcontrol.launch_dependents; griddepcontrol.wait;
    createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0; ld.global.L2::cache_hint.u32 %x, [%in], %rd1;"""
    values = some(32)
    assert (run(text, values) == values).all()


def test_cache_policies_and_hints_change_nothing() -> None:
    text = """createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0; mul.lo.u32 %x, %x, 3;
    st.global.L2::cache_hint.b32 [%out], %x, %rd1; red.global.add.L2::cache_hint.u32 [%out], 5, %rd1;
    atom.global.add.L2::cache_hint.u32 %r1, [%out], 7, %rd1;
    ld.global.L1::no_allocate.L2::cache_hint.L2::128B.u32 %x, [%out], %rd1; ld.global.nc.L1::evict_last.L2::256B.b32 %r2, [%in];
    ld.global.ca.u32 %r3, [%in]; ld.global.cs.u32 %r4, [%in]; ld.global.lu.u32 %r5, [%in]; ld.global.cv.u32 %r6, [%in];
    sub.u32 %r2, %r2, %r3; sub.u32 %r4, %r4, %r5; sub.u32 %r6, %r6, %r3; or.b32 %r2, %r2, %r4; or.b32 %r2, %r2, %r6;
    add.u32 %x, %x, %r2; st.global.cs.u32 [%out], %x; st.global.wt.u32 [%out], %x; st.global.cg.u32 [%out], %x;"""
    values = some(40)
    assert (run(text, values) == 3 * values + 12).all()
