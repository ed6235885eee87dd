"""How the kernels of `corpus/` are described: what they are given, and what NumPy says must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.device.nvrtc import compile_to_ptx
from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.module import LoadedModule

CORPUS = Path(__file__).parent / "corpus"
Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A launch and its right results: by argument, the arrays afterwards. `fast` is the tolerance of fast math."""

    grid: Dim3
    args: Sequence[Any]
    expected: Mapping[int, npt.ArrayLike]
    rtol: float = 0
    atol: float = 0
    shared: int = 0
    fast: float = 0
    threads: int = 2


Build = Callable[[np.random.Generator, Dim3], Launch]


@dataclass(frozen=True)
class Case:
    """A kernel of a file, and the block shapes it is run with."""

    file: str
    kernel: str
    blocks: tuple[Dim3, ...]
    build: Build = field(repr=False)


CASES: list[Case] = []


def case(file: str, *blocks: Dim3) -> Callable[[Build], Build]:
    """Register the kernel of a file that is called as the function is."""

    def register(build: Build) -> Build:
        CASES.append(Case(file, build.__name__, blocks, build))
        return build

    return register


@cache
def module(file: str, fast: bool, folders: tuple[str, ...] = (), schedule: str | None = None) -> LoadedModule:
    """A file of the corpus compiled by NVRTC, with `--use_fast_math` or without; checked if there is a schedule."""
    options = (*(("--use_fast_math",) if fast else ()), *(f"-I{folder}" for folder in folders))
    source = (CORPUS / f"{file}.cu").read_text(encoding="utf-8")
    return load(compile_to_ptx(source, f"{file}.cu", options=options), schedule=schedule)


def run(one: Case, block: Dim3, fast: bool, folders: tuple[str, ...] = (), schedule: str | None = None) -> None:
    """Launch a case and compare."""
    launch = one.build(np.random.default_rng([*one.kernel.encode(), *block]), block)
    module(one.file, fast, folders, schedule).launch(
        one.kernel, grid=launch.grid, block=block, args=launch.args, shared=launch.shared, threads=launch.threads
    )
    rtol = max(launch.rtol, launch.fast) if fast else launch.rtol
    atol = max(launch.atol, launch.fast) if fast else launch.atol
    for index, wanted in launch.expected.items():
        got, right = np.asarray(launch.args[index]), np.asarray(wanted)
        assert got.shape == right.shape, (got.shape, right.shape)
        if rtol == atol == 0:
            np.testing.assert_array_equal(got, right, f"argument {index}")
        else:
            wide = (got.astype(np.float64), right.astype(np.float64))
            np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, err_msg=f"argument {index}")


def blocks_for(count: int, block: Dim3) -> Dim3:
    """A one-dimensional grid that covers `count` threads."""
    return -(-count // block[0]), 1, 1


def floats(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.normal(size=shape).astype(np.float32)


def ints(rng: np.random.Generator, low: int, high: int, *shape: int) -> npt.NDArray[np.int32]:
    return rng.integers(low, high, shape, dtype=np.int32)
