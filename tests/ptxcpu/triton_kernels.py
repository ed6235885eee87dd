"""Triton kernels, compiled to PTX without a GPU. Run as `python triton_kernels.py FOLDER`, by a Python that has Triton.

Writes one .ptx file for each kernel and architecture, and `kernels.json`: per file its entry, threads and shared memory.
Attention, layer norm and matmul follow Triton's tutorials.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def softmax(out, x, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * width + at, mask=at < width, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * width + at, e / tl.sum(e, axis=0), mask=at < width)


@triton.jit
def layer_norm_forward(x, y, w, b, means, rstds, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        d = tl.where(at < width, v - mean, 0.0)
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=0) / width + eps)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < width
        v = tl.load(x + row * width + at, mask=mask, other=0.0).to(tl.float32)
        scaled = (v - mean) * rstd * tl.load(w + at, mask=mask) + tl.load(b + at, mask=mask)
        tl.store(y + row * width + at, scaled, mask=mask)


@triton.jit
def layer_norm_backward(dx, dy, dw, db, x, w, means, rstds, lock, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows add their part of dw and db to one of GROUP sums, which a lock protects."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < width
    v = tl.load(x + row * width + at, mask=mask, other=0).to(tl.float32)
    g = tl.load(dy + row * width + at, mask=mask, other=0).to(tl.float32)
    weight = tl.load(w + at, mask=mask).to(tl.float32)
    mean, rstd = tl.load(means + row), tl.load(rstds + row)
    normal = tl.where(mask, (v - mean) * rstd, 0.0)
    wg = tl.where(mask, weight * g, 0.0)
    c1 = tl.sum(normal * wg, axis=0) / width
    c2 = tl.sum(wg, axis=0) / width
    tl.store(dx + row * width + at, (wg - (normal * c1 + c2)) * rstd, mask=mask)
    which = row % GROUP
    own, count = lock + which, lock + GROUP + which
    while tl.atomic_cas(own, 0, 1) == 1:
        pass
    part_w, part_b = g * normal, g
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part_w += tl.load(dw + which * width + at, mask=mask)
        part_b += tl.load(db + which * width + at, mask=mask)
    tl.store(dw + which * width + at, part_w, mask=mask)
    tl.store(db + which * width + at, part_b, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(own, 0)


@triton.jit
def layer_norm_sums(dw, total, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in range(0, rows, ROWS):
        r = i + tl.arange(0, ROWS)
        mask = (r[:, None] < rows) & (cols[None, :] < width)
        s += tl.load(dw + r[:, None] * width + cols[None, :], mask=mask, other=0.0)
    tl.store(total + cols, tl.sum(s, axis=0), mask=cols < width)


@triton.jit
def matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * tiles_n)
    first = group * GROUP
    size = min(tiles_m - first, GROUP)
    pm = first + (pid % (GROUP * tiles_n)) % size
    pn = (pid % (GROUP * tiles_n)) // size
    rm = (pm * BM + tl.arange(0, BM)) % M
    rn = (pn * BN + tl.arange(0, BN)) % N
    rk = tl.arange(0, BK)
    pa = a + rm[:, None] * K + rk[None, :]
    pb = b + rk[:, None] * N + rn[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        x = tl.load(pa, mask=rk[None, :] < K - k * BK, other=0.0)
        y = tl.load(pb, mask=rk[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        pa += BK
        pb += BK * N
    om, on = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    mask = (om[:, None] < M) & (on[None, :] < N)
    tl.store(c + om[:, None] * N + on[None, :], acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def matmul_split(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    """Several programs add their share of k to one tile, atomically."""
    pm, pn, pk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rm, rn = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    rk = pk * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK * SPLIT)):
        left = K - k * BK * SPLIT
        x = tl.load(a + rm[:, None] * K + rk[None, :] + k * BK * SPLIT, mask=rk[None, :] < left, other=0.0)
        y = tl.load(b + (rk[:, None] + k * BK * SPLIT) * N + rn[None, :], mask=rk[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
    tl.atomic_add(c + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def attention_forward(
    q, k, v, out, lse, T, scale, HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):
    start, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * T * HEAD
    rm, rn, rd = start * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HEAD)
    x = tl.load(q + base + rm[:, None] * HEAD + rd[None, :], mask=rm[:, None] < T, other=0.0)
    most = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, HEAD], tl.float32)
    end = min((start + 1) * BM, T) if CAUSAL else T
    for n in range(0, end, BN):
        cols = n + rn
        y = tl.load(k + base + cols[None, :] * HEAD + rd[:, None], mask=cols[None, :] < T, other=0.0)
        s = tl.dot(x, y) * scale
        s = tl.where(cols[None, :] < T, s, -float("inf"))
        if CAUSAL:
            s = tl.where(rm[:, None] >= cols[None, :], s, -float("inf"))
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        alpha = tl.math.exp2(most - new)
        total = total * alpha + tl.sum(p, 1)
        z = tl.load(v + base + cols[:, None] * HEAD + rd[None, :], mask=cols[:, None] < T, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(z.dtype), z)
        most = new
    tl.store(lse + head * T + rm, most + tl.math.log2(total), mask=rm < T)
    acc = acc / total[:, None]
    tl.store(out + base + rm[:, None] * HEAD + rd[None, :], acc.to(out.dtype.element_ty), mask=rm[:, None] < T)


@triton.jit
def attention_delta(out, do, delta, T, HEAD: tl.constexpr, BM: tl.constexpr):
    rm, head, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1), tl.arange(0, HEAD)
    at = head.to(tl.int64) * T * HEAD + rm[:, None] * HEAD + rd[None, :]
    o = tl.load(out + at, mask=rm[:, None] < T, other=0.0).to(tl.float32)
    g = tl.load(do + at, mask=rm[:, None] < T, other=0.0).to(tl.float32)
    tl.store(delta + head * T + rm, tl.sum(o * g, 1), mask=rm < T)


@triton.jit
def attention_backward(
    q, k, v, do, dq, dk, dv, lse, delta, T, scale, HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """dk and dv of one block of keys, then dq of one block of queries; causal. `scale` is in base 2."""
    start, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * T * HEAD
    rd = tl.arange(0, HEAD)
    cols = start * BN + tl.arange(0, BN)
    keep = cols[:, None] < T
    y = tl.load(k + base + cols[:, None] * HEAD + rd[None, :], mask=keep, other=0.0)
    z = tl.load(v + base + cols[:, None] * HEAD + rd[None, :], mask=keep, other=0.0)
    sum_k, sum_v = tl.zeros([BN, HEAD], tl.float32), tl.zeros([BN, HEAD], tl.float32)
    for m in range(start * BN // BM * BM, T, BM):
        rows = m + tl.arange(0, BM)
        x = tl.load(q + base + rows[None, :] * HEAD + rd[:, None], mask=rows[None, :] < T, other=0.0)
        g = tl.load(do + base + rows[:, None] * HEAD + rd[None, :], mask=rows[:, None] < T, other=0.0)
        base2 = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
        d = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
        p = tl.math.exp2(tl.dot(y, x) * scale - base2[None, :])
        p = tl.where((rows[None, :] >= cols[:, None]) & (rows[None, :] < T), p, 0.0)
        sum_v += tl.dot(p.to(g.dtype), g)
        ds = p * (tl.dot(z, tl.trans(g)) - d[None, :])
        sum_k += tl.dot(ds.to(x.dtype), tl.trans(x))
    tl.store(dv + base + cols[:, None] * HEAD + rd[None, :], sum_v, mask=keep)
    tl.store(dk + base + cols[:, None] * HEAD + rd[None, :], sum_k * (scale * 0.6931471824645996), mask=keep)
    rows = start * BN + tl.arange(0, BN)
    x = tl.load(q + base + rows[:, None] * HEAD + rd[None, :], mask=rows[:, None] < T, other=0.0)
    g = tl.load(do + base + rows[:, None] * HEAD + rd[None, :], mask=rows[:, None] < T, other=0.0)
    base2 = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
    d = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
    sum_q = tl.zeros([BN, HEAD], tl.float32)
    for n in range(0, min((start + 1) * BN, T), BM):
        keys = n + tl.arange(0, BM)
        y = tl.load(k + base + keys[None, :] * HEAD + rd[:, None], mask=keys[None, :] < T, other=0.0)
        z = tl.load(v + base + keys[None, :] * HEAD + rd[:, None], mask=keys[None, :] < T, other=0.0)
        p = tl.math.exp2(tl.dot(x, y) * scale - base2[:, None])
        p = tl.where((rows[:, None] >= keys[None, :]) & (keys[None, :] < T), p, 0.0)
        ds = p * (tl.dot(g, z) - d[:, None])
        sum_q += tl.dot(ds.to(y.dtype), tl.trans(y))
    tl.store(
        dq + base + rows[:, None] * HEAD + rd[None, :], sum_q * (scale * 0.6931471824645996), mask=rows[:, None] < T
    )


@triton.jit
def cross_entropy(loss, logits, target, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    which = tl.load(target + row)
    v = tl.load(logits + row * width + at, mask=at < width, other=-float("inf")).to(tl.float32)
    most = tl.max(v, 0)
    total = tl.sum(tl.exp(v - most), 0)
    picked = tl.load(logits + row * width + which).to(tl.float32)
    tl.store(loss + row, tl.log(total) + most - picked)
    p = tl.exp(v - most) / total
    tl.store(
        logits + row * width + at, (p - tl.where(at == which, 1.0, 0.0)).to(logits.dtype.element_ty), mask=at < width
    )


@triton.jit
def swiglu(out, gate, up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n).to(tl.float32)
    u = tl.load(up + at, mask=at < n).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def dropout(out, x, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    v = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.where(keep, v / (1 - p), 0.0), mask=at < n)


@triton.jit
def scan(out, x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.cumsum(tl.load(x + at), 0))


@triton.jit
def order(out, where, x, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * BLOCK + at)
    tl.store(out + row * BLOCK + at, tl.sort(v))
    tl.store(where + row, tl.argmax(v, 0))


@triton.jit
def histogram(out, x, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + at, mask=at < n, other=BINS - 1), BINS)
    tl.atomic_add(out + tl.arange(0, BINS), counts)


MM = {"BM": 32, "BN": 64, "BK": 32, "GROUP": 4}
# name, kernel, types of the arguments that are not constants, constants, warps, stages
KERNELS = [
    ("add", add, "*fp32 *fp32 *fp32 i32", {"BLOCK": 512}, 4, 2),
    ("softmax", softmax, "*fp32 *fp32 i32", {"BLOCK": 256}, 4, 2),
    ("layer_norm_forward", layer_norm_forward, "*bf16 *bf16 *fp32 *fp32 *fp32 *fp32 i32 fp32", {"BLOCK": 128}, 4, 2),
    (
        "layer_norm_backward",
        layer_norm_backward,
        "*fp32 *bf16 *fp32 *fp32 *bf16 *fp32 *fp32 *fp32 *i32 i32",
        {"GROUP": 3, "BLOCK": 256},
        4,
        2,
    ),
    ("layer_norm_sums", layer_norm_sums, "*fp32 *fp32 i32 i32", {"ROWS": 4, "BLOCK": 64}, 2, 2),
    ("matmul_f16", matmul, "*fp16 *fp16 *fp16 i32 i32 i32", {**MM, "PRECISION": "tf32"}, 4, 3),
    ("matmul_bf16", matmul, "*bf16 *bf16 *fp32 i32 i32 i32", {**MM, "PRECISION": "tf32"}, 4, 4),
    ("matmul_tf32", matmul, "*fp32 *fp32 *fp32 i32 i32 i32", {**MM, "PRECISION": "tf32"}, 4, 2),
    ("matmul_f32", matmul, "*fp32 *fp32 *fp32 i32 i32 i32", {**MM, "PRECISION": "ieee"}, 4, 2),
    ("matmul_split", matmul_split, "*bf16 *bf16 *fp32 i32 i32 i32", {"BM": 32, "BN": 32, "BK": 32, "SPLIT": 2}, 2, 2),
    (
        "attention_forward",
        attention_forward,
        "*bf16 *bf16 *bf16 *bf16 *fp32 i32 fp32",
        {"HEAD": 32, "BM": 32, "BN": 32, "CAUSAL": True},
        4,
        2,
    ),
    (
        "attention_full",
        attention_forward,
        "*fp16 *fp16 *fp16 *fp32 *fp32 i32 fp32",
        {"HEAD": 64, "BM": 64, "BN": 32, "CAUSAL": False},
        4,
        3,
    ),
    ("attention_delta", attention_delta, "*bf16 *bf16 *fp32 i32", {"HEAD": 32, "BM": 32}, 4, 2),
    (
        "attention_backward",
        attention_backward,
        "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *fp32 i32 fp32",
        {"HEAD": 32, "BM": 32, "BN": 32},
        4,
        2,
    ),
    ("cross_entropy", cross_entropy, "*fp32 *bf16 *i32 i32", {"BLOCK": 256}, 4, 2),
    ("swiglu", swiglu, "*bf16 *bf16 *bf16 i32", {"BLOCK": 512}, 4, 2),
    ("dropout", dropout, "*fp32 *fp32 i32 fp32 i32", {"BLOCK": 256}, 4, 2),
    ("scan", scan, "*fp32 *fp32", {"BLOCK": 256}, 4, 2),
    ("order", order, "*i32 *i32 *i32", {"BLOCK": 128}, 4, 2),
    ("histogram", histogram, "*i32 *i32 i32", {"BLOCK": 256, "BINS": 32}, 4, 2),
]


def main(folder: Path) -> None:
    made = {}
    for arch in (80, 89):
        for name, kernel, types, constants, warps, stages in KERNELS:
            names = [p.name for p in kernel.params]
            free = [n for n in names if n not in constants]
            signature = dict(zip(free, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
            signature = {n: signature[n] for n in names}
            # As at a launch: pointers are aligned, and so are the numbers that are multiples of 16.
            attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
            if name.startswith("matmul"):
                attrs |= {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ("N", "K")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
            options = {"num_warps": warps, "num_stages": stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            path = folder / f"{name}-{arch}.ptx"
            path.write_text(compiled.asm["ptx"])
            meta = compiled.metadata
            made[path.stem] = {"entry": meta.name, "threads": 32 * meta.num_warps, "shared": meta.shared}
    (folder / "kernels.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
