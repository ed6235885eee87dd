"""The gradient check passes on what is shipped, and fails on kernels with one thing wrong.

Each mutant is an edit of the shipped kernel text; an edit that no longer matches fails, so none can fade away unseen.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from click.testing import CliRunner
from float64_model import Float64Model

from ptxtrain.cli.gradcheck import command
from ptxtrain.engine import gradcheck
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.ptx import render


def test_every_gradient_is_right(device: Device) -> None:
    seen: list[tuple[int, int]] = []
    report = gradcheck.run(device, progress=lambda done, of: seen.append((done, of)))
    wrong = [row for row in report.rows if not row.passed]
    assert not wrong and report.passed
    assert abs(report.loss_at_init - math.log(97)) <= 0.05
    assert report.memorised_loss < 0.05
    names = [t.name for t in parameter_table(gradcheck.MODEL)]
    assert [(r.tensor, r.direction) for r in report.rows] == [(n, d) for n in names for d in ("gradient", "random")]
    for row in report.rows:
        apart, largest = abs(row.analytic - row.numeric), max(abs(row.analytic), abs(row.numeric))
        assert apart <= 1e-2 * largest + 1e-4
        assert row.error == pytest.approx(apart / largest)
    of = len(report.rows) + 200
    assert seen == [(i, of) for i in range(1, of + 1)]


def test_the_shape_is_the_one_asked_for() -> None:
    m = gradcheck.MODEL
    assert (m.layers, m.width, m.heads, m.head_dim, m.kv_heads, m.vocab_size, m.context) == (2, 48, 4, 12, 2, 97, 9)
    assert (gradcheck.SEQUENCES, gradcheck.MEMORISE_STEPS, gradcheck.MEMORISED_BELOW) == (3, 200, 0.05)
    assert (gradcheck.RELATIVE, gradcheck.ABSOLUTE) == (1e-2, 1e-4)
    assert (gradcheck.LOSS_MOVES, gradcheck.SMALLEST_STEP) == (2e-4, 1e-3)


def test_the_reference_loss_is_the_float64_models(device: Device) -> None:
    check = gradcheck.Check(device)
    losses = Float64Model(check.weights, gradcheck.MODEL)(check.tokens, check.targets).losses
    assert float(losses.mean()) == pytest.approx(gradcheck.REFERENCE_LOSS, abs=1e-6)


def test_the_weights_make_attention_matter(device: Device) -> None:
    """At the check's weights Q and K have gradients of the size of V's, and attention is no plain mean."""
    check = gradcheck.Check(device)
    cfg = gradcheck.MODEL
    model = Float64Model(check.weights, cfg)
    g = model(check.tokens, check.targets).gradients["layers.0.qkv"]
    q, k, v = np.split(g, [cfg.heads * cfg.head_dim, (cfg.heads + cfg.kv_heads) * cfg.head_dim], axis=1)
    assert min(np.linalg.norm(q), np.linalg.norm(k)) > 0.3 * np.linalg.norm(v)


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the kernel text of a stem (all `times` times that it occurs); # stands for 0 … times - 1."""

    name: str
    stem: str
    old: str
    new: str
    times: int = 1

    def text(self) -> str:
        reference = self.stem.removesuffix(".cu")
        shipped = render.render(self.stem) if reference == self.stem else render.reference_source(reference)
        pairs = [(self.old.replace("#", str(u)), self.new.replace("#", str(u))) for u in range(self.times)]
        pairs = pairs if "#" in self.old else pairs[:1]
        found = sum(shipped.count(old) for old, _ in pairs)
        assert found == self.times, f"{self.name}: {self.old!r} occurs {found} times"
        for old, new in pairs:
            shipped = shipped.replace(old, new)
        return shipped


