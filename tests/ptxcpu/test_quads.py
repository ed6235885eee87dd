"""Accesses by quads: the same numbers whether quads lie together, astray or act in part; the highest lane wins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptxtrain.engine.device.base import Launch
from ptxtrain.engine.device.cpu import CpuDevice

WORDS = 512


def text(count: int) -> str:
    """out[place + j] = x[place + j] + lane where a lane acts; place and acts from memory. got: what lanes loaded."""
    registers = ", ".join(f"%v{j}" for j in range(count))
    vector = f"v{count}.b32 " if count > 1 else "b32 "
    values = f"{{{registers}}}" if count > 1 else registers
    adds = "\n".join(f"    add.u32 %v{j}, %v{j}, %t;" for j in range(count))
    zeros = "\n".join(f"    mov.u32 %v{j}, 7;" for j in range(count))
    got = "\n".join(f"    st.global.b32 [%g + {128 * j}], %v{j};" for j in range(count))
    return f"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry move(.param .u64 out, .param .u64 got, .param .u64 x, .param .u64 place, .param .u64 acts)
{{
    .reg .u32 %t, %p, %a, %v<{count}>;
    .reg .u64 %o, %g, %f, %i, %b, %at;
    .reg .pred %in;
    mov.u32 %t, %tid.x;
    ld.param.u64 %o, [out];
    ld.param.u64 %g, [got];
    ld.param.u64 %f, [x];
    ld.param.u64 %i, [place];
    ld.param.u64 %b, [acts];
    mul.wide.u32 %at, %t, 4;
    add.u64 %i, %i, %at;
    add.u64 %b, %b, %at;
    add.u64 %g, %g, %at;
    ld.global.u32 %p, [%i];
    ld.global.u32 %a, [%b];
    setp.ne.u32 %in, %a, 0;
    mul.wide.u32 %at, %p, 4;
    add.u64 %o, %o, %at;
    add.u64 %f, %f, %at;
{zeros}
    @%in ld.global.{vector}{values}, [%f];
{adds}
{got}
    @%in st.global.{vector}{values}, [%o];
    ret;
}}
""".replace(f"{vector}{values}, [%o];", f"{vector}[%o], {values};")


def quads(count: int, starts: list[int]) -> list[int]:
    """Places of 32 lanes whose quads begin at these words."""
    return [start + count * lane for start in starts for lane in range(4)]


def places(count: int, case: str) -> tuple[list[int], list[int]]:
    """Where each lane goes, and whether it acts."""
    starts = [4 * count * q for q in (5, 0, 7, 2, 1, 3, 6, 4)]
    together, everyone = quads(count, starts), [1] * 32
    if case == "quads":
        return together, everyone
    if case == "whole quads act":
        return together, [int(lane // 4 in (0, 3, 7)) for lane in range(32)]
    if case == "quads act in part":
        return together, [int(lane % 5 != 0) for lane in range(32)]
    if case == "nobody acts":
        return together, [0] * 32
    if case == "one lane astray":
        together[13] = 4 * count * 8 + count
        return together, everyone
    if case == "astray but idle":
        together[13] = 4 * count * 8 + count
        return together, [int(lane // 4 != 3) for lane in range(32)]
    if case == "the same place":
        return quads(count, [0] * 8), everyone
    assert case == "one place for all"
    return [0] * 32, everyone


CASES = (
    *("quads", "whole quads act", "quads act in part", "nobody acts", "one lane astray", "astray but idle"),
    *("the same place", "one place for all"),
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_quads(tmp_path: Path, count: int, case: str) -> None:
    path = tmp_path / f"move{count}.ptx"
    path.write_text(text(count), encoding="utf-8")
    device = CpuDevice(threads=1)
    place, acts = places(count, case)
    x = np.arange(WORDS, dtype=np.uint32) * 3
    out, got = device.write(np.full(WORDS, 99, np.uint32)), device.write(np.zeros(32 * count, np.uint32))
    kernel = device.load(path, "move")
    arguments = (out, got, *(device.write(np.asarray(a, np.uint32)) for a in (x, place, acts)))
    device.launch(Launch(kernel, (1, 1, 1), (32, 1, 1), arguments))
    expected, loaded = np.full(WORDS, 99, np.uint32), np.tile(np.arange(7, 39, dtype=np.uint32), (count, 1))
    for lane in range(32):
        if acts[lane]:
            words = slice(place[lane], place[lane] + count)
            expected[words] = x[words] + lane
            loaded[:, lane] = x[words] + lane
    assert np.array_equal(device.read(out, np.uint32, (WORDS,)), expected)
    assert np.array_equal(device.read(got, np.uint32, (count, 32)), loaded)
