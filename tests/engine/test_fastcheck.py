"""The check of the fast kernels passes on what is shipped and fails on kernels with one thing wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from click.testing import CliRunner

from ptxtrain.cli.gradcheck import command
from ptxtrain.engine import fastcheck
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError

MATMUL, ATTENTION, LOSS = (
    f"fast,{others}"
    for others in ("attention=bf16,cross_entropy=bf16", "matmul=bf16,cross_entropy=bf16", "matmul=bf16,attention=bf16")
)


def test_everything_shipped_passes(device: Device) -> None:
    told: list[str] = []
    report = fastcheck.run(device, progress=told.append)
    off = [row for row in report.rows if not row.passed]
    assert report.passed and not off, off
    assert {row.what for row in report.rows} == {"matmul", "gradient", "attention", "cross_entropy", "model"}
    assert told == ["matmul", "gradients of weights", "attention", "cross-entropy", "the model"]
    # Nothing passes for want of an error: the bf16 way is apart from f32 in every tensor, and so is the fast one.
    for row in report.rows:
        if row.what == "model":
            assert row.allowed > 0 and 0.2 < row.ratio <= 1, row


def test_a_way_leaves_operations_out(device: Device) -> None:
    report = fastcheck.run(device, LOSS)
    assert report.passed and {row.what for row in report.rows} == {"cross_entropy", "model"}
    with pytest.raises(PtxtrainError, match="runs no operation fast"):
        fastcheck.run(device, "bf16")


@dataclass(frozen=True)
class Mutant:
    """What is wrong, the kernel, and the edit: `count` places of `old` (a pattern) become `new`; 0: all of them."""

    name: str
    stem: str
    way: str
    old: str
    new: str
    count: int = 0

    def edit(self) -> Callable[[str], str]:
        def apply(text: str) -> str:
            edited, times = re.subn(self.old, self.new, text, count=self.count)
            assert times, f"{self.name}: {self.old!r} does not occur"
            return edited

        return apply


MUTANTS = [
    Mutant("a k step dropped", "matmul", MATMUL, r"\[%b_at \+ (?!0\])\d+\]", "[%b_at + 0]"),
    Mutant("the wrong half of a fragment", "matmul", MATMUL, r"\{%b_0_0, %b_0_1\}", "{%b_0_1, %b_0_0}"),
    Mutant(
        "parts added twice",
        "add_parts",
        MATMUL,
        r"add\.rn\.f32 +%sum_0, %sum_0, %value_0_0;",
        "fma.rn.f32 %sum_0, %value_0_0, 0f40000000, %sum_0;",
    ),
    Mutant(
        "the sum so far added to each part",
        "add_parts",
        MATMUL,
        r"(@%in_range ld\.global\.f32 %value_0_0, \[%p_partial\];)",
        r"\1 @%in_range ld.global.f32 %value_1_0, [%p_out]; add.rn.f32 %value_0_0, %value_0_0, %value_1_0;",
    ),
    Mutant("no mask", "attention_forward", ATTENTION, r"@%is_full bra   FULL;", "bra FULL;"),
    Mutant(
        "the sums not faded",
        "attention_forward",
        ATTENTION,
        r"mul\.rn\.f32 +%o_0_\d, %o_0_\d, %fade_\d;",
        "",
        count=8,
    ),
    *(
        Mutant(
            f"off by one at the diagonal of {stem.removeprefix('attention_')}",
            stem,
            ATTENTION,
            r"(add\.s32 +%ahead, %reach, %g;)",
            rf"\1 add.s32 %ahead, %ahead, {step};",
        )
        for stem, step in (("attention_forward", 1), ("attention_dq", 1), ("attention_dkv", -1))
    ),
    *(
        Mutant(
            f"the wrong key head in {stem.removeprefix('attention_')}",
            stem,
            ATTENTION,
            r"div\.u32 +%kv_head, %head, %at;",
            "rem.u32 %kv_head, %head, %kv_heads;",
        )
        for stem in ("attention_forward", "attention_dq")
    ),
    Mutant("the target left out", "cross_entropy", LOSS, r"@%is_owner st\.global\.b16 \[%p_target\], %hot;", ""),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutants_are_caught(device: Device, mutant: Mutant) -> None:
    report = fastcheck.run(device, mutant.way, {mutant.stem: mutant.edit()}, stop_at_failure=True)
    assert not report.passed and not report.rows[-1].passed
    assert report.rows[-1].what != "model", "a kernel's own rows are closer than the model"


def test_an_error_that_is_no_number_fails() -> None:
    assert not fastcheck._row("matmul", "", math.nan, 1.0).passed
    assert not fastcheck._row("matmul", "", 1.0, math.nan).passed
    assert fastcheck._row("matmul", "", 0.0, 0.0).passed and fastcheck._row("matmul", "", 1.0, 0.0).ratio == math.inf


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    import ml_dtypes

    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[:4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 0.0]  # halfway between two neighbours
    assert np.array_equal(fastcheck._bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the JSON, and exit code 1 where a row is off."""
    result = CliRunner().invoke(command, ["--device", "cpu", "--fast", "--way", "matmul=bf16,attention=bf16"])
    assert result.exit_code == 0, result.output
    assert "5 x 4104, z-loss 0.001 gradient" in result.stdout and "gradcheck --fast passed: all" in result.stdout
    good = fastcheck.Row("model", "embedding", 1.0, 2.0, 0.5, True)
    bad = replace(good, error=math.nan, ratio=math.nan, passed=False)
    report = fastcheck.Report(False, "fast", (good, bad))
    monkeypatch.setattr(fastcheck, "run", lambda *args, **kwargs: report)
    result = CliRunner().invoke(command, ["--device", "cpu", "--fast"])
    assert result.exit_code == 1 and "gradcheck --fast FAILED: 1 of 2 rows are off" in result.stdout
    result = CliRunner().invoke(command, ["--device", "cpu", "--fast", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "passed": False,
        "way": "fast",
        "rows": [
            {"what": "model", "case": "embedding", "error": 1.0, "allowed": 2.0, "ratio": 0.5, "passed": True},
            {"what": "model", "case": "embedding", "error": None, "allowed": 2.0, "ratio": None, "passed": False},
        ],
    }
    result = CliRunner().invoke(command, ["--way", "bf16"])
    assert result.exit_code == 2 and "--way needs --fast" in result.output
