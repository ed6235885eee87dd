"""NVIDIA's assembler, where it is installed: on the path, or from the wheel nvidia-cuda-nvcc-cu12."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def find_ptxas() -> Path | None:
    """The wheel's ptxas, whose version is known, else the one on the path."""
    name = "ptxas.exe" if os.name == "nt" else "ptxas"
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "bin" / name
        if path.is_file():
            return path
    found = shutil.which(name)
    return Path(found) if found else None


def assemble(ptxas: Path, source: Path, architecture: str) -> str:
    """ptxas's complaints about a PTX file, warnings among them; empty if it has none."""
    command = [str(ptxas), f"-arch={architecture}", "--warning-as-error", str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"{source.name} {architecture}: {(done.stdout + done.stderr).strip()}"
