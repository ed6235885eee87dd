"""Kernels in CUDA C as people write them, compiled by NVRTC with and without fast math, against NumPy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import corpus_control
import corpus_numbers
import corpus_words
import numpy as np
import pytest
from corpus_case import CASES, CORPUS, Case, Dim3, module, run

from ptxtrain.engine.device.nvrtc import compile_to_ptx
from ptxtrain.engine.errors import DeviceError, PtxtrainError
from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.tree import PtxError

assert corpus_control and corpus_numbers and corpus_words  # they register their cases


# Kernels whose blocks wait for those before them, or whose result depends on the order of blocks.
ORDERED = ("scan_chained", "compact", "tickets")


def tensor_core_headers() -> tuple[str, ...]:
    """The folder with `crt/mma.h`, which comes with NVIDIA's compiler and not with the run-time library."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for folder in (Path(root) / "cuda_nvcc" / "include", *sorted(Path(root).glob("cu1*/include"))):
            if (folder / "crt" / "mma.h").is_file():
                return (str(folder),)
    return ()


def folders_of(file: str) -> tuple[str, ...]:
    if file != "wmma":
        return ()
    folders = tensor_core_headers()
    if not folders:
        pytest.skip("crt/mma.h is not installed; pip install nvidia-cuda-nvcc-cu12")
    return folders


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("one", "block"),
    [pytest.param(c, b, id=f"{c.kernel}-{'x'.join(map(str, b))}") for c in CASES for b in c.blocks],
)
def test_kernel(one: Case, block: Dim3, fast: bool) -> None:
    run(one, block, fast, folders_of(one.file))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize("one", [pytest.param(c, id=c.kernel) for c in CASES if c.kernel not in ORDERED])
def test_the_checked_mode_reports_nothing(one: Case, schedule: str) -> None:
    run(one, one.blocks[-1], False, folders_of(one.file), schedule)


def test_every_kernel_has_a_case() -> None:
    listed = {(c.file, c.kernel) for c in CASES} | {("functions", "asserting")}
    found = set()
    for path in sorted(CORPUS.glob("*.cu")):
        try:
            tree = module(path.stem, False, tensor_core_headers() if path.stem == "wmma" else ()).tree
        except PtxError:
            raise
        except PtxtrainError:  # no headers for the tensor cores
            continue
        found |= {(path.stem, name) for name, function in tree.functions.items() if function.is_entry}
    assert found <= listed, found - listed
    assert len(listed) >= 60


def test_a_failed_assertion_ends_the_launch_with_its_text() -> None:
    loaded = module("functions", False)
    x, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    loaded.launch("asserting", grid=(1, 1, 1), block=(64, 1, 1), args=[out, x, np.int32(64)])
    assert (out == x + 1).all()
    with pytest.raises(DeviceError, match=r"asserting: assertion failed: x\[i\] < limit in functions.cu"):
        loaded.launch("asserting", grid=(1, 1, 1), block=(64, 1, 1), args=[out, x, np.int32(63)])


def test_module_variables_live_as_long_as_the_module() -> None:
    source = (CORPUS / "shared.cu").read_text(encoding="utf-8")
    for _ in range(2):
        loaded = load(compile_to_ptx(source, "shared.cu"))
        out, seen = np.zeros(1, np.int32), np.zeros(5, np.float32)
        for calls in (7, 9, 11):
            loaded.launch("variables", grid=(1, 1, 1), block=(32, 1, 1), args=[out, seen])
            assert out[0] == calls
