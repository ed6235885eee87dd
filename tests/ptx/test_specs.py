"""The derived numbers of the Specs, and that the ops' constants are those of the references' text."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from ptxtrain.engine import philox
from ptxtrain.engine.ops import attention, matmul, scalars
from ptxtrain.ptx import kit_spec, specs
from ptxtrain.ptx.render import environment, reference_source


def test_float_bits_round_once() -> None:
    assert specs.float_bits(1.0) == "0f3F800000"
    assert specs.float_bits(-2.5) == "0fC0200000"
    assert specs.float_bits(specs.LOG2_E) == f"0f{np.float32(specs.LOG2_E).view(np.uint32):08X}"


def test_butterfly_meets_every_lane() -> None:
    steps = environment().globals["BUTTERFLY"]
    assert steps == (16, 8, 4, 2, 1)
    met = {0}
    for step in steps:
        met |= {lane ^ step for lane in met}
    assert met == set(range(32))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 1000])
def test_grids_cover_everything_once(count: int) -> None:
    for warps in (1, 4, 8):
        assert specs.RowSpec(warps).grid(count)[0] == -(-count // warps)
    assert specs.ElementSpec(256).grid(count)[0] * 256 >= count > (specs.ElementSpec(256).grid(count)[0] - 1) * 256
    norm = specs.NormPartSpec(steps=2, warps=4)
    assert norm.elements == 64 and norm.parts(count) == -(-count // 64)
    assert norm.grid(count)[0] * 4 >= norm.parts(count)


@pytest.mark.parametrize("context", [1, 9, 32, 33, 65, 256])
def test_parts_of_rows_cover_each_sequence_in_order(context: int) -> None:
    spec = specs.NormBackwardSpec()
    count = 3 * spec.parts_per_sequence(context)
    parts = [spec.part(i, context) for i in range(count)]
    assert [first for first, _ in parts] == [0, *[last for _, last in parts[:-1]]]
    assert parts[-1][1] == 3 * context
    for first, last in parts:
        assert 0 < last - first <= spec.part_rows and first // context == (last - 1) // context


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_the_kits_specs(rows: int) -> None:
    """Parts cover the rows, grids the parts, and sizes follow from dtypes."""
    part, row = kit_spec.TypedPartSpec("f16"), kit_spec.TypedRowSpec("bf16")
    assert (
        part.grid(rows) == (part.parts(rows), 1, 1) and 0 <= part.parts(rows) * part.part_rows - rows < part.part_rows
    )
    assert 0 <= row.grid(rows)[0] * row.warps - rows < row.warps and row.block == (32, row.warps, 1)
    assert [kit_spec.TypedRowSpec(dtype).item for dtype in ("f16", "bf16", "f32")] == [2, 2, 4]
    assert specs.NormSpec().item == specs.NormBackwardSpec().item == 4 and specs.NormSpec(dtype="f16").item == 2
    for vector in (1, 4):
        adam = kit_spec.AdamSpec(vector=vector)
        assert 0 <= adam.grid(rows * vector)[0] * adam.threads - rows < adam.threads and adam.pairs == max(
            1, vector // 2
        )
    spread = kit_spec.AdamSpec(master="bf16")
    assert spread.spread and not kit_spec.AdamSpec().spread
    assert 16 * spread.elements == 128, "the random bits of one counter"
    assert 0 <= spread.grid(rows)[0] * spread.threads * spread.elements - rows < spread.threads * spread.elements


def test_constants_of_the_random_numbers_and_of_exp() -> None:
    adam = kit_spec.AdamSpec()
    assert [int(n, 16) for n in adam.multipliers] == [philox._MULTIPLIER_0, philox._MULTIPLIER_1]
    assert [int(n, 16) for n in adam.weyl] == [philox._WEYL_0, philox._WEYL_1] and adam.rounds == philox.ROUNDS
    whole = Fraction(float(np.float32(specs.LOG2_E))) + Fraction(kit_spec.TypedRowSpec().log2_e_low)
    assert float(whole) == specs.LOG2_E == kit_spec.LOG2_E


def constant(text: str, name: str) -> int:
    found = re.search(rf"const u32 {name} = (\w+);", text)
    assert found, name
    return int(found[1])


def test_ops_launch_what_the_references_expect() -> None:
    text = reference_source("matmul")
    assert constant(text, "WARPS") == matmul.WARPS and constant(text, "LANES") == specs.LANES == matmul.TILE_N
    assert constant(text, "ROWS") * matmul.WARPS == matmul.TILE_M
    assert constant(text, "TILE_K") == 4 * matmul.WARPS, "stage_transposed takes four steps of k to a warp"
    text = reference_source("attention")
    assert constant(text, "TILE") == attention.TILE and constant(text, "WARPS") == attention.WARPS
    assert constant(text, "CHANNELS") == attention.MAX_HEAD_DIM
    assert constant(reference_source("cross_entropy"), "GRAD_SCALE") == scalars.GRAD_SCALE


def test_scratch_holds_two_matrices_and_a_vector() -> None:
    assert attention.pitch(1) == attention.pitch(32) == 32 and attention.pitch(33) == 64
    assert attention.scratch_bytes(batch=2, context=33, heads=3) == 4 * 2 * 3 * 33 * (2 * 64 + 1)


def test_scalars_are_distinct_and_in_range() -> None:
    names = ("LR", "BIAS1", "BIAS2", "GRAD_SCALE", "CLIP", "GRAD_NORM", "LOSS")
    assert [getattr(scalars, name) for name in names] == [0, 1, 2, 3, 4, 5, 6] and scalars.COUNT == 8
