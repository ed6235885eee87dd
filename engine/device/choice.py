"""Which device runs the kernels, and why; and what `ptxtrain info` tells of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from ptxtrain.engine.cache import cache_root
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import DeviceError, PtxtrainError
from ptxtrain.engine.ptxcpu.checked import schedule as checks

DEVICES = ("auto", "cuda", "cpu")
VARIABLE = "PTXTRAIN_DEVICE"

# What decides how fast kernels run here, in LLVM's names; `facts` lists those that the processor has.
_FEATURES = (
    *("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"),
    *("amx-tile", "amx-bf16", "neon", "fullfp16", "bf16", "i8mm", "sve", "sve2", "sme"),
)


@dataclass(frozen=True)
class Choice:
    """A choice and its reason: `Choice("cpu", "no NVIDIA driver found (libcuda.so.1)")`."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def open_device(wanted: str | None, threads: int | None = None, checked: bool | None = None) -> tuple[Device, Choice]:
    """Open the device that is `wanted`.

    Args:
        wanted: "auto" (CUDA where there is a GPU that can run the kernels, else the CPU), "cuda" or "cpu"; None means
            `$PTXTRAIN_DEVICE`, or "auto" without it.
        threads: of the CPU device; None means `$PTXTRAIN_THREADS`, or every core.
        checked: run kernels in the CPU device's checked mode; None means as `$PTXTRAIN_CHECKED` says.

    Raises:
        PtxtrainError: no such device, or checked runs on "cuda".
        DeviceError: "cuda" was asked for and cannot be used; the line says why and what to do.
    """
    source = "asked for"
    if wanted is None:
        wanted = os.environ.get(VARIABLE) or "auto"
        source = f"${VARIABLE}"
    if wanted not in DEVICES:
        where = f" in ${VARIABLE}" if source != "asked for" else ""
        raise PtxtrainError(f"unknown device {wanted!r}{where}; choose one of {', '.join(DEVICES)}")
    order = checks.wanted(checked)
    if order is not None:
        if wanted == "cuda":
            raise PtxtrainError(
                "the checked mode runs on the CPU device alone: use --device cpu, or compute-sanitizer on the GPU"
            )
        reason = f"{source}, checked" if wanted == "cpu" else "the checked mode runs there"
        return _cpu(threads, str(order)), Choice("cpu", reason)
    if wanted == "cpu":
        return _cpu(threads), Choice("cpu", source)
    try:
        device, what = _cuda()
    except DeviceError as error:
        if wanted == "cuda":
            raise
        return _cpu(threads), Choice("cpu", getattr(error, "reason", str(error)))
    return device, Choice("cuda", f"{source}, {what}" if wanted == "cuda" else what)


def _cpu(threads: int | None, checked: str | None = None) -> Device:
    """The CPU device, in checked mode if an order is given."""
    from ptxtrain.engine.device.cpu import CpuDevice

    return CpuDevice(threads, checked=checked is not None, schedule=checked)


def _cuda() -> tuple[Device, str]:
    from ptxtrain.engine.device.cuda import CudaDevice

    device = CudaDevice()
    return device, "card {} with compute capability {}.{}".format(device.name, *device.card.capability)


def facts(wanted: str | None = None, threads: int | None = None) -> list[tuple[str, str]]:
    """What this machine has and what would be chosen, as (name, value) lines. Never raises: what fails is a value."""
    lines = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    device: Device | None = None
    try:
        device, choice = open_device(wanted, threads)
        lines.append(("device", str(choice)))
        lines.append(("numerics", device.numerics_id()))
    except PtxtrainError as error:
        lines.append(("device", f"none: {error}"))
    return [
        *lines,
        (f"${VARIABLE}", os.environ.get(VARIABLE) or "not set"),
        *_cuda_facts(),
        ("nvrtc", _nvrtc_fact()),
        *_cpu_facts(device if device is not None and device.kind == "cpu" else None, threads),
        ("numpy", _version("numpy")),
        ("kernel cache", str(cache_root())),
    ]


def _cuda_facts() -> list[tuple[str, str]]:
    from ptxtrain.engine.device import cuda, cuda_errors

    try:
        cupy = cuda_errors.import_cupy()
    except DeviceError as error:
        return [("cupy", str(error))]
    runtime = cupy.cuda.runtime
    built = "{}.{}".format(*cuda_errors.split_version(runtime.runtimeGetVersion()))
    lines = [("cupy", f"{cupy.__version__}, with the runtime of CUDA {built}")]
    try:
        found = cuda.cards(cupy)
    except DeviceError as error:
        return [*lines, ("cuda", str(error))]
    driver = "{}.{}".format(*cuda_errors.split_version(runtime.driverGetVersion()))
    lines.append(("driver", f"{_driver_release()}for CUDA {driver}"))
    for card in found:
        verdict = "" if card.capability >= cuda_errors.MINIMUM_CAPABILITY else ", too weak: the kernels need 8.0"
        lines.append(
            (
                f"card {card.index}",
                f"{card.name}, compute capability {card.capability[0]}.{card.capability[1]}, "
                f"{card.memory / (1 << 30):.1f} GiB{verdict}",
            )
        )
    return lines


def _driver_release() -> str:
    """The release of the NVIDIA driver's kernel module with a space, e.g. "580.65.06 ", where Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return f"{match[1]} " if match else ""


def _nvrtc_fact() -> str:
    from ptxtrain.engine.device import nvrtc

    try:
        tools = nvrtc.toolchain()
    except PtxtrainError as error:
        return str(error)
    headers = f"headers {tools.headers} in {tools.include}" if tools.include else "no CUDA headers found"
    return f"{tools.version}, {headers}"


def _cpu_facts(device: Device | None, threads: int | None) -> list[tuple[str, str]]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    lines = [
        ("llvmlite", "{}, LLVM {}.{}.{}".format(_version("llvmlite"), *binding.llvm_version_info)),
        ("cpu features", " ".join(name for name in _FEATURES if features.get(name)) or "none of those that matter"),
    ]
    try:
        lines.append(("bf16 products", _products_fact()))
        device = device or _cpu(threads)
    except PtxtrainError as error:
        return [("cpu", str(error)), *lines]
    count = getattr(device, "threads", None)
    return [
        ("cpu", f"{device.name} ({binding.get_host_cpu_name()})"),
        ("threads", f"{count} of {os.cpu_count()}"),
        *lines,
    ]


# How tensor-core products are done on the CPU, and what PTXTRAIN_CPU=portable costs instead (1024 x 1024, measured).
_PRODUCTS = {
    "tiles": "matrix tiles; PTXTRAIN_CPU=portable gives the same bits on every machine, large ones take 4.6 times as long",
    "dot": "the processor's bf16 dot products; PTXTRAIN_CPU=portable gives the same bits on every machine, at half the speed",
    "fma": "f32 multiply-adds, the same bits on every machine",
}


def _products_fact() -> str:
    from ptxtrain.engine.ptxcpu.jit import bf16_products

    return _PRODUCTS[bf16_products()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
