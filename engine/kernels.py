"""Kernels by name, and the recorder that turns calls of `engine/ops` into a plan.

Kernel text goes rendered (PTX) or compiled by NVRTC (CUDA C references) into readable files in the cache, and from there to
the device. File names carry a digest of their content, so an edited kernel never meets an old file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from ptxtrain.engine.cache import cache_dir, write_once
from ptxtrain.engine.device.base import Arg, Device, Dim3, Kernel, Launch, Plan, check_launch
from ptxtrain.ptx import render

# Kernel text in place of the shipped one, or an edit of it.
Override: TypeAlias = str | Callable[[str], str]

# The references say where they multiply and add in one rounding (fmaf); the compiler is not to choose.
REFERENCE_OPTIONS = ("--fmad=false",)


def _store(stem: str, text: str) -> Path:
    """The cache's file with this text."""
    data = text.encode()
    path = cache_dir("kernels") / f"{stem}-{hashlib.sha256(data).hexdigest()[:16]}.ptx"
    try:
        if path.read_bytes() == data:
            return path
    except OSError:
        pass
    write_once(path, data)
    return path


@functools.lru_cache(maxsize=1024)
def rendered(stem: str, spec: object | None = None) -> Path:
    """The file with the PTX of `ptx/STEM.ptx` for a Spec."""
    return _store(stem, render.render(stem, spec))


@functools.lru_cache(maxsize=64)
def compiled(stem: str, source: str | None = None) -> Path:
    """The file with the PTX that NVRTC makes of `ptx/reference/STEM.cu`, or of `source` in its place."""
    from ptxtrain.engine.device.nvrtc import compile_to_file

    text = render.reference_source(stem) if source is None else source
    return compile_to_file(text, f"{stem}.cu", options=REFERENCE_OPTIONS)


class Recorder:
    """Collects the launches of a plan. An op appends to it; `plan` makes them ready for replay.

    Args:
        device: where the plan will run.
        overrides: kernel text in place of the shipped text: PTX for `STEM` of `ptx/`, CUDA C for `STEM.cu` of
            `ptx/reference/`; or an edit of the shipped text, which serves every Spec. Tests run edited kernels with it.
    """

    def __init__(self, device: Device, overrides: Mapping[str, Override] | None = None) -> None:
        self.device = device
        self.overrides = dict(overrides or {})
        self.launches: list[Launch] = []
        if not self.overrides:
            return
        if unknown := sorted(set(self.overrides) - set(render.SOURCES) - {f"{stem}.cu" for stem in render.REFERENCES}):
            raise KeyError(f"overrides for kernels that do not exist: {', '.join(unknown)}")

    def ptx(self, stem: str, entry: str | None = None, spec: object | None = None) -> Kernel:
        """The kernel `entry` (by default called as the file) of `ptx/STEM.ptx`, rendered for a Spec."""
        override = self.overrides.get(stem)
        if override is None:
            path = rendered(stem, spec)
        else:
            path = _store(stem, override if isinstance(override, str) else override(render.render(stem, spec)))
        return self.device.load(path, entry or stem)

    def reference(self, stem: str, entry: str) -> Kernel:
        """The kernel `entry` of `ptx/reference/STEM.cu`.

        Raises:
            PtxtrainError: NVRTC is missing.
        """
        override = self.overrides.get(f"{stem}.cu")
        text = override if override is None or isinstance(override, str) else override(render.reference_source(stem))
        return self.device.load(compiled(stem, text), entry)

    def launch(self, kernel: Kernel, grid: Dim3, block: Dim3, *args: Arg, shared: int = 0) -> None:
        """Append a launch, its arguments held against the kernel's signature. `shared` is dynamic, in bytes.

        Raises:
            PtxtrainError: an argument does not fit its parameter, or the grid is larger than CUDA allows.
        """
        launch = Launch(kernel, grid, block, args, shared)
        check_launch(launch)
        self.launches.append(launch)

    def take(self) -> list[Launch]:
        """The launches since the last `take` or `plan`, for `Device.execute`."""
        launches, self.launches = self.launches, []
        return launches

    def plan(self) -> Plan:
        """The launches since the last `take` or `plan`, ready for `Device.run`."""
        return self.device.plan(self.take())
