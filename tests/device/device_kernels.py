"""Small kernels for the devices' own tests."""

from __future__ import annotations

from pathlib import Path

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"

# out[i] = x[i] * factor for i < count
SCALE = """
.visible .entry scale(.param .u64 p_out, .param .u64 p_x, .param .u32 p_count, .param .f32 p_factor)
{
    .reg .u64 %out, %x, %offset;
    .reg .u32 %i, %count, %block, %width, %thread;
    .reg .f32 %value, %factor;
    .reg .pred %outside;

    ld.param.u64 %out, [p_out];
    ld.param.u64 %x, [p_x];
    ld.param.u32 %count, [p_count];
    ld.param.f32 %factor, [p_factor];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %width, %thread;
    setp.ge.u32 %outside, %i, %count;
    @%outside ret;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %out, %out, %offset;
    ld.global.f32 %value, [%x];
    mul.rn.f32 %value, %value, %factor;
    st.global.f32 [%out], %value;
    ret;
}
"""

# Every width that an argument can have, stored where it must arrive.
WIDTHS = """
.visible .entry widths(.param .u64 p_out, .param .u8 p_b, .param .f64 p_d, .param .u16 p_h, .param .s32 p_i, .param .f32 p_f,
                       .param .u64 p_q)
{
    .reg .u64 %out, %q;
    .reg .f64 %d;
    .reg .f32 %f;
    .reg .s32 %i;
    .reg .u16 %b, %h;

    ld.param.u64 %out, [p_out];
    ld.param.u8 %b, [p_b];
    ld.param.f64 %d, [p_d];
    ld.param.u16 %h, [p_h];
    ld.param.s32 %i, [p_i];
    ld.param.f32 %f, [p_f];
    ld.param.u64 %q, [p_q];
    st.global.u8 [%out], %b;
    st.global.u16 [%out+2], %h;
    st.global.s32 [%out+4], %i;
    st.global.f64 [%out+8], %d;
    st.global.f32 [%out+16], %f;
    st.global.u64 [%out+24], %q;
    ret;
}
"""

# out[i] = x[width - 1 - i] through dynamic shared memory, one block of `width` threads, from word `p_base` of it on.
REVERSE = """
.extern .shared .align 16 .b8 dynamic[];

.visible .entry reverse(.param .u64 p_out, .param .u64 p_x, .param .u32 p_base)
{
    .reg .u64 %out, %x, %offset;
    .reg .u32 %thread, %width, %mine, %other, %base, %shared;
    .reg .f32 %value;

    ld.param.u64 %out, [p_out];
    ld.param.u64 %x, [p_x];
    ld.param.u32 %base, [p_base];
    mov.u32 %thread, %tid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %shared, dynamic;
    mul.wide.u32 %offset, %thread, 4;
    add.u64 %x, %x, %offset;
    add.u64 %out, %out, %offset;
    add.u32 %mine, %base, %thread;
    shl.b32 %mine, %mine, 2;
    add.u32 %mine, %mine, %shared;
    ld.global.f32 %value, [%x];
    st.shared.f32 [%mine], %value;
    bar.sync 0;
    sub.u32 %other, %width, %thread;
    sub.u32 %other, %other, 1;
    add.u32 %other, %other, %base;
    shl.b32 %other, %other, 2;
    add.u32 %other, %other, %shared;
    ld.shared.f32 %value, [%other];
    st.global.f32 [%out], %value;
    ret;
}
"""


def write_kernel(folder: Path, text: str, name: str = "kernel", header: str = HEADER) -> Path:
    path = folder / f"{name}.ptx"
    path.write_text(header + text, encoding="utf-8")
    return path
