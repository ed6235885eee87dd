"""Matrix products queued, put in another order and kept in tiles give the bits that they give one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ptxtrain.engine.ptxcpu.module import load

ROWS, ROW_BYTES = 48, 80  # of the tile in shared memory: two stages of it
STAGE = ROWS * ROW_BYTES
SUMS, FACTORS = 6, 3


def _program(seed: int) -> str:
    """A kernel of random matrix instructions for two warps, or one; out is [warps][SUMS][4][32] f32."""
    rng = random.Random(seed)
    warps = rng.choice((1, 2))
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append("    " + text)

    def four(name: str, i: int) -> str:
        return "{" + ", ".join(f"%{name}_{i}_{j}" for j in range(4)) + "}"

    def bring() -> None:
        name, i = rng.choice("ab"), rng.randrange(FACTORS)
        trans = rng.choice(("", ".trans"))
        at = rng.choice(("even", "odd", "mixed"))
        offset = ROW_BYTES * 16 * rng.randrange(2) + 32 * rng.randrange(2)
        say(f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {four(name, i)}, [%{at} + {offset}];")

    def product() -> None:
        a, b = rng.randrange(FACTORS), rng.randrange(FACTORS)
        first = 2 * rng.randrange(SUMS // 2)
        halves = (0, 1) if rng.random() < 0.7 else (rng.randrange(2),)
        for half in halves:
            d = four("s", first + half)
            say(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {four('a', a)}, "
                f"{{%b_{b}_{2 * half}, %b_{b}_{2 * half + 1}}}, {d};"
            )

    def zero() -> None:
        first = 2 * rng.randrange(SUMS // 2)
        for i in (first, first + 1):
            for j in range(4 if rng.random() < 0.8 else 3):
                say(f"mov.f32 %s_{i}_{j}, 0f00000000;")

    def scale() -> None:
        i, j = rng.randrange(SUMS), rng.randrange(4)
        say(f"fma.rn.f32 %s_{i}_{j}, %s_{i}_{j}, 0f3F000000, 0f3F800000;")

    def pack() -> None:
        i, a = 2 * rng.randrange(SUMS // 2), rng.randrange(FACTORS)
        for j in range(4):
            of = i + j // 2
            say(f"cvt.rn.bf16x2.f32 %a_{a}_{j}, %s_{of}_{2 * (j % 2) + 1}, %s_{of}_{2 * (j % 2)};")

    def move() -> None:
        for at in ("even", "odd", "mixed"):
            say(f"add.u32 %{at}, %{at}, %flip;")
        say("neg.s32 %flip, %flip;")

    def write() -> None:
        say("bar.sync 0;")
        say(f"st.shared.b32 [%own + {4 * rng.randrange(4)}], %s_{rng.randrange(SUMS)}_{rng.randrange(4)};")
        say("bar.sync 0;")

    def guarded() -> None:
        say(f"@%is_second mov.f32 %s_{rng.randrange(SUMS)}_{rng.randrange(4)}, 0f40000000;")

    steps = (bring, bring, bring, product, product, product, product, zero, scale, pack, move, write, guarded)
    for i in range(FACTORS):
        for name in "ab":
            say(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {four(name, i)}, [%even + {32 * (i % 2)}];")
    say("mov.u32 %round, 0;")
    lines.append("AGAIN:")
    for part in range(3):
        for _ in range(rng.randrange(4, 14)):
            rng.choice(steps)()
        say("setp.eq.u32 %is_second, %round, 1;")
        say(f"@%is_second bra PART_{part};")
        for _ in range(rng.randrange(6)):
            rng.choice(steps[:-2])()
        lines.append(f"PART_{part}:")
    say("add.u32 %round, %round, 1;")
    say("setp.lt.u32 %is_more, %round, 2;")
    say("@%is_more bra AGAIN;")
    stores = []
    for i in range(SUMS):
        guard = "" if i % 3 else "@%is_low "
        for half in (0, 2):
            stores.append(
                f"    {guard}st.global.v2.f32 [%to + {1024 * i + 512 * (half // 2)}], {{%s_{i}_{half}, %s_{i}_{half + 1}}};"
            )
    registers = "\n".join(
        [f"    .reg .b32 %a_{i}_<4>, %b_{i}_<4>;" for i in range(FACTORS)]
        + [f"    .reg .f32 %s_{i}_<4>;" for i in range(SUMS)]
    )
    starts = "\n".join(f"    mov.f32 %s_{i}_{j}, 0f00000000;" for i in range(SUMS) for j in range(4))
    body = "\n".join(lines)
    return f""".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 source, .param .u32 stride)
