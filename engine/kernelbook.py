"""The shipped kernels as a reader meets them: what there is, each one's text in every form, and whether it is sound.

Sound: NVIDIA's assembler takes it for every architecture, and the CPU device's checked mode finds nothing when steps of a
small model and calls of the kit run through it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine import kernels as texts
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Launch, Plan
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kit.contracts import FLOATS
from ptxtrain.engine.kit.core import on
from ptxtrain.engine.kit.trial import trials
from ptxtrain.engine.ptxas import ARCHITECTURES, assemble, find_ptxas
from ptxtrain.engine.ptxcpu import jit
from ptxtrain.engine.ptxcpu.module import LoadedModule, load
from ptxtrain.ptx import render, specs


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel by its stem. `reference`: naive CUDA C, compiled by NVRTC; otherwise hand-written PTX."""

    stem: str
    summary: str
    reference: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One result of a check."""

    text: str
    passed: bool


def kernels() -> list[KernelText]:
    """All kernels, PTX first. The CUDA C reference of a stem that has both is `STEM.cu`."""
    found = [KernelText(stem, _summary(path), False) for stem, path in render.SOURCES.items()]
    found += [KernelText(f"{stem}.cu", _summary(path), True) for stem, path in render.REFERENCES.items()]
    return found


def functions() -> list[tuple[str, str]]:
    """The kit's functions by name, with the first line of what each one says of itself."""
    from ptxtrain.engine import kit

    found = [(name, getattr(kit, name)) for name in sorted(kit.__all__)]
    return [
        (name, (value.__doc__ or "").splitlines()[0])
        for name, value in found
        if inspect.isfunction(value) and value is not kit.on
    ]


def _summary(path: Path) -> str:
    """The first line of the contract, without the kernel's name."""
    line = next(x for x in path.read_text(encoding="utf-8").splitlines() if x.startswith("// "))
    return line[3:].partition(": ")[2] or line[3:]


def _named(name: str) -> KernelText:
    everything = {kernel.stem: kernel for kernel in kernels()}
    if name not in everything:
        close = difflib.get_close_matches(name, everything, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PtxtrainError(f"there is no kernel called {name}{hint} (`ptxtrain kernels list` shows them)")
    return everything[name]


def _file(kernel: KernelText) -> Path:
    return texts.compiled(kernel.stem.removesuffix(".cu")) if kernel.reference else texts.rendered(kernel.stem)


def show(name: str, form: str) -> str:
    """A kernel's text: as "ptx", as the CPU device's "llvm" IR, or as this processor's "asm".

    Raises:
        PtxtrainError: there is no kernel of that name.
    """
    kernel = _named(name)
    path = _file(kernel)
    if form == "ptx":
        return path.read_text(encoding="utf-8").rstrip("\n")
    module = load(path)
    irs = [module.ir(entry, _block(module, entry, kernel)) for entry in _entries(module)]
    return "\n".join(irs if form == "llvm" else map(jit.assembly, irs))


def _entries(module: LoadedModule) -> list[str]:
    return [f.name for f in module.tree.functions.values() if f.is_entry]


def _block(module: LoadedModule, entry: str, kernel: KernelText) -> tuple[int, int, int]:
    """The block shape that a kernel asks for, or that its Spec has."""
    function = module.tree.entry(entry)
    fixed = function.reqntid or function.maxntid
    if fixed is not None:
        return fixed
    spec = specs.DEFAULTS.get(kernel.stem)
    return spec.block if spec is not None else (specs.LANES, 1, 1)


def check(names: Sequence[str]) -> Iterator[Line]:
    """Check the named kernels, or all; one line for each as it is done."""
    chosen = [_named(name) for name in names] or kernels()
    ptxas = find_ptxas()
    if ptxas is None:
        yield Line("ptxas is not installed (pip install nvidia-cuda-nvcc-cu12): kernels are not assembled", True)
    for kernel in chosen:
        if ptxas is not None:
            complaints = [c for a in ARCHITECTURES if (c := assemble(ptxas, _file(kernel), a))]
            text = complaints[0] if complaints else f"assembles for {', '.join(ARCHITECTURES)}"
            yield Line(f"{kernel.stem}: {text}", not complaints)
    yield from _checked_runs({entry for kernel in chosen for entry in _entries(load(_file(kernel)))})


class _WatchedDevice(CpuDevice):
    """A checked device that remembers which kernels it was given."""

    def __init__(self) -> None:
        super().__init__(threads=1, checked=True)
        self.seen: set[str] = set()

    def plan(self, launches: Sequence[Launch]) -> Plan:
        self.seen.update(launch.kernel.name for launch in launches)
        return super().plan(launches)

    def execute(self, launches: Sequence[Launch]) -> None:
        self.seen.update(launch.kernel.name for launch in launches)
        super().execute(launches)


# A head dimension that all ways know, sizes that are no multiple of a tile, and sequences cut in the middle of one.
_MODEL = ModelConfig(vocab_size=104, context=40, layers=1, width=64, heads=2, kv_heads=1, head_dim=32, mlp_width=72)


def _config(way: str) -> Config:
    return Config(
        name="kernels check",
        model=_MODEL,
        batch=BatchConfig(sequences=4, micro_batch=1, leaves=2),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=1, way=way),
        data=DataConfig(),
    )


def _checked_runs(wanted: set[str]) -> Iterator[Line]:
    """A training step and a token in each way, then the kit in each dtype, checked; a finding ends its run and is its line."""
    seen: set[str] = set()
    for way in ("f32", "bf16", "fast"):
        device = _WatchedDevice()
        try:
            _one_step(device, _config(way))
            yield Line(f"a checked training step, way {way}: nothing found", True)
        except PtxtrainError as error:
            yield Line(f"a checked training step, way {way}: {error}", False)
        finally:
            seen |= device.seen
            device.close()
    for dtype in FLOATS:
        device = _WatchedDevice()
        try:
            yield _kit(device, dtype)
        finally:
            seen |= device.seen
            device.close()
    missed = sorted(wanted - seen)
    if missed:
        yield Line(f"part of neither, so only assembled: {', '.join(missed)}", True)


def _kit(device: CpuDevice, dtype: str) -> Line:
    """Every function of the kit in one dtype."""
    name = ""
    try:
        with on(device):
            for trial in trials(dtype):
                name, call = trial
                call()
    except PtxtrainError as error:
        return Line(f"a checked run of the kit in {dtype}: {name}: {error}", False)
    except ModuleNotFoundError:
        return Line(f"the kit in {dtype}: not run, NumPy has no bf16 here (pip install ml_dtypes)", True)
    return Line(f"a checked run of the kit in {dtype}: nothing found", True)


def _one_step(device: CpuDevice, config: Config) -> None:
    from ptxtrain.engine.step import TrainStep

    step = TrainStep(config, device, way=config.train.way)
    step.initialise(1)
    rows = config.batch.micro_batch * _MODEL.context
    rng = np.random.default_rng(1)
    count = config.batch.sequences // config.batch.micro_batch
    step.begin(count * rows)
    for index in range(count):
        tokens, targets = (rng.integers(0, _MODEL.vocab_size, rows, np.int32) for _ in range(2))
        order, starts = np.empty(rows, np.int32), np.empty(_MODEL.vocab_size + 1, np.int32)
        sort_rows(tokens, _MODEL.vocab_size, order, starts)
        step.micro_batch(index, tokens, targets, order, starts)
    step.finish(1, config.optimizer.lr).wait()
    decoder = step.decoder()
    decoder.read(tokens[:7])
    decoder.step(tokens[7:8].tolist())
