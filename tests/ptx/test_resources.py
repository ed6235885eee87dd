"""Registers, shared memory and blocks per multiprocessor of every kernel and Spec, held against a table that is checked in.

Nothing may spill. After a change that is meant: `python tests/ptx/test_resources.py` writes the table anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ptxtrain.engine.kernels import rendered
from ptxtrain.engine.ptxas import ARCHITECTURES, find_ptxas
from ptxtrain.ptx import attention_spec, decode_spec, gemv_spec, kit_spec, occupancy, specs
from ptxtrain.ptx.gemm_spec import Epilogue, choose
from ptxtrain.ptx.matmul_spec import CHOICES, CPU_CHOICES

TABLE = Path(__file__).with_name("resources.txt")
# Of the dev preset and of tiny, by threads: for the row of logits that cross_entropy keeps in shared memory.
VOCABS = {512: 32_768, 256: 4_096}


def every_spec() -> list[tuple[str, Any]]:
    """All kernels with all Specs that the ops choose from."""
    found: dict[str, list[Any]] = {stem: [spec] for stem, spec in specs.DEFAULTS.items()}
    every = (*CHOICES, *CPU_CHOICES)
    found["matmul"] = [row.spec(layout, "bf16") for layout in ("nn", "nt", "tn") for row in every]
    found["matmul"] += [row.spec("tt", "f16", Epilogue("f16", "bf16")) for row in CHOICES]
    layouts = (("nn", "f32", "f32"), ("nt", "f32", "f32"), ("tn", "f32", "f32"), ("tt", "f16", "bf16"))
    found["gemm"] = [choose(*of, Epilogue(of[2], of[1]), gpu=gpu) for of in layouts for gpu in (False, True)]
    for stem in ("add_into", "cast_to_bf16", "cast_to_f32"):
        found[stem].append(specs.ElementSpec(vector=4))
    for stem in ("embedding_backward", "embedding_forward"):
        found[stem].append(specs.CopySpec(vector=4))
    for stem in ("swiglu_backward", "swiglu_forward"):
        found[stem] += [
            specs.ActivationSpec(wide=w, half=h) for w, h in ((True, "bf16"), (False, "f16"), (True, "f16"))
        ]
    found["swiglu_forward"] += [specs.ActivationSpec(stream=True), specs.ActivationSpec(wide=True, stream=True)]
    found["rmsnorm_forward"].append(specs.NormSpec(stream=True))
    found["add_parts"] += [specs.PartsSpec(vector, fresh) for vector, fresh in ((4, False), (1, True), (4, True))]
    for stem in ("layernorm_forward", "softmax_backward", "softmax_forward"):
        found[stem] = [kit_spec.TypedRowSpec(dtype) for dtype in kit_spec.ITEM_SIZES]
    adam = kit_spec.AdamSpec
    found["adamw_update"] += [adam(vector=4)] + [
        adam(vector=vector, grads=grads, copy=copy, direct=True)
        for vector in (1, 4)
        for grads, copy in (("f16", "f16"), ("f32", "bf16"))
    ]
    found["adamw_update"] += [adam(grads=grads, master="bf16", direct=True) for grads in kit_spec.ITEM_SIZES]
    found["rope"].append(specs.RopeSpec(half="f16"))
    found["rmsnorm_forward"] += [specs.NormSpec(dtype=dtype) for dtype in kit_spec.ITEM_SIZES]
    found["rmsnorm_backward"] += [specs.NormBackwardSpec(dtype=dtype) for dtype in kit_spec.ITEM_SIZES]
    found["layernorm_backward"] = [kit_spec.TypedPartSpec(dtype) for dtype in kit_spec.ITEM_SIZES]
    found["norm_gemv"] = list(gemv_spec.SHOWN)
    found["attention_decode"] = [decode_spec.DecodeSpec(head_dim) for head_dim in decode_spec.SHOWN_HEADS]
    found["cross_entropy_rows"] += [kit_spec.LossSpec("f16", "i64"), kit_spec.LossSpec("bf16")]
    found["dense_attention_gradient"] += [kit_spec.TypedRowSpec(dtype) for dtype in ("f16", "bf16")]
    found["cross_entropy"] = [specs.CrossEntropySpec(512, on_chip) for on_chip in (True, False)]
    found["cross_entropy"].append(specs.CrossEntropySpec(256, True))  # short rows
    makers = {"forward": attention_spec.forward_spec, "dq": attention_spec.dq_spec, "dkv": attention_spec.dkv_spec}
    for part, make in makers.items():
        found[f"attention_{part}"] = [make(head_dim) for head_dim in attention_spec.HEAD_DIMS]
        found[f"attention_{part}"] += _apart(make, "f16", causal=True)
    return [(stem, spec) for stem, of_stem in sorted(found.items()) for spec in of_stem]


def _apart(make: Callable[..., Any], dtype: str, causal: bool) -> list[Any]:
    """The kit's forms of an attention kernel."""
    return [make(c, dtype=dtype, apart=True, causal=causal) for c in attention_spec.HEAD_DIMS]


