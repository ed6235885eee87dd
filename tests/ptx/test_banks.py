"""Bank conflicts of every pattern in shared memory, from the Specs' address functions: none, or listed with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ptxtrain.ptx import attention_spec, banks
from ptxtrain.ptx.attention_spec import AttentionSpec, DkvSpec, Rows
from ptxtrain.ptx.matmul_spec import CHOICES, MatmulSpec, Tile

ATTENTION = [
    make(head_dim)
    for make in (attention_spec.forward_spec, attention_spec.dq_spec, attention_spec.dkv_spec)
    for head_dim in attention_spec.HEAD_DIMS
]
MATMUL = [row.spec(layout, "bf16") for layout in ("nn", "nt", "tn") for row in CHOICES]
# Conflicts that are known and kept: (operand, columns of its tile) -> rounds beyond the least for a warp's copy, and why.
KEPT = {
    ("rows along k", 32): (
        4,
        "two rows of 64 bytes to eight lanes, 80 bytes apart: they share one 16-byte unit in eight",
    ),
}


def test_words_of_one_bank_conflict() -> None:
    assert banks.conflicts(lambda lane: 4 * lane, 4) == 0
    assert banks.conflicts(lambda lane: 8 * lane, 4) == 1
    assert banks.conflicts(lambda lane: 128 * lane, 4) == 31
    assert banks.conflicts(lambda lane: 0, 4) == 0, "lanes that want the same word share it"
    assert banks.conflicts(lambda lane: 8 * lane, 8) == 0
    assert banks.conflicts(lambda lane: 16 * lane, 16) == 0
    assert banks.conflicts(lambda lane: 32 * lane, 16) == 4


def test_rows_of_a_matrix_conflict_without_padding() -> None:
    assert banks.matrix_conflicts(lambda lane: 128 * (lane % 8) + 16 * (lane // 8)) == 4 * 7
    assert banks.matrix_conflicts(lambda lane: 144 * (lane % 8) + 16 * (lane // 8)) == 0
    assert banks.matrix_conflicts(lambda lane: 272 * (lane % 8), 1) == 0


def test_a_misaligned_access_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="address 8 is not aligned to 16 bytes"):
        banks.conflicts(lambda lane: 8 * lane, 16)


@pytest.mark.parametrize("spec", ATTENTION, ids=str)
def test_attention_fragments(spec: AttentionSpec) -> None:
    for pattern in (spec.a_lane, spec.b_lane, spec.t_lane):
        assert banks.matrix_conflicts(pattern) == 0, pattern
    if isinstance(spec, DkvSpec):
        assert banks.matrix_conflicts(spec.number_lane) == 0


@pytest.mark.parametrize("spec", ATTENTION, ids=str)
def test_attention_copies(spec: AttentionSpec) -> None:
    for tile in (spec.tile, spec.kept_tile):
        assert sum(warp_copies(tile)) == 0
    if isinstance(spec, DkvSpec):
        assert banks.conflicts(lambda lane: spec.lse_at + 4 * lane, 4) == 0


def warp_copies(tile: Rows) -> Iterator[int]:
    for warp in range(attention_spec.WARPS):
        yield banks.conflicts(lambda lane, first=32 * warp: tile.copy_to(first + lane), 16)  # type: ignore[misc]


@pytest.mark.parametrize("spec", MATMUL, ids=str)
def test_matmul_fragments(spec: MatmulSpec) -> None:
    assert banks.matrix_conflicts(spec.a_lane) == 0
    assert banks.matrix_conflicts(spec.b_lane) == 0


@pytest.mark.parametrize("spec", MATMUL, ids=str)
def test_matmul_copies(spec: MatmulSpec) -> None:
    for tile in (spec.a, spec.b):
        kept, _ = KEPT.get(("k rows" if tile.k_rows else "rows along k", tile.columns), (0, ""))
        found = {banks.conflicts(lambda lane, t=tile, f=first: copy_to(t, f + lane), 16) for first in range(0, 128, 32)}
        assert found == {kept}, tile


def copy_to(tile: Tile, thread: int) -> int:
    """Where a thread's first copy goes, as `matmul.ptx` has it."""
    row, chunk = divmod(thread, tile.chunks_per_row)
    return row * tile.row_bytes + 16 * chunk
