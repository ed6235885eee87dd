"""The fake and the CUDA device against the CuPy that is installed: a renamed function or parameter shows here.

CuPy imports without a driver. Its classes are compiled, so a signature is read from `inspect` or else from the docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cublas
import fake_cupy
import pytest

from ptxtrain.engine.device import cuda, cuda_errors

cupy = pytest.importorskip("cupy")

FAKES: dict[str, Any] = {
    "cuda.Stream": fake_cupy.Stream,
    "cuda.Event": fake_cupy.Event,
    "cuda.Graph": fake_cupy.Graph,
    "cuda.Device": fake_cupy.Device,
    "cuda.MemoryPointer": fake_cupy.MemoryPointer,
    "cuda.UnownedMemory": fake_cupy.UnownedMemory,
    "cuda.runtime": fake_cupy.Runtime,
    "cuda.cublas": fake_cublas.Cublas,
    "cuda.MemoryPool": fake_cupy.MemoryPool,
    "cuda.get_elapsed_time": fake_cupy.get_elapsed_time,
    "cuda.alloc": fake_cupy.alloc,
    "cuda.alloc_pinned_memory": fake_cupy.alloc_pinned_memory,
    "RawModule": fake_cupy.RawModule,
    "RawKernel": fake_cupy.RawKernel,
}
# What the fake has for itself, or what CuPy makes and no caller does.
OWN = {
    "put",
    "execute",
    "state",
    "check",
    "RawKernel.__init__",
    "cuda.Graph.__init__",
    "cuda.runtime.__init__",
    "cuda.cublas.__init__",
    "cuda.MemoryPool.__init__",
}
OWN_PARAMETERS = {"self", "state", "args"}


def real(path: str) -> Any:
    value = cupy
    for part in path.split("."):
        value = getattr(value, part)
    return value


def faked() -> Iterator[tuple[str, Any]]:
    """Every callable and property that the fake has, as CuPy calls it."""
    for path, fake in FAKES.items():
        if not inspect.isclass(fake):
            yield path, fake
            continue
        for name, value in vars(fake).items():
            full = f"{path}.{name}"
            if name in OWN or full in OWN or (name.startswith("_") and name not in ("__init__", "__call__", "__add__")):
                continue
            yield full, value


def parameters(path: str) -> list[str]:
    """The parameter names of a function of CuPy's, with "*" before keyword-only ones."""
    target = real(path.removesuffix(".__init__"))
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        signature = None
    if signature is not None and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        names: list[str] = []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
                names.append("*")
            names.append(parameter.name)
        return names
    name = path.removesuffix(".__init__").rsplit(".", 1)[-1]
    found = re.findall(rf"^(?:\w+\.)?{name}\((.*)\)", inspect.getdoc(target) or "", re.MULTILINE)
    assert found, f"no signature in the docstring of {path}"
    text = max(found, key=len).replace("\\*", "*")
    # "str path=None" -> "path", "size_t size" -> "size", "*" stays
    return [
        part.split("=")[0].split(":")[0].split()[-1] for part in re.split(r",\s*", re.sub(r"\(.*?\)", "", text)) if part
    ]


@pytest.mark.parametrize("path", [path for path, _ in faked()])
def test_cupy_has_what_the_fake_has(path: str) -> None:
    fake = dict(faked())[path]
    if path.startswith("cuda.cublas"):
        try:
            real("cuda.cublas")
        except ImportError:
            pytest.skip("cuBLAS is not installed (pip install nvidia-cublas-cu12)")
    real(path.removesuffix(".__init__"))  # it exists
    if not callable(fake):
        return  # a property or constant
    if path.endswith("__add__"):
        return
    there = parameters(path)
    for name, parameter in inspect.signature(fake).parameters.items():
        if name in OWN_PARAMETERS:
            continue
        assert name in there, f"{path} has no parameter {name}: {there}"
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        assert "*" not in there[: there.index(name)], f"{name} of {path} is keyword-only"
    positional = [
        n
        for n, p in inspect.signature(fake).parameters.items()
        if p.kind is not p.KEYWORD_ONLY and n not in OWN_PARAMETERS
    ]
    assert [n for n in there if n in positional] == positional, f"the order of {path}: {there}"


def test_every_name_the_device_uses_exists() -> None:
    """Read from the source, so that a path that no test takes is covered too."""
    source = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (cuda, cuda_errors))
    source += (Path(cuda.__file__).parent / "choice.py").read_text(encoding="utf-8")
    names = {f"cuda.{name}" for name in re.findall(r"cupy\.cuda\.(\w+(?:\.\w+)?)", source)}
    names |= {
        f"cuda.runtime.{name}" for name in re.findall(r"\bruntime\.(\w+)", source) if name not in ("split_version",)
    }
    names |= set(re.findall(r"cupy\.([A-Z]\w+|get_\w+)", source))
    assert {"cuda.alloc", "cuda.Event", "cuda.runtime.driverGetVersion", "RawModule"} <= names
    for name in sorted(names):
        try:
            real(name)
        except ImportError:
            assert name == "cuda.cublas", name  # the one library that not everybody has


def test_errors_carry_a_status() -> None:
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert cuda_errors.status_of(error) == 2 and cuda_errors.is_out_of_memory(error)
    assert isinstance(error, RuntimeError) and "cudaErrorMemoryAllocation" in str(error)
    assert cuda_errors.is_out_of_memory(cupy.cuda.memory.OutOfMemoryError(100, 20))
    assert "status" in inspect.getdoc(cupy.cuda.driver.CUDADriverError.__init__) or "status" in str(
        inspect.signature(cupy.cuda.driver.CUDADriverError)
    )


def test_statuses_mean_what_the_table_says() -> None:
    """The runtime inside CuPy names each status; the table's words must be about the same thing."""
    names = {
        2: "MemoryAllocation",
        3: "InitializationError",
        34: "StubLibrary",
        35: "InsufficientDriver",
        46: "DevicesUnavailable",
        100: "NoDevice",
        209: "NoKernelImageForDevice",
        214: "ECCUncorrectable",
        218: "InvalidPtx",
        221: "JitCompilerNotFound",
        222: "UnsupportedPtxVersion",
        304: "OperatingSystem",
        700: "IllegalAddress",
        701: "LaunchOutOfResources",
        702: "LaunchTimeout",
        715: "IllegalInstruction",
        716: "MisalignedAddress",
        719: "LaunchFailure",
        801: "NotSupported",
        802: "SystemNotReady",
        803: "SystemDriverMismatch",
        804: "CompatNotSupportedOnDevice",
        900: "StreamCaptureUnsupported",
        999: "Unknown",
    }
    for status, name in names.items():
        assert f"cudaError{name}:" in str(cupy.cuda.runtime.CUDARuntimeError(status)), status


def test_the_attribute_of_shared_memory_is_the_fakes() -> None:
    assert cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin == fake_cupy.OPTIN


def test_device_properties_have_the_keys() -> None:
    """They can be asked for with a GPU only; the compiled module holds their names."""
    binary = Path(cupy.cuda.runtime.__file__)
    assert binary.suffix != ".so" or all(key in binary.read_bytes() for key in (b"totalGlobalMem", b"name"))


def test_without_a_driver_cupy_reports_version_zero_or_a_real_one() -> None:
    version = cupy.cuda.runtime.driverGetVersion()
    assert version == 0 or version >= 11000
    assert cupy.cuda.runtime.runtimeGetVersion() >= 12000
