"""Every kernel, rendered or compiled by NVRTC, assembles with ptxas for every architecture that is supported."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptxtrain.engine.kernels import compiled, rendered
from ptxtrain.ptx.render import REFERENCES, SOURCES

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="module")
def ptxas() -> Path:
    """The assembler of the wheel nvidia-cuda-nvcc-cu12."""
    import nvidia.cuda_nvcc

    folder = Path(next(iter(nvidia.cuda_nvcc.__path__)))
    return folder / "bin" / ("ptxas.exe" if os.name == "nt" else "ptxas")


def assemble(ptxas: Path, source: Path, architecture: str) -> str:
    """ptxas's complaints, empty if it has none."""
    command = [str(ptxas), f"-arch={architecture}", "--warning-as-error", str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"{source.name} {architecture}: {(done.stdout + done.stderr).strip()}"


def test_everything_assembles(ptxas: Path) -> None:
    files = [rendered(stem) for stem in SOURCES] + [compiled(stem) for stem in REFERENCES]
    jobs = [(ptxas, file, architecture) for file in files for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [text for text in pool.map(lambda job: assemble(*job), jobs) if text]
    assert not complaints, "\n".join(complaints)


def test_a_bad_kernel_does_not(ptxas: Path, tmp_path: Path) -> None:
    """The test above can fail."""
    bad = tmp_path / "bad.ptx"
    bad.write_text(rendered("add_into").read_text(encoding="utf-8").replace("add.rn.f32", "add.rn.f33"))
    assert "bad.ptx sm_80" in assemble(ptxas, bad, "sm_80")
