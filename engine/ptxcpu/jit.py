"""LLVM IR to native code: target, passes, objects and their cache on disk, loading.

Objects are cached under a key of everything that they depend on: a kernel's text and block shape, the processor's features,
LLVM's version, this compiler's own text. A cached kernel loads in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from ptxtrain.engine.cache import cache_dir, write_once
from ptxtrain.engine.errors import PtxtrainError

GENERATOR = 1  # raise it when the same kernel would give other bits
_MAGIC = b"ptxcpu2\n"

_lock = threading.Lock()
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Native:
    """Loaded machine code. `keep` holds what must live as long as the addresses are used."""

    addresses: dict[str, int]
    frame_bytes: int
    keep: Any


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def host_features() -> tuple[str, str]:
    """The processor's name and feature string, as LLVM has them; with `PTXTRAIN_CPU=avx2` those of a Haswell."""
    llvm = _llvm()
    if os.environ.get("PTXTRAIN_CPU") == "avx2":
        return "haswell", ""
    features = llvm.get_host_cpu_features()
    # Some tunings halve the vectors for the sake of clock rates of older chips.
    text = features.flatten()
    if features.get("avx512f"):
        text += ",-prefer-256-bit"
    return llvm.get_host_cpu_name(), text


@cache
def _tiles_allowed() -> bool:
    """Whether the processor has matrix tiles of brain floats and the system lets this process use them.

    Linux grants the tiles' state (feature 18) to a process that asks once, by arch_prctl(ARCH_REQ_XCOMP_PERM).
    """
    features = host_features()[1].split(",")
    if not {"+amx-tile", "+amx-bf16"} <= set(features) or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return int(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)) == 0


def bf16_products() -> str:
    """How products of brain floats are done: "tiles", "dot" or "fma" (see `lower/mma.py`); the bits depend on it.

    `PTXTRAIN_CPU` asks for one of them: `portable` is "fma", the same bits on every machine, and `avx2` does without AVX-512 as
    well. Intel's vdpbf16ps takes longer than the two fused multiply-adds that it stands for (55 against 44 ns for a
    product), AMD's is twice as fast (24.5 against 46).

    Raises:
        PtxtrainError: the one asked for is unknown or not to be had here.
    """
    wanted = os.environ.get("PTXTRAIN_CPU", "")
    cpu, features = host_features()
    has_dot = "+avx512bf16" in features.split(",")
    if wanted in ("portable", "fma", "avx2"):
        return "fma"
    if wanted == "dot" and has_dot:
        return "dot"
    if wanted in ("", "tiles") and _tiles_allowed():
        return "tiles"
    if wanted:
        known = "portable, avx2, tiles (Intel AMX) or dot (AVX512-BF16)"
        raise PtxtrainError(f"PTXTRAIN_CPU is {wanted!r}; this processor takes {known}, if it has them")
    return "dot" if has_dot and cpu.startswith("znver") else "fma"


@cache
def _target_machine() -> Any:
    llvm = _llvm()
    cpu, features = host_features()
    target = llvm.Target.from_default_triple()
    # Code generation level 1: level 2 is no faster here and takes twice the time.
    return target.create_target_machine(cpu=cpu, features=features, opt=1, reloc="pic", codemodel="default", jit=True)


def object_for(ir: str, triple: str, cpu: str, features: str) -> bytes:
    """An object file for another machine, to see that code can be made for it."""
    llvm = _llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=1, reloc="pic")
    module = llvm.parse_assembly(ir)
    module.triple, module.data_layout = triple, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


@cache
def _linker() -> Any:
    return _llvm().create_lljit_compiler(_target_machine())


def optimise(ir: str, *, level: int = 1, vectorise: bool = False) -> Any:
    """Parse IR and run LLVM's standard passes; `vectorise` turns its loops into vectors.

    Raises:
        PtxtrainError: LLVM refuses the text. That is this compiler's mistake, not the user's.
    """
    llvm = _llvm()
    machine = _target_machine()
    try:
        module = llvm.parse_assembly(ir)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise PtxtrainError(f"the CPU device's compiler made IR that LLVM refuses: {error}") from error
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = vectorise
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


def assembly(ir: str) -> str:
    """The machine code as text, for reading."""
    with _lock:
        return str(_target_machine().emit_assembly(optimise(ir)))


@cache
def compiler_version() -> str:
    """A digest of this compiler's own text, so that code made by another version of it is never taken from the cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _key(parts: Sequence[str]) -> str:
    versions = (compiler_version(), str(_llvm().llvm_version_info), *host_features(), bf16_products())
    return hashlib.sha256("\0".join((*versions, *parts)).encode()).hexdigest()


def compile_object(ir: str, *, vectorise: bool = False) -> tuple[int, bytes]:
    """An object file, and the bytes of a warp's coroutine frame (0 without barriers)."""
    module = optimise(ir, level=2 if vectorise else 1, vectorise=vectorise)
    found = re.search(r"store volatile i64 (\d+), ptr @frame\.size", str(module)) if "@frame.size" in ir else None
    return int(found.group(1)) if found else 0, _target_machine().emit_object(module)


Facts: TypeAlias = tuple[int, int, int]  # what the maker of IR wants to know again of cached code


def load(ir: str, names: tuple[str, ...], *, vectorise: bool = False) -> Native:
    """Machine code for the functions `names` of a module, from the cache or compiled; see `optimise`."""
    parts = ("ir", "loops to vectors" if vectorise else "", ir)
    return load_keyed(parts, names, lambda: (ir, (0, 0, 0)), vectorise=vectorise)[0]


def is_cached(parts: Sequence[str]) -> bool:
    """Whether `load_keyed` would find something under `parts`."""
    return (cache_dir("objects") / f"{_key(parts)}.o").exists()


def load_keyed(
    parts: Sequence[str], names: tuple[str, ...], make: Callable[[], tuple[str, Facts]], *, vectorise: bool = False
) -> tuple[Native, Facts]:
    """As `load` for code that `parts` define; `make` gives its IR, and three numbers kept with it, if it is not there.

    A damaged cache file is made again.
    """
    with _lock:
        key = _key(parts)
        path = cache_dir("objects") / f"{key}.o"
        found = _read(path)
        if found is None:
            ir, facts = make()
            frame, code = compile_object(ir, vectorise=vectorise)
            head = struct.pack("<4Q", frame, *facts)
            write_once(path, _MAGIC + hashlib.sha256(head + code).digest() + head + code)
        else:
            frame, facts, code = found
        library = _llvm().JITLibraryBuilder().add_object_img(code).add_current_process()
        for name in names:
            library.export_symbol(name)
        # The same code may be loaded twice, by two modules of one text; each library needs a name of its own.
        tracker = library.link(_linker(), f"{key}-{next(_serial)}")
        return Native({name: tracker[name] for name in names}, frame, tracker), facts


def _read(path: Path) -> tuple[int, Facts, bytes] | None:
    """frame, facts and code of a cache file; None if it is not there or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC)
    body = data[start + 32 :]
    if not data.startswith(_MAGIC) or len(body) < 32 or hashlib.sha256(body).digest() != data[start : start + 32]:
        return None
    frame, *facts = struct.unpack("<4Q", body[:32])
    return frame, (facts[0], facts[1], facts[2]), body[32:]
