"""The numbers of the matmul's Specs, and the budget in `ptx/README.md` against the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptxtrain.ptx import render
from ptxtrain.ptx.matmul_spec import CHOICES, CPU_CHOICES, MatmulSpec

README = Path(render.__file__).with_name("README.md").read_text(encoding="utf-8")
SPECS = [row.spec(layout, "bf16") for layout in ("nn", "nt", "tn") for row in CHOICES]
CPU_SPECS = [row.spec(layout, "bf16") for layout in ("nn", "nt", "tn") for row in CPU_CHOICES]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_budget(spec: MatmulSpec) -> None:
    """mma, ldmatrix and cp.async of a k tile, as the text has them and as the README says."""
    text = re.sub(r"//.*", "", render.render("matmul", spec))
    mma, ldmatrix = len(re.findall(r"\bmma\.sync", text)), len(re.findall(r"\bldmatrix\.", text))
    copies = len(re.findall(r"\bcp\.async\.cg", text)) // 2  # whole tiles, and those at an edge
    warps = spec.warps_m * spec.warps_n
    assert mma == spec.mi * spec.ni * spec.ki and ldmatrix == (spec.mi + spec.ni // 2) * spec.ki
    moved = 16 * copies * spec.threads
    assert moved == 2 * spec.block_k * (spec.block_m + spec.block_n)
    row = next(line for line in README.splitlines() if line.startswith(f"| {spec.block_m} x {spec.block_n} |"))
    numbers = [int(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    products = 2048 * mma * warps  # multiply-adds of the block
    flop_a_byte = round(2 * products / moved)
    assert numbers[0] == mma * warps and numbers[4] == ldmatrix * warps
    assert [numbers[1], numbers[3]] == [products // 1024, products // 256]
    assert numbers[2] == round(products / 2137) and numbers[5] == 4 * ldmatrix * warps
    assert numbers[6] == moved and numbers[7] == flop_a_byte


@pytest.mark.parametrize("spec", SPECS + CPU_SPECS, ids=str)
def test_tiles_are_whole(spec: MatmulSpec) -> None:
    """Every thread makes the same number of copies, and a warp's piece is whole fragments."""
    for tile in (spec.a, spec.b):
        assert tile.copies(spec.threads) * spec.threads == tile.rows * tile.chunks_per_row
        assert spec.threads % tile.chunks_per_row == 0 and tile.row_bytes % 16 == 0
    assert spec.mi * 16 * spec.warps_m == spec.block_m and spec.ni * 8 * spec.warps_n == spec.block_n
    assert spec.ni % 2 == 0 and spec.block_k % 16 == 0
