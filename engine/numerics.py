"""What the bits of a run depend on besides its config and data, as one line: the device's own account, and the kernels' text.

Kernels that training does not use (the kit's, the sampler's) are left out: a change in them is no reason to distrust a run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ptxtrain.engine import model, step
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.identity import join_numerics
from ptxtrain.ptx import render

# Where the order of a sum follows from a shape rather than from a kernel's text.
_RULES = ("matmul_spec.py", "attention_spec.py")
_INCLUDED = re.compile(r'"(\w+\.inc)"')


def numerics_id(device: Device) -> str:
    """The device's kind and the digest of `kernel_texts`."""
    digest = hashlib.sha256()
    for name, text in kernel_texts():
        digest.update(f"{name} {len(text)}\n{text}".encode())
    return join_numerics(device.numerics_id(), digest.hexdigest()[:16])


def kernel_texts(read: Callable[[Path], str] = lambda path: path.read_text(encoding="utf-8")) -> list[tuple[str, str]]:
    """(name, text) of all that the kernels of training are made from: templates, what those include, the text that their
    default Specs give, CUDA C references, and the rules of `_RULES`."""
    texts: dict[str, str] = {}
    for stem, path in render.SOURCES.items():
        if not _trains(stem):
            continue
        texts[path.name] = read(path)
        for included in _INCLUDED.findall(texts[path.name]):
            texts[included] = read(render.FOLDER / included)
        texts[f"{stem}, rendered"] = render.render(stem).partition("\n")[2]  # without the line that names the Spec
    for stem, path in render.REFERENCES.items():
        if _trains(stem):
            texts[path.name] = read(path)
    for path in [*sorted((render.FOLDER / "reference").glob("*.cuh")), *(render.FOLDER / name for name in _RULES)]:
        texts[path.name] = read(path)
    return sorted(texts.items())


def _trains(stem: str) -> bool:
    """Whether a kernel is one of the ops that the model or its step calls: `rmsnorm_backward` is a part of `rmsnorm`."""
    ops = {path.stem for path in (Path(step.__file__).parent / "ops").glob("*.py")}
    op = max((op for op in ops if stem == op or stem.startswith(op + "_")), key=len, default="")
    return op in _ops_of_training()


def _ops_of_training() -> set[str]:
    used = {
        value.__name__.rpartition(".")[2]
        for module in (model, step)
        for value in vars(module).values()
        if isinstance(value, ModuleType) and value.__name__.startswith("ptxtrain.engine.ops.")
    }
    # The fast attention is named after its kernels' stem, the naive one's op.
    return used | {"attention"}
