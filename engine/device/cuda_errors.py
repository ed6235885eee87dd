"""What CuPy's and the driver's errors mean: one line with what is wrong and what to do, as a `DeviceError`."""

from __future__ import annotations

import sys
from typing import Any

from ptxtrain.engine.errors import DeviceError

Version = tuple[int, int]

MINIMUM_CAPABILITY = (8, 0)
DRIVERS_URL = "https://www.nvidia.com/drivers"
LIBCUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# The first driver of each CUDA major version (Linux, Windows), from CUDA's release notes, "CUDA Toolkit and Minimum Required
# Driver Versions" and "Minimum Required Driver Version for CUDA Minor Version Compatibility".
_FIRST_DRIVER = {12: "525 on Linux, 528 on Windows", 13: "580"}


class NoCuda(DeviceError):
    """CUDA cannot be used on this machine. `reason` alone is what an automatic choice prints."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}; {remedy}")


# Status (the same number in the runtime's and the driver's enumeration) -> what happened, what to do.
# CUDA Runtime API, "Data types used by CUDA Runtime", cudaError.
_BROKEN = f"reboot, or install the driver again ({DRIVERS_URL}); `nvidia-smi` must work. --device cpu needs no driver"
_UPDATE = f"update the driver ({DRIVERS_URL})"
_KERNEL = "a bug in a kernel: find it with CUDA_LAUNCH_BLOCKING=1, or run compute-sanitizer"
_MEANING: dict[int, tuple[str, str]] = {
    1: ("CUDA was given an invalid value", "please report it with this line"),
    2: (
        "out of memory on the GPU",
        "use a smaller micro_batch, or free memory that other programs hold (`nvidia-smi`)",
    ),
    3: ("broken NVIDIA driver: it could not be initialised", _BROKEN),
    9: ("launch failure: grid, block or shared memory exceed what the GPU allows", "please report it with this line"),
    34: (
        "broken NVIDIA driver: a stub library stands in its place",
        f"remove the stub {LIBCUDA} from the library path",
    ),
    35: ("NVIDIA driver too old", _UPDATE),
    46: ("the GPU is busy or in exclusive mode", "end the other program, or see `nvidia-smi -q -d COMPUTE`"),
    100: ("the NVIDIA driver sees no GPU", "check `nvidia-smi` and $CUDA_VISIBLE_DEVICES, or use --device cpu"),
    101: ("no GPU of that number", "check `nvidia-smi` and $CUDA_VISIBLE_DEVICES"),
    200: ("the kernel file is not what it should be", "remove the kernel cache and try again"),
    209: ("the kernel is not for this GPU", "check the file's .target"),
    214: (
        "the GPU's memory had an error that could not be corrected",
        "reset the GPU or reboot; check `nvidia-smi -q -d ECC`",
    ),
    218: ("the driver's assembler refuses the PTX", "please report it with this line"),
    221: ("broken NVIDIA driver: its PTX compiler (libnvidia-ptxjitcompiler) is missing", _BROKEN),
    222: ("NVIDIA driver too old for this PTX version", _UPDATE),
    304: ("broken NVIDIA driver: a call to the operating system failed", _BROKEN),
    500: ("the kernel is not in its file", "please report it with this line"),
    700: ("launch failure: a kernel used an illegal address", _KERNEL),
    701: ("launch failure: the block needs more registers or shared memory than the GPU has", "use a smaller tile"),
    702: ("launch failure: a kernel ran too long for a GPU that drives a display", "use a GPU without a display"),
    715: ("launch failure: a kernel ran an illegal instruction", _KERNEL),
    716: ("launch failure: a kernel used a misaligned address", _KERNEL),
    717: ("launch failure: a kernel used an address of the wrong space", _KERNEL),
    718: ("launch failure: a kernel jumped to an invalid address", _KERNEL),
    719: ("launch failure: a kernel stopped with an exception", _KERNEL),
    802: ("broken NVIDIA driver: the system is not ready (is nvidia-fabricmanager running?)", _BROKEN),
    803: (
        "broken NVIDIA driver: its kernel module and its library have different versions",
        "reboot to load the new one",
    ),
    804: ("NVIDIA driver too old: the forward-compatibility package does not support this GPU", _UPDATE),
    999: ("broken NVIDIA driver: unknown error", _BROKEN),
}
# After these the CUDA context is lost: every later call would fail with the same error.
_STICKY = frozenset([214, 700, 702, *range(710, 721), 999])
# Stream capture was refused, and nothing else is wrong: 801 not supported, 900 … 909 capture's own errors.
_CAPTURE = frozenset([801, *range(900, 910)])


def status_of(error: BaseException) -> int | None:
    """The CUDA status that a CuPy exception carries, if any."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def is_sticky(error: BaseException) -> bool:
    """Whether the device cannot be used any more after this."""
    return status_of(error) in _STICKY


