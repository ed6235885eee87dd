"""CUDA C to PTX: what comes out, the cache, and one line for each thing that goes wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptxtrain.engine.device import nvrtc
from ptxtrain.engine.device.nvrtc import Toolchain, compile_to_file, compile_to_ptx, lower_version
from ptxtrain.engine.errors import PtxtrainError

pytest.importorskip("cupy")

SOURCE = """
#include <cuda_bf16.h>
extern "C" __global__ void total(float* out, const __nv_bfloat16* x, int count) {
    __shared__ float part[WIDTH];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += WIDTH) sum += expf(__bfloat162float(x[i]));
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WIDTH; i++) sum += part[i];
        *out = sum;
    }
}
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder that NVRTC's output goes to."""
    monkeypatch.setenv("PTXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nvrtc"


def one_line(source: str, **kwargs: Any) -> str:
    with pytest.raises(PtxtrainError) as caught:
        compile_to_ptx(source, "bad.cu", **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_source_becomes_ptx_with_its_origin_on_top(fresh: Path) -> None:
    ptx = compile_to_ptx(SOURCE, "total.cu", defines={"WIDTH": "64"}, options=["-fmad=false"])
    first = ptx.splitlines()[0]
    assert first.startswith("// total.cu compiled by NVRTC ") and first.endswith(
        "-arch=compute_80 -fmad=false -DWIDTH=64"
    )
    assert ".visible .entry total(" in ptx and ".target sm_80" in ptx and "[256];" in ptx


def test_the_version_is_one_that_every_driver_for_cuda_12_takes(fresh: Path) -> None:
    match = re.search(
        r"^\.version (\d+)\.(\d+)$", compile_to_ptx(SOURCE, "t.cu", defines={"WIDTH": "64"}), re.MULTILINE
    )
    assert match and (int(match[1]), int(match[2])) <= (8, 0)


def test_lowering_touches_the_version_alone() -> None:
    text = "// x\n.version 8.8\n.target sm_80 // .version 9.9\n"
    assert lower_version(text) == text.replace("8.8", "8.0")
    assert lower_version(".version 7.4\n.target sm_80") == ".version 7.4\n.target sm_80"
    assert lower_version(".version 10.1") == ".version 8.0"


def test_the_text_assembles_for_every_chip(fresh: Path) -> None:
    nvcc = pytest.importorskip("nvidia.cuda_nvcc")
    ptxas = next(Path(nvcc.__path__[0]).glob("bin/ptxas*"))
    path = compile_to_file(SOURCE, "total.cu", defines={"WIDTH": "64"})
    for arch in ("sm_80", "sm_90", "sm_120"):
        run = subprocess.run(
            [ptxas, f"-arch={arch}", str(path), "-o", str(fresh / "out")], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr


def test_the_second_time_nothing_is_compiled(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_to_file(SOURCE, "total.cu", defines={"WIDTH": "64"})
    assert first.parent == fresh and first.name.startswith("total-")
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_to_file(SOURCE, "total.cu", defines={"WIDTH": "64"}) == first


def test_anything_that_matters_makes_another_file(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: ".version 8.0\n")
    paths = [
        compile_to_file(SOURCE, "a.cu", defines={"WIDTH": "64"}),
        compile_to_file(SOURCE, "a.cu", defines={"WIDTH": "32"}),
        compile_to_file(SOURCE + " ", "a.cu", defines={"WIDTH": "64"}),
        compile_to_file(SOURCE, "a.cu", defines={"WIDTH": "64"}, options=["-fmad=false"]),
        compile_to_file(SOURCE, "a.cu", defines={"WIDTH": "64"}, arch="compute_90"),
    ]
    tools = nvrtc.toolchain()
    monkeypatch.setattr(
        nvrtc, "toolchain", lambda: Toolchain(tools.nvrtc, "99.0", tools.cuda, tools.include, tools.headers)
    )
    paths.append(compile_to_file(SOURCE, "a.cu", defines={"WIDTH": "64"}))
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"// total.cu", None])
def test_a_damaged_cache_file_is_made_again(fresh: Path, damage: bytes | None) -> None:
    path = compile_to_file(SOURCE, "total.cu", defines={"WIDTH": "64"})
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] if damage is None else damage)
    assert compile_to_file(SOURCE, "total.cu", defines={"WIDTH": "64"}).read_bytes() == good


