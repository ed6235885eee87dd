"""Generic addresses: cvta to and from each window, isspacep, and ldu, which loads as ld does."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.ptxcpu import load

TEXT = """.version 7.0
.target sm_80
.address_size 64
.visible .entry windows(.param .u64 out, .param .u64 x)
{
    .shared .align 4 .b8 tile[256];
    .local .align 4 .b8 depot[16];
    .reg .u64 %out, %x, %at, %shared, %local, %back;
    .reg .u32 %lane, %v, %found, %bits;
    .reg .pred %is<6>;
    ld.param.u64 %out, [out];
    ld.param.u64 %x, [x];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %at, %lane, 4;
    add.u64 %out, %out, %at;
    add.u64 %x, %x, %at;

    mov.u64 %shared, tile;
    add.u64 %shared, %shared, %at;
    cvta.shared.u64 %shared, %shared;        // a generic address of this lane's word
    mov.u64 %local, depot;
    cvta.local.u64 %local, %local;
    ldu.global.u32 %v, [%x];
    st.u32 [%shared], %v;                    // generic store, then a load through the window
    cvta.to.shared.u64 %back, %shared;
    ld.shared.u32 %found, [%back];
    add.u32 %found, %found, 1;
    st.u32 [%local + 8], %found;
    cvta.to.local.u64 %back, %local;
    ld.local.u32 %found, [%back + 8];

    isspacep.shared %is0, %shared;
    isspacep.local %is1, %local;
    isspacep.global %is2, %x;
    isspacep.shared %is3, %x;
    isspacep.local %is4, %shared;
    isspacep.global %is5, %local;
    mov.u32 %bits, 0;
    @%is0 or.b32 %bits, %bits, 1;
    @%is1 or.b32 %bits, %bits, 2;
    @%is2 or.b32 %bits, %bits, 4;
    @%is3 or.b32 %bits, %bits, 8;
    @%is4 or.b32 %bits, %bits, 16;
    @%is5 or.b32 %bits, %bits, 32;
    mad.lo.u32 %found, %found, 64, %bits;
    st.global.u32 [%out], %found;
    ret;
}
"""


def test_generic_addresses_go_to_the_window_they_came_from() -> None:
    """Each lane's word goes through shared and local memory, and only the true spaces are claimed (bits 0, 1 and 2)."""
    x = np.arange(100, 132, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    load(TEXT).launch("windows", grid=(1, 1, 1), block=(32, 1, 1), args=[out, x])
    assert (out == (x + 1) * 64 + 7).all(), out
