"""What NVRTC makes of the references assembles with ptxas for every architecture; for the PTX see `test_resources`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptxtrain.engine.kernels import compiled, rendered
from ptxtrain.engine.ptxas import ARCHITECTURES, assemble, find_ptxas
from ptxtrain.ptx.render import REFERENCES


@pytest.fixture(scope="module")
def ptxas() -> Path:
    """The assembler of the wheel nvidia-cuda-nvcc-cu12."""
    found = find_ptxas()
    assert found is not None, "ptxas comes with the extra [test]"
    return found


def test_references_assemble(ptxas: Path) -> None:
    files = [compiled(stem) for stem in REFERENCES]
    jobs = [(ptxas, file, architecture) for file in files for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [text for text in pool.map(lambda job: assemble(*job), jobs) if text]
    assert not complaints, "\n".join(complaints)


def test_a_bad_kernel_does_not(ptxas: Path, tmp_path: Path) -> None:
    """The test above can fail."""
    bad = tmp_path / "bad.ptx"
    bad.write_text(rendered("add_into").read_text(encoding="utf-8").replace("add.rn.f32", "add.rn.f33"))
    assert "bad.ptx sm_80" in assemble(ptxas, bad, "sm_80")