def dynamic_shared(stem: str, spec: Any, static: int) -> int:
    """Bytes that a launch asks for beside what the text declares."""
    if stem == "cross_entropy":
        return int(spec.shared_bytes(VOCABS[spec.threads]))
    return int(spec.shared_bytes) if stem == "matmul" and not static else 0


def line_of(stem: str, spec: Any) -> str:
    """A row of the table: registers x blocks for each architecture, then the bytes of shared memory."""
    columns, shared = [], 0
    x, y, z = spec.block
    for architecture in ARCHITECTURES:
        command = [str(find_ptxas()), "-v", f"-arch={architecture}", "--warning-as-error"]
        source = str(rendered(stem, spec))
        done = subprocess.run([*command, source, "-o", os.devnull], capture_output=True, text=True, timeout=120)
        text = done.stdout + done.stderr
        assert done.returncode == 0, f"{stem} {spec} {architecture}: {text}"
        spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        assert spilled is not None and set(spilled.groups()) == {"0"}, f"{stem} {spec} {architecture} spills: {text}"
        used, static = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes smem", text)
        assert used is not None
        shared = int(static[1]) if static else 0
        shared += dynamic_shared(stem, spec, shared)
        columns.append(f"{int(used[1]):3}x{occupancy.blocks(architecture, x * y * z, int(used[1]), shared):<2}")
    return f"{stem:23} {' '.join(columns)} {shared:6} {spec}"


def version() -> str:
    """The assembler's, which the registers depend on."""
    done = subprocess.run([str(find_ptxas()), "--version"], capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r"V[\d.]+", done.stdout)
    assert found is not None
    return found[0]


def whole_table() -> str:
    heads = " ".join(f"{a:6}" for a in ARCHITECTURES)
    rows = ThreadPoolExecutor(os.cpu_count()).map(lambda case: line_of(*case), every_spec())
    return "\n".join(
        [
            f"# ptxas {version()}: registers of a thread x blocks of a multiprocessor; bytes of shared memory of a block",
            f"{'# kernel':23} {heads} shared Spec",
            *(row.rstrip() for row in rows),
            "",
        ]
    )


def test_table() -> None:
    """All Specs assemble without a spill, and need what the table says."""
    now = whole_table().splitlines()
    kept = TABLE.read_text(encoding="utf-8").splitlines()
    if now[0] != kept[0]:
        pytest.skip(f"the table was made with another assembler ({kept[0][2:]}); nothing spills with {version()}")
    changed = sorted(set(now) ^ set(kept))
    assert not changed, "run python tests/ptx/test_resources.py if this is meant:\n" + "\n".join(changed)


@pytest.mark.slow
def test_the_kits_other_forms_do_not_spill() -> None:
    """Those that the table leaves out: other dtypes, and attention without a mask."""
    makers = {"forward": attention_spec.forward_spec, "dq": attention_spec.dq_spec, "dkv": attention_spec.dkv_spec}
    forms = (("bf16", True), ("bf16", False), ("f16", False))
    cases = [(f"attention_{part}", x) for part, make in makers.items() for form in forms for x in _apart(make, *form)]
    cases += [("matmul", row.spec("nn", "bf16", Epilogue("f32", "f16"))) for row in CHOICES]
    for stem, spec in cases:
        line_of(stem, spec)


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "expected"),
    [
        ("sm_80", 128, 128, 0, 4),  # 65,536 registers
        ("sm_80", 128, 129, 0, 3),  # 136 a thread: they come eight at a time
        ("sm_86", 128, 32, 36_864, 2),  # 100 KiB
        ("sm_80", 128, 32, 36_864, 4),  # 164 KiB
        ("sm_90", 1024, 32, 0, 2),  # 64 warps
        ("sm_89", 32, 16, 0, 24),  # blocks
    ],
)
def test_blocks(architecture: str, threads: int, registers: int, shared: int, expected: int) -> None:
    assert occupancy.blocks(architecture, threads, registers, shared) == expected


if __name__ == "__main__":
    TABLE.write_text(whole_table(), encoding="utf-8")
    sys.stdout.write(TABLE.read_text(encoding="utf-8"))
