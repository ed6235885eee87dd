"""The derived numbers of the attention Specs, and that the kernels' text computes the addresses that they state."""

from __future__ import annotations

import math
import re

import pytest

from ptxtrain.ptx import attention_spec, render, specs
from ptxtrain.ptx.attention_spec import HEAD_DIMS, AttentionSpec, DkvSpec, DqSpec, Rows, dkv_spec, dq_spec, forward_spec

MAKERS = {"attention_forward": forward_spec, "attention_dq": dq_spec, "attention_dkv": dkv_spec}
CASES = [(stem, make(head_dim)) for stem, make in MAKERS.items() for head_dim in HEAD_DIMS]
IDS = [f"{stem}-{spec.head_dim}" for stem, spec in CASES]
STATIC_LIMIT = 48 * 1024  # bytes of shared memory that a block may declare


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_copies_bring_every_chunk_once(rows: int, head_dim: int) -> None:
    tile = Rows(rows, head_dim)
    brought = sorted(
        (row + i * tile.rows_per_pass, channel)
        for thread in range(attention_spec.THREADS)
        for row, channel in [tile.copied(thread)]
        for i in range(tile.passes)
    )
    assert brought == [(row, channel) for row in range(rows) for channel in range(0, head_dim, 8)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_are_padded_by_eight_numbers(head_dim: int) -> None:
    tile = Rows(64, head_dim)
    assert tile.row_bytes == 2 * (head_dim + 8) and tile.nbytes == 64 * tile.row_bytes
    assert tile.offset(3, 5) == 3 * tile.row_bytes + 10


@pytest.mark.parametrize(("stem", "spec"), CASES, ids=IDS)
def test_fragments_name_every_element_once(stem: str, spec: AttentionSpec) -> None:
    """The rows that 32 lanes point to are a 16 x 16 piece, each 16 bytes once; pieces cover the tile."""
    piece = {spec.tile.offset(row, channel) for row in range(16) for channel in (0, 8)}
    for pattern in (spec.a_lane, spec.b_lane, spec.t_lane):
        assert {pattern(lane) for lane in range(32)} == piece
    pieces = {spec.piece(i, k) for i in range(spec.steps) for k in range(spec.depth)}
    whole = {spec.tile.offset(row, c) for row in range(0, spec.walked, 16) for c in range(0, spec.head_dim, 16)}
    assert pieces == whole


@pytest.mark.parametrize(("stem", "spec"), CASES, ids=IDS)
def test_matrices_are_where_the_mma_wants_them(stem: str, spec: AttentionSpec) -> None:
    """Matrix m, row 0: which row and channel its first element is."""
    corner = [divmod(spec.a_lane(8 * m), spec.tile.row_bytes) for m in range(4)]
    assert corner == [(0, 0), (8, 0), (0, 16), (8, 16)], "A: rows first, then k"
    corner = [divmod(spec.b_lane(8 * m), spec.tile.row_bytes) for m in range(4)]
    assert corner == [(0, 0), (0, 16), (8, 0), (8, 16)], "B over channels: k first, then columns"
    corner = [divmod(spec.t_lane(8 * m), spec.tile.row_bytes) for m in range(4)]
    assert corner == [(0, 0), (8, 0), (0, 16), (8, 16)], "B over rows: k first, then columns"


def test_a_lanes_columns_of_dkv_are_where_a_broadcast_row_puts_their_numbers() -> None:
    """ldmatrix gives lane t of a quad word t of a row; columns 2 t and 2 t + 1 are to be queries t and t + 4."""
    spec = DkvSpec()
    assert [spec.row_of(row) for row in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]
    for t in range(4):
        assert [spec.row_of(2 * t + i) for i in range(2)] == [t, t + 4]
    for lane in range(32):
        assert spec.number_lane(lane) == 4 * (4 * (lane // 8)), "matrix m: queries 4 m to 4 m + 3"


@pytest.mark.parametrize(("stem", "spec"), CASES, ids=IDS)
def test_shared_memory_holds_what_it_must(stem: str, spec: AttentionSpec) -> None:
    assert spec.shared_bytes == 2 * spec.stage_bytes <= STATIC_LIMIT
    assert spec.stage_bytes >= 2 * spec.tile.nbytes and spec.stage_bytes % 16 == 0
    assert spec.kept_tile.nbytes <= spec.stage_bytes, "queries wait in one stage"
    if isinstance(spec, DqSpec):
        assert spec.out_at + spec.kept_tile.nbytes <= spec.shared_bytes
    if isinstance(spec, DkvSpec):
        assert spec.value_at + spec.kept_tile.nbytes <= spec.shared_bytes
        assert spec.delta_at - spec.lse_at == spec.stage_bytes - spec.delta_at == 4 * spec.walked
        assert spec.number_warps & (spec.number_warps - 1) == 0, "the kernel masks a warp's number"
        assert 2 * spec.number_warps <= attention_spec.WARPS
    assert f".shared .align 128 .b8 tiles[{spec.shared_bytes}];" in render.render(stem, spec)


@pytest.mark.parametrize(("stem", "spec"), CASES, ids=IDS)
def test_a_tiles_budget_is_what_the_text_has(stem: str, spec: AttentionSpec) -> None:
    """mma, ldmatrix and ex2 between FULL and NEXT, where nothing is masked, and the copies of the loop."""
    text = render.render(stem, spec)
    body = text[text.index("\nFULL:") : text.index("\nNEXT:")]
    assert body.count("mma.sync") == spec.mma  # type: ignore[attr-defined]
    assert body.count("ldmatrix.sync") == spec.ldmatrix  # type: ignore[attr-defined]
    fades = 2 if stem == "attention_forward" else 0
    assert body.count("ex2.approx") == 16 * spec.walked // 32 + fades
    assert not re.search(r"\bbra\b|selp", body), "a full tile neither branches nor masks"
    copies = text[text.index("\nTILE:") : text.index("NEXT_TILE_EDGE:")]
    assert copies.count("cp.async.cg") == 2 * spec.tile.passes


@pytest.mark.parametrize(("stem", "spec"), CASES, ids=IDS)
def test_no_float_atomics_and_no_local_memory(stem: str, spec: AttentionSpec) -> None:
    assert not re.search(r"\b(atom|red|ld\.local|st\.local)\b", re.sub(r"//.*", "", render.render(stem, spec)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scales(head_dim: int) -> None:
    spec = forward_spec(head_dim)
    assert spec.softmax_scale == pytest.approx(head_dim**-0.5, rel=1e-15)
    assert spec.log2_scale == pytest.approx(math.log2(math.e) * head_dim**-0.5, rel=1e-15)
    text = render.render("attention_forward", spec)
    assert specs.float_bits(spec.log2_scale) in text and specs.float_bits(-spec.log2_scale) in text


@pytest.mark.parametrize("context", [1, 63, 64, 65, 500])
def test_grids_cover_every_row(context: int) -> None:
    x, y, z = forward_spec(64).grid(3, context, 6)
    assert (x - 1) * 64 < context <= x * 64 and (y, z) == (6, 3)