.reqntid {32 * warps}, 1, 1
{{
    .shared .align 128 .b8 tile[{2 * STAGE + 16 * 32 * warps}];
    .reg .u32 %t, %lane, %warp, %row, %chunk, %at, %even, %odd, %mixed, %own, %base, %stride, %round, %low, %high, %copy;
    .reg .s32 %flip;
    .reg .u64 %to, %from, %wide;
    .reg .pred %is_second, %is_more, %is_low;
{registers}
    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    shr.u32 %warp, %t, 5;
    ld.param.u64 %from, [source];
    ld.param.u64 %to, [out];
    ld.param.u32 %stride, [stride];
    mov.u32 %base, tile;
    // rows of 64 bytes: four lanes to a row, eight rows at a time by each warp (all warps copy all of them)
    shr.u32 %row, %lane, 2;
    and.b32 %chunk, %lane, 3;
    shl.b32 %chunk, %chunk, 4;
    mul.wide.u32 %wide, %row, %stride;
    add.u64 %from, %from, %wide;
    cvt.u64.u32 %wide, %chunk;
    add.u64 %from, %from, %wide;
    mad.lo.u32 %copy, %row, {ROW_BYTES}, %base;
    add.u32 %copy, %copy, %chunk;
    setp.eq.u32 %is_more, %warp, 0;
    @!%is_more bra COPIED;
    mov.u32 %round, 0;
COPY:
    cp.async.cg.shared.global [%copy], [%from], 16;
    mad.wide.u32 %from, %stride, 8, %from;
    add.u32 %copy, %copy, {8 * ROW_BYTES};
    add.u32 %round, %round, 1;
    setp.lt.u32 %is_more, %round, {2 * ROWS // 8};
    @%is_more bra COPY;
    cp.async.wait_all;
COPIED:
    bar.sync 0;
    // rows of the matrices: even, 16 rows and their halves; odd, 8 rows by halves; mixed, rows in another order
    and.b32 %low, %lane, 7;
    shr.u32 %high, %lane, 3;
    and.b32 %at, %high, 1;
    shr.u32 %high, %high, 1;
    mad.lo.u32 %even, %at, 8, %low;
    mad.lo.u32 %even, %even, {ROW_BYTES}, %base;
    mad.lo.u32 %even, %high, 16, %even;
    mad.lo.u32 %odd, %high, 8, %low;
    mad.lo.u32 %odd, %odd, {ROW_BYTES}, %base;
    mad.lo.u32 %odd, %at, 16, %odd;
    xor.b32 %low, %low, 5;
    mad.lo.u32 %mixed, %at, 8, %low;
    mad.lo.u32 %mixed, %mixed, {ROW_BYTES}, %base;
    mad.lo.u32 %mixed, %high, 16, %mixed;
    mad.lo.u32 %own, %t, 16, %base;
    add.u32 %own, %own, {2 * STAGE};
    mov.s32 %flip, {STAGE};
    setp.lt.u32 %is_low, %lane, 20;
    setp.ne.u32 %is_second, 0, 0;
{starts}
{body}
    mul.lo.u32 %at, %warp, {1024 * SUMS};
    shr.u32 %row, %lane, 2;
    mad.lo.u32 %at, %row, 64, %at;
    and.b32 %chunk, %lane, 3;
    mad.lo.u32 %at, %chunk, 8, %at;
    cvt.u64.u32 %wide, %at;
    add.u64 %to, %to, %wide;
{chr(10).join(stores)}
    ret;
}}
"""


def _run(text: str, source: np.ndarray, *, checked: bool) -> np.ndarray:
    warps = 2 if ".reqntid 64" in text else 1
    out = np.full((warps, SUMS, 256), 7, np.float32)
    module = load(text, checked=checked)
    module.launch("k", grid=(1, 1, 1), block=(32 * warps, 1, 1), args=[out, source, np.uint32(source.strides[0])])
    return out.view(np.uint32)


def _compare(seed: int) -> None:
    text = _program(seed)
    numbers = np.random.default_rng(seed).standard_normal((2 * ROWS, 40)).astype(np.float32)
    source = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    one_by_one, queued = _run(text, source, checked=True), _run(text, source, checked=False)
    assert np.isfinite(queued.view(np.float32)).any()
    assert (one_by_one == queued).all(), f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_queued_products_keep_their_bits(seed: int) -> None:
    """Random factors, sums, zeros, moved addresses, writes between and branches: as the checked mode does them in order."""
    _compare(seed)


@pytest.mark.slow
def test_many_programs() -> None:
    for seed in range(100, 250):
        _compare(seed)
