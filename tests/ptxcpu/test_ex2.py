"""ex2.approx.ftz is written shorter than what it means."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptxtrain.engine.ptxcpu.module import load

KERNEL = """.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{
    .reg .u64 %in, %out, %at;
    .reg .u32 %t, %block;
    .reg .f32 %x, %y;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
    mov.u32 %t, %tid.x;
    mov.u32 %block, %ctaid.x;
    mad.lo.u32 %t, %block, 256, %t;
    mul.wide.u32 %at, %t, 4;
    add.u64 %in, %in, %at;
    add.u64 %out, %out, %at;
    ld.global.f32 %x, [%in];
    ex2.approxFTZ.f32 %y, %x;
    st.global.f32 [%out], %y;
    ret;
}
"""


def _run(x: npt.NDArray[np.uint32], ftz: str) -> npt.NDArray[np.uint32]:
    out = np.zeros_like(x)
    load(KERNEL.replace("FTZ", ftz)).launch("k", grid=(x.size // 256, 1, 1), block=(256, 1, 1), args=[x, out])
    return out


def _flush(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    is_small = bits & 0x7F800000 == 0
    return np.where(is_small, bits & 0x80000000, bits).astype(np.uint32)


def test_flushing_is_flushing_before_and_after() -> None:
    """The same bits as ex2.approx between two flushes: anywhere, around -126 and 128, subnormal numbers, infinities, NaN."""
    rng = np.random.default_rng(3)
    around = [np.float32(x).view(np.uint32) + np.arange(-128, 128) for x in (-126, 128, 2.0**-126, -(2.0**-126), 0.5)]
    special = np.tile(
        np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 1], np.uint32), 32
    )
    parts = [rng.integers(0, 1 << 32, 1 << 16), rng.uniform(-160, 140, 1 << 16).astype(np.float32).view(np.uint32)]
    x = np.concatenate([*parts, *around, special]).astype(np.uint32)
    assert (_run(x, ".ftz") == _flush(_run(_flush(x), ""))).all()