MUTANTS = [
    Mutant(
        "attention forward: no causal mask",
        "attention.cu",
        "float p = exp_(row[key0] - top);\n        const float kept = key0 + lane <= query ? p : 0.0f;",
        "float p = exp_(row[key0] - top);\n        const float kept = p;",
    ),
    Mutant(
        "attention backward: no causal mask",
        "attention.cu",
        "float p = exp_(probabilities[at] - lse[row]);\n                const float kept = key0 + lane <= query ? p : 0.0f;",
        "float p = exp_(probabilities[at] - lse[row]);\n                const float kept = p;",
    ),
    Mutant(
        "attention: unscaled score",
        "attention.cu",
        "out[(u64)query * pitch] = sum[r] * scale;",
        "out[(u64)query * pitch] = sum[r];",
    ),
    Mutant(
        "attention backward: unscaled score gradient",
        "attention.cu",
        "dscores[at] = kept * (sum[r] - delta[row]) * scale;",
        "dscores[at] = kept * (sum[r] - delta[row]);",
    ),
    Mutant(
        "attention: scores with the wrong key head",
        "attention.cu",
        "const T* k = rows + (heads + head / (heads / kv_heads)) * head_dim;",
        "const T* k = rows + (heads + head % kv_heads) * head_dim;",
    ),
    Mutant(
        "attention backward: the wrong value head",
        "attention.cu",
        "(heads + kv_heads + head / (heads / kv_heads)) * head_dim;",
        "(heads + kv_heads + head % kv_heads) * head_dim;",
    ),
    Mutant(
        "attention: the wrong head in outputs and dq",
        "attention.cu",
        "x_first + head / (heads / kv_heads) * head_dim;",
        "x_first + head % kv_heads * head_dim;",
    ),
    Mutant(
        "attention backward: no delta",
        "attention.cu",
        "kept * (sum[r] - delta[row]) * scale",
        "kept * sum[r] * scale",
    ),
    Mutant(
        "attention backward: dq without its first key",
        "attention.cu",
        "mix(sum, w, 1, source + c, x_stride, 0, last,",
        "mix(sum, w, 1, source + c, x_stride, out_stride == x_stride ? 1 : 0, last,",
    ),
    Mutant(
        "attention backward: dk without its first query",
        "attention.cu",
        "x_stride, key0, context - 1,",
        "x_stride, key0 + (out_first == heads * head_dim ? 1 : 0), context - 1,",
    ),
    Mutant(
        "attention backward: dv without its first query",
        "attention.cu",
        "x_stride, key0, context - 1,",
        "x_stride, key0 + (out_first == heads * head_dim ? 0 : 1), context - 1,",
    ),
    Mutant(
        "attention backward: one query head of the group left out",
        "attention.cu",
        "head < (kv_head + 1) * group;",
        "head < (kv_head + 1) * group - 1;",
    ),
    Mutant(
        "matmul: weight gradients without the last row",
        "matmul.cu",
        "const u32 steps = smaller(TILE_K, k - k0);",
        "const u32 steps = smaller(TILE_K, k - k0) - (LAYOUT == TN ? 1 : 0);",
    ),
    Mutant(
        "matmul: the gradient of normed inputs without the last column of QKV",
        "matmul.cu",
        "const u32 steps = smaller(TILE_K, k - k0);",
        "const u32 steps = smaller(TILE_K, k - k0) - (LAYOUT == NT && k == 96 && k0 > 0 ? 1 : 0);",
    ),
    Mutant("matmul: forgets the sum so far", "matmul.cu", "if (accumulate) {", "if (false) {"),
    Mutant("matmul: forgets the residual", "matmul.cu", "if (has_residual) {", "if (false) {"),
    Mutant("rmsnorm backward: the mean left out", "rmsnorm_backward", "fma.rn.f32      %g, %xhat, %mean, %g;", "", 4),
    Mutant(
        "rmsnorm backward: not scaled by rstd",
        "rmsnorm_backward",
        "fma.rn.f32      %y, %g, %rstd, %old_#;",
        "add.rn.f32      %y, %g, %old_#;",
        4,
    ),
    Mutant(
        "rmsnorm backward: the residual path left out",
        "rmsnorm_backward",
        "fma.rn.f32      %y, %g, %rstd, %old_#;",
        "mul.rn.f32      %y, %g, %rstd;",
        4,
    ),
    Mutant(
        "rmsnorm backward: the weight's gradient from x, not xhat",
        "rmsnorm_backward",
        "fma.rn.f32      %sum, %d_#, %xhat, %sum;",
        "fma.rn.f32      %sum, %d_#, %x_#, %sum;",
        4,
    ),
    Mutant(
        "rmsnorm backward: the weight's gradient without the last row",
        "rmsnorm_backward",
        "mov.u32         %row, %first;",
        "add.u32         %row, %first, 1;",
    ),
    Mutant(
        "rmsnorm weight gradient: the last part left out",
        "add_parts",
        "setp.ge.u32     %is_more, %part, %parts;",
        "add.u32 %next, %part, 1;\n    setp.ge.u32     %is_more, %next, %parts;",
    ),
    Mutant(
        "rmsnorm weight gradient: forgets the sum so far",
        "add_parts",
        "@%in_range ld.global.f32 %sum_0, [%p_out];",
        "",
    ),
    Mutant(
        "rope: turns the same way in the backward pass", "rope", "selp.f32        %s, %s_minus, %s, %is_inverse;", ""
    ),
    Mutant(
        "rope: one half of the pair left out",
        "rope",
        "fma.rn.f32      %y1, %x1, %c, %y1;",
        "selp.f32        %c, 0f00000000, %c, %is_inverse;\n    fma.rn.f32      %y1, %x1, %c, %y1;",
    ),
    Mutant(
        "swiglu backward: the derivative of the sigmoid left out",
        "swiglu_backward",
        "fma.rn.f32      %t, %gate_0, %t, 0f3F800000;",
        "mov.f32         %t, 0f3F800000;",
    ),
    Mutant(
        "swiglu backward: up without the gate",
        "swiglu_backward",
        "mul.rn.f32      %dup_0, %gate_0, %s;",
        "mov.f32         %dup_0, %s;",
    ),
    Mutant(
        "cross-entropy backward: the target left out", "cross_entropy_backward", "sub.rn.f32      %e, %e, %hot;", ""
    ),
    Mutant(
        "cross-entropy backward: the probabilities left out",
        "cross_entropy_backward",
        "sub.rn.f32      %e, %e, %hot;",
        "neg.f32         %e, %hot;",
    ),
    Mutant("cross-entropy backward: not scaled", "cross_entropy_backward", "mul.rn.f32      %e, %e, %scale;", ""),
    Mutant(
        "embedding backward: rows of a token left out",
        "embedding_backward",
        "add.u32         %i, %i, 1;",
        "add.u32         %i, %i, 2;",
    ),
    Mutant(
        "embedding backward: forgets the sum so far",
        "embedding_backward",
        "@%in_row ld.global.f32 %sum_0, [%p_dtable];",
        "",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutants_are_caught(device: Device, mutant: Mutant) -> None:
    report = gradcheck.run(device, overrides={mutant.stem: mutant.text()}, stop_at_failure=True)
    assert not report.passed, mutant.name


def test_report_as_json() -> None:
    row = gradcheck.Row("embedding", "random", 1.0, math.nan, math.inf, False)
    report = gradcheck.Report(False, 4.5, math.nan, (row,))
    assert json.loads(report.to_json()) == {
        "passed": False,
        "loss_at_init": 4.5,
        "memorised_loss": None,
        "rows": [
            {
                "tensor": "embedding",
                "direction": "random",
                "analytic": 1.0,
                "numeric": None,
                "error": None,
                "passed": False,
            }
        ],
    }


def test_command() -> None:
    """The table and the JSON on the CPU device; exit code 0."""
    result = CliRunner().invoke(command, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "layers.1.mlp_down" in result.stdout and "gradcheck passed: all 28 rows" in result.stdout
    assert "FAIL" not in result.stdout
    result = CliRunner().invoke(command, ["--device", "cpu", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["passed"] is True and len(report["rows"]) == 28
    assert set(report) == {"passed", "loss_at_init", "memorised_loss", "rows"}


@pytest.mark.parametrize("spoil", ["row", "initial", "memorised"])
def test_command_fails(monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    """Exit code 1 and the verdict beside what is off, in both forms."""
    row = gradcheck.Row("embedding", "gradient", 1.0, 1.001, 1e-3, True)
    report = gradcheck.Report(False, gradcheck.REFERENCE_LOSS, 0.001, (row,))
    if spoil == "row":
        report = replace(report, rows=(replace(row, numeric=2.0, error=0.5, passed=False),))
    elif spoil == "initial":
        report = replace(report, loss_at_init=4.7)
    else:
        report = replace(report, memorised_loss=1.0)
    monkeypatch.setattr(gradcheck, "run", lambda *args, **kwargs: report)
    result = CliRunner().invoke(command, ["--device", "cpu"])
    assert result.exit_code == 1 and "gradcheck FAILED" in result.stdout
    assert result.stdout.count("FAIL ") + result.stdout.count("FAIL\n") >= 1
    result = CliRunner().invoke(command, ["--device", "cpu", "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["passed"] is False


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0 and "ptxtrain gradcheck --device cpu" in result.stdout
