"""The CPU device on this machine: other feature sets, thread counts, many launches, an interrupt in a long one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.kernels import Recorder, rendered
from ptxtrain.engine.ops import matmul, rmsnorm, swiglu
from ptxtrain.engine.ptxcpu import jit, load
from ptxtrain.engine.ptxcpu.lower import functions
from ptxtrain.ptx.matmul_spec import MatmulSpec

SPIN = """.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 out, .param .u64 turns)
{
    .reg .u64 %out, %turns, %i;
    .reg .u32 %x, %block;
    .reg .pred %is_more;
    ld.param.u64 %out, [out];
    ld.param.u64 %turns, [turns];
    mov.u32 %x, %tid.x;
    mov.u32 %block, %ctaid.x;
    add.u32 %x, %x, %block;
    mov.u64 %i, 0;
LOOP:
    mad.lo.u32 %x, %x, 1664525, 1013904223;
    xor.b32 %x, %x, %block;
    add.u64 %i, %i, 1;
    setp.lt.u64 %is_more, %i, %turns;
    @%is_more bra LOOP;
    st.global.u32 [%out], %x;
    ret;
}
"""

PRODUCT = textwrap.dedent("""
    import hashlib, numpy as np
    from ptxtrain.engine.device.cpu import CpuDevice
    from ptxtrain.engine.kernels import Recorder
    from ptxtrain.engine.ops import matmul, swiglu
    from ptxtrain.ptx.matmul_spec import MatmulSpec
    rng = np.random.default_rng(3)
    a, b = ((rng.standard_normal((72, 72), np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(2))
    device = CpuDevice(1)
    out, y = device.alloc(4 * 72 * 72), device.alloc(4 * 36 * 72)
    rec = Recorder(device)
    matmul.run(rec, out, device.write(a), device.write(b), m=72, n=72, k=72, layout="nn", dtype="bf16",
               out_dtype="f32", way="fast", spec=MatmulSpec("nn", "bf16", 64, 64))
    swiglu.forward(rec, y, out, rows=36, width=72, dtype="f32")
    device.run(rec.plan())
    bits = device.read(y, np.uint8, (4 * 36 * 72,))
    x, w = (m.astype(np.uint32) << 16 for m in (a, b))
    exact = x.view(np.float32).astype(np.float64) @ w.view(np.float32).astype(np.float64)
    error = abs(device.read(out, np.float32, (72, 72)) - exact).max()
    print(device.numerics_id().split()[-1], float(error), hashlib.sha256(bits.tobytes()).hexdigest())
""")


def _product(cpu: str) -> tuple[str, float, str]:
    """(how products are done, largest error, digest of the bits) in a process with `PTXTRAIN_CPU`."""
    env = {**os.environ, "PTXTRAIN_CPU": cpu}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    way, error, digest = done.stdout.split()
    return way, float(error), digest


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names features of x86-64")
def test_portable_bits_do_not_depend_on_the_vector_unit() -> None:
    """Without AVX-512, and with it, `portable` gives the same bits, right to f32 rounding."""
    if "+avx2" not in jit.host_features()[1].split(","):
        pytest.skip("this processor has no AVX2")
    portable, narrow = _product("portable"), _product("avx2")
    assert portable[0] == narrow[0] == "fma"
    assert portable[1] < 2e-5
    assert portable[2] == narrow[2]


def test_every_way_of_products_that_there_is_is_right() -> None:
    way, error, _ = _product("")
    assert way == jit.bf16_products()
    assert error < 2e-5


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXTRAIN_CPU", "vax")
    with pytest.raises(Exception, match="PTXTRAIN_CPU is 'vax'"):
        jit.bf16_products()


def test_kernels_compile_for_neon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for 64-bit Arm is made from the IR that such a machine lowers to; it cannot be run here."""
    monkeypatch.setenv("PTXTRAIN_CPU", "portable")
    monkeypatch.setattr(functions, "host_features", lambda: ("neoverse-n1", "+neon"))
    for stem, spec in (("swiglu_forward", None), ("matmul", MatmulSpec("nn", "bf16", 64, 64))):
        module = load(rendered(stem, spec))
        block = module.tree.entry(stem).reqntid
        assert block is not None
        code = jit.object_for(module.ir(stem, block), "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon")
        assert code[:4] == b"\x7fELF"
        assert code[18] == 183  # EM_AARCH64


def test_bits_do_not_depend_on_the_threads() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 96)).astype(np.float32)
    seen = []
    for threads in (1, 2, 4):
        device = CpuDevice(threads)
        try:
            a = device.write(x)
            outs = [device.alloc(4 * size) for size in (64 * 64, 64 * 96, 64, 64 * 48)]
            rec = Recorder(device)
            matmul.run(rec, outs[0], a, a, m=64, n=64, k=96, layout="nt", dtype="f32", out_dtype="f32")
            weight = device.write(x[0])
            rmsnorm.forward(rec, outs[1], outs[2], a, weight, rows=64, width=96, eps=1e-5, dtype="f32")
            swiglu.forward(rec, outs[3], a, rows=64, width=48, dtype="f32")
            device.run(rec.plan())
            seen.append(b"".join(device.read(o, np.uint8, (o.nbytes,)).tobytes() for o in outs))
        finally:
            device.close()
    assert seen[0] == seen[1] == seen[2]


def test_launches_leave_no_memory_behind() -> None:
    """10,000 launches after a warm-up add less than 8 MiB to the process."""
    module = load(SPIN)
    out = np.zeros(1, np.uint32)

    def launch(count: int) -> None:
        for _ in range(count):
            module.launch("spin", grid=(2, 1, 1), block=(32, 1, 1), args=[out, np.uint64(1)])

    launch(500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    launch(10_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


@pytest.mark.parametrize("after", [0.2, 0.5])
def test_an_interrupt_is_seen_during_a_long_launch(after: float) -> None:
    """Ctrl+C ends a launch that would run for minutes, nothing runs on behind it, and the module works on."""
    module = load(SPIN)
    out = np.zeros(1, np.uint32)
    module.launch("spin", grid=(1, 1, 1), block=(32, 1, 1), args=[out, np.uint64(1)])
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            module.launch("spin", grid=(1 << 20, 1, 1), block=(256, 1, 1), args=[out, np.uint64(100_000)], threads=2)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - start < 10, "a launch of minutes went on"
    for thread in [t for t in threading.enumerate() if t.name == "ptxcpu-launch"]:
        thread.join(2)
        assert not thread.is_alive(), "native code runs on behind the interrupt"
    module.launch("spin", grid=(1, 1, 1), block=(32, 1, 1), args=[out, np.uint64(1)])