def test_the_first_error_is_told_with_its_line(fresh: Path) -> None:
    text = one_line('extern "C" __global__ void f() {\n  foo();\n  bar();\n}')
    assert re.match(r'bad\.cu\(2\): error: identifier "foo" is undefined \(and 1 more\) \[NVRTC \d+\.\d+\]$', text)
    assert not list(fresh.glob("*.ptx"))


def test_a_missing_header_names_the_package(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = nvrtc.toolchain()
    text = one_line('#include "nonesuch.h"\n')
    assert "nonesuch.h" in text and f"pip install '{nvrtc.package('runtime', tools.cuda)}'" in text
    monkeypatch.setattr(nvrtc, "toolchain", lambda: Toolchain(tools.nvrtc, tools.version, 12, None, "none"))
    text = one_line("#include <cuda_bf16.h>\n")
    assert "headers were not found" in text and "pip install 'nvidia-cuda-runtime-cu12'" in text
    compile_to_ptx('extern "C" __global__ void f() {}', "plain.cu")  # needs no header


def test_an_unknown_architecture_is_told(fresh: Path) -> None:
    assert "arch" in one_line('extern "C" __global__ void f() {}', arch="compute_19")


def test_packages_by_cuda_version() -> None:
    assert nvrtc.package("nvrtc", 12) == "nvidia-cuda-nvrtc-cu12"
    assert nvrtc.package("runtime", 13) == "nvidia-cuda-runtime>=13,<14"


def test_a_missing_nvrtc_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import runtime

    def missing() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: cannot open\nmore")

    monkeypatch.setattr("cupy.cuda.nvrtc", SimpleNamespace(getVersion=missing))
    nvrtc.toolchain.cache_clear()
    try:
        with pytest.raises(
            PtxtrainError, match=r"^NVRTC \d+ cannot be loaded \(CuPy failed .*cannot open\).*pip install '"
        ) as caught:
            nvrtc.toolchain()
        assert nvrtc.package("nvrtc", runtime.runtimeGetVersion() // 1000) in str(caught.value)
    finally:
        nvrtc.toolchain.cache_clear()


def test_wheels_of_both_layouts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (
        "cuda_runtime/include",
        "cuda_nvrtc/lib",
        "cuda_nvrtc/bin",
        "cu13/include",
        "cu13/lib",
        "cu13/bin/x86_64",
    ):
        (tmp_path / "nvidia" / folder).mkdir(parents=True)
    monkeypatch.setattr(
        nvrtc.importlib.util, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[tmp_path / "nvidia"])
    )

    def found(cuda: int, kind: str) -> list[str]:
        return [path.relative_to(tmp_path / "nvidia").as_posix() for path in nvrtc._wheel_folders(cuda, kind)]

    assert found(12, "include") == ["cuda_runtime/include"] and found(13, "include") == ["cu13/include"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert found(12, "library") == ["cuda_nvrtc/lib"] and found(13, "library") == ["cu13/lib"]
    monkeypatch.setattr(sys, "platform", "win32")
    assert found(12, "library") == ["cuda_nvrtc/bin"] and found(13, "library")[0] == "cu13/bin/x86_64"


def test_macos_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    nvrtc.toolchain.cache_clear()
    try:
        with pytest.raises(PtxtrainError, match=r"^macOS is not supported"):
            nvrtc.toolchain()
    finally:
        nvrtc.toolchain.cache_clear()