def is_capture_refused(error: BaseException) -> bool:
    """Whether capturing a graph is what failed, so that launching one by one can still work."""
    return status_of(error) in _CAPTURE


def is_out_of_memory(error: BaseException) -> bool:
    """CuPy raises a `MemoryError` of its own from its pool, and status 2 from everything else."""
    return isinstance(error, MemoryError) or status_of(error) == 2


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def describe(error: BaseException, doing: str) -> tuple[str, str]:
    """What an exception that CuPy raised while `doing` ("loading matmul.ptx", "waiting") means, and what to do."""
    status = 2 if is_out_of_memory(error) else status_of(error)
    unknown = ("CUDA failed", "please report it with this line")
    what, remedy = _MEANING.get(-1 if status is None else status, unknown)
    return f"{what} (while {doing}: {first_line(error)})", remedy


def explain(error: BaseException, doing: str) -> DeviceError:
    """`describe` as the one line of a `DeviceError`."""
    if LIBCUDA in str(error) or "failed to load libcuda" in str(error):
        return no_driver()
    return DeviceError("; ".join(describe(error, doing)))


def no_driver() -> NoCuda:
    return NoCuda(
        f"no NVIDIA driver found ({LIBCUDA})",
        f"install one ({DRIVERS_URL}; in a container start it with --gpus all), or use --device cpu",
    )


def too_old(driver: Version, built: Version) -> NoCuda:
    """The driver is older than any that the CUDA runtime inside CuPy starts on."""
    first = _FIRST_DRIVER.get(built[0])
    wanted = f"driver {first}, or later" if first else f"a driver for CUDA {built[0]}"
    remedy = f"CuPy is built for CUDA {built[0]}, which needs {wanted}: {_UPDATE}, or use --device cpu"
    return NoCuda(f"NVIDIA driver too old: it supports CUDA {driver[0]}.{driver[1]}", remedy)


def too_weak(name: str, capability: Version) -> NoCuda:
    need = f"{MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]}"
    return NoCuda(
        f"card {name} has compute capability {capability[0]}.{capability[1]}; the kernels need {need}",
        "use an Ampere or later GPU, or --device cpu",
    )


def split_version(number: int) -> Version:
    """12040 -> (12, 4), as `cudaDriverGetVersion` and `cudaRuntimeGetVersion` count."""
    return number // 1000, number % 1000 // 10


def cuda_of_ptx(version: Version) -> Version:
    """The CUDA release that brought a PTX version (PTX ISA, "Release Notes"). 8.5 came with 12.5 and 12.6 alike."""
    major, minor = version
    if major < 7:
        return (10, 2)
    if major == 8 and minor >= 6:
        return (12, minor + 1)
    return (major + 4, minor)


def import_cupy() -> Any:
    """CuPy, imported when it is first needed: that takes a third of a second.

    Raises:
        NoCuda: it is not installed, or does not import.
    """
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise NoCuda("cupy is not installed", "pip install cupy-cuda12x, or use --device cpu") from error
        raise NoCuda(
            f"cupy cannot be imported ({first_line(error)})", "install it again, or use --device cpu"
        ) from error
    except Exception as error:  # an ImportError for a library, or what a broken installation raises
        raise NoCuda(
            f"cupy cannot be imported ({first_line(error)})", "install it again, or use --device cpu"
        ) from error
    return cupy
