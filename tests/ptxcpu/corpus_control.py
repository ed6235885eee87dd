"""Cases of the corpus: branches and loops, functions, local arrays, memory of all kinds, warps that wait for each other."""

from __future__ import annotations

import numpy as np
from corpus_case import Dim3, Launch, blocks_for, case, floats, ints

F32, F64, I32 = np.float32, np.float64, np.int32
N = 150  # not a multiple of a warp


def _quotient(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


@case("control", (64, 1, 1), (96, 1, 1))
def switch_dense(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -100, 100, N)
    out = []
    for v in x.tolist():
        table = [v * 3, (v - 7) ^ 0x55, v ^ 0x55, v << 2, -v, 12344, v * v, _quotient(v, 3), v - 7 * _quotient(v, 7)]
        table += [~v, (v | 1024) & 0xFF, v & 0xFF, 99, 99, 99, 99]
        table[1], table[10] = v ^ 0x55, v & 0xFF  # they fall through with r overwritten
        out.append(table[v & 15] + 1)
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: out})


@case("control", (64, 1, 1))
def switch_sparse(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, N)
    v = np.where(x > 50, 0, 7)
    v = np.where(v == 7, 600, v)
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(1000), I32(N)], {0: v})


def _nested(v: int) -> int:
    total = 0
    for a in range(v % 7 + 2):
        if (a + v) % 5 == 3:
            continue
        for b in range(a, 12):
            if b * a > v:
                break
            if (b ^ v) & 1:
                continue
            c = b
            while c > 0:
                total += c
                c -= 3
                if total > 300:
                    return total
        total -= 1
    return total


@case("control", (64, 1, 1), (40, 1, 1))
def nested_loops(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 90, N)
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: [_nested(v) for v in x.tolist()]})


@case("control", (64, 1, 1))
def collatz(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100000, N)

    def steps(v: int) -> int:
        count = 0
        while v != 1:
            v, count = (3 * v + 1 if v & 1 else v // 2), count + 1
        return count

    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: [steps(v + 1) for v in x.tolist()]})


@case("control", (64, 1, 1), (33, 1, 1))
def early_returns(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, N)

    def one(v: int) -> int:
        if v < 10:
            return -1
        for k in range(20):
            if v == 30 + k:
                return k
            if v > 90 - k:
                break
        return 777 if v & 1 else 2 * v

    return Launch(blocks_for(N, block), [np.full(N, 777, I32), x, I32(N)], {0: [one(v) for v in x.tolist()]})


def _jumps(v: int) -> int:
    k, total = v % 9, 0
    at_top = not v & 1
    while True:
        if at_top:
            total += k
            if total > 60:
                break
        k += 2
        total += 1
        if k >= 20 + (v & 3):
            break
        at_top = not k & 4
    return total * 100 + k


@case("control", (64, 1, 1))
def irreducible(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, N)
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: [_jumps(v) for v in x.tolist()]})


@case("control", (16, 4, 1), (9, 5, 1))
def mandelbrot(rng: np.random.Generator, block: Dim3) -> Launch:
    w, h, limit = 40, 22, 60
    cr = (F32(3) * np.arange(w, dtype=F32) / F32(w) - F32(2))[None, :].repeat(h, 0)
    ci = (F32(2) * np.arange(h, dtype=F32) / F32(h) - F32(1))[:, None].repeat(w, 1)
    a, b, count = np.zeros_like(cr), np.zeros_like(cr), np.zeros(cr.shape, I32)
    going = np.ones(cr.shape, bool)
    with np.errstate(all="ignore"):
        for _ in range(limit):
            aa, bb = a * a, b * b
            going &= aa + bb <= 4
            a, b = np.where(going, aa - bb + cr, a), np.where(going, F32(2) * a * b + ci, b)
            count += going
    args = [np.zeros((h, w), I32), I32(w), I32(h), I32(limit)]
    return Launch((-(-w // block[0]), -(-h // block[1]), 1), args, {0: count})


@case("control", (64, 1, 1))
def bisect(rng: np.random.Generator, block: Dim3) -> Launch:
    table, keys = np.sort(ints(rng, 0, 1000, 77)), ints(rng, -5, 1010, N)
    args = [np.zeros(N, I32), table, I32(77), keys, I32(N)]
    return Launch(blocks_for(N, block), args, {0: np.searchsorted(table, keys)})


@case("control", (64, 1, 1))
def newton(rng: np.random.Generator, block: Dim3) -> Launch:
    x = 10 ** rng.uniform(-8, 8, N)
    return Launch(blocks_for(N, block), [np.zeros(N), np.zeros(N, I32), x, I32(N)], {0: np.sqrt(x)}, 1e-11)


@case("control", (64, 1, 1), (100, 1, 1))
def loop_with_barrier(rng: np.random.Generator, block: Dim3) -> Launch:
    n = block[0]
    x = ints(rng, 0, 8, 2, n)
    a = x.copy()
    for r in range(9):
        left, v = np.roll(a, 1, 1), a.copy()
        a = np.where(left > v, (v * 3 + r) & 1023, v)
        for i, j in zip(*np.nonzero(left == v), strict=True):
            value = int(v[i, j])
            for k in range(value & 3):  # the bound moves with the value
                if k >= value & 3:
                    break
                value += k
            a[i, j] = value
    expected = np.zeros_like(x)
    for row in range(2):
        expected[row] = _rounds(x[row].tolist(), 9)
    return Launch((2, 1, 1), [np.zeros_like(x), x, I32(9)], {0: expected})


def _rounds(a: list[int], rounds: int) -> list[int]:
    for r in range(rounds):
        new = []
        for t, v in enumerate(a):
            left = a[t - 1]
            if left > v:
                v = (v * 3 + r) & 1023
            elif left == v:
                k = 0
                while k < v & 3:
                    v += k
                    k += 1
            new.append(v)
        a = new
    return a


@case("functions", (64, 1, 1))
def vectors(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = floats(rng, N, 3), floats(rng, N, 3)
    c = np.cross(a.astype(F64), b)
    expected = (c * c).sum(1) + (a * c).sum(1)
    return Launch(blocks_for(N, block), [np.zeros(N, F32), a, b, I32(N)], {0: expected}, 1e-4, 1e-4)


def _classify(v: int) -> int:
    if v < 10:
        return 1
    k = 2
    while k * k <= v:
        if v % k == 0:
            return k
        k += 1
    return -v if v > 50 else 0


@case("functions", (64, 1, 1), (50, 1, 1))
def divergent_calls(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 400, N)
    out = [(_classify(v) if v % 3 else 0) + (_classify(v + 1) * 100 if v % 2 else 0) for v in x.tolist()]
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: out})


@case("functions", (64, 1, 1))
def by_value(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 250, N)
    out = []
    for v in x.tolist():
        n, tag = [1, 2, 3, 4, 5], v & 255
        for k in range(4):
            n[(v + k) % 5] += k - 1
            tag ^= (v + k) & 255
        n[v % 5] += 1000
        out.append(sum(m * (k + 1) for k, m in enumerate(n)) + int(2 * 1.5**4) + tag)
    return Launch(blocks_for(N, block), [np.zeros(N, I32), x, I32(N)], {0: out})


@case("functions", (64, 1, 1))
def pointers(rng: np.random.Generator, block: Dim3) -> Launch:
    x, which = floats(rng, N) * 3, ints(rng, 0, 3, N)
    expected = np.choose(which, [x + F32(2.5), x * F32(2.5), np.minimum(x, F32(2.5))])
    return Launch(blocks_for(N, block), [np.zeros(N, F32), x, which, I32(N)], {0: expected})


@case("functions", (64, 1, 1))
def virtuals(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 9, N).astype(F32)
    expected = np.where(x > 0, x * x + 4, 3 * (x + 1) ** 2)
    return Launch(blocks_for(N, block), [np.zeros(N, F32), x, I32(N)], {0: expected})


@case("functions", (64, 1, 1))
def templates(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 9, N).astype(F32)
    return Launch(blocks_for(N, block), [np.zeros(N, F32), x, I32(N)], {0: x**5 + x**2})


@case("local", (48, 1, 1))
def local_histogram(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 16, (96, 40), dtype=np.uint8)
    counts = np.stack([np.bincount(row, minlength=16) for row in x])
    return Launch((2, 1, 1), [np.zeros(96, I32), x, I32(40)], {0: counts.argmax(1) * 1000 + counts.max(1)})


@case("local", (40, 1, 1))
def sort_insertion(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -50, 50, 80, 20)
    expected = x.copy()
    for i, row in enumerate(expected):
        row[: 20 - (i & 3)] = np.sort(row[: 20 - (i & 3)])
    return Launch((2, 1, 1), [x, I32(20)], {0: expected})


@case("local", (32, 1, 1), (70, 1, 1))
def sort_quick(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(-300, 300, (block[0] * 2, 30)).astype(np.int16)
    return Launch((2, 1, 1), [x.copy(), I32(30)], {0: np.sort(x, 1)})


@case("local", (32, 1, 1))
def solve4(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.normal(size=(64, 4, 4)), rng.normal(size=(64, 4))
    expected = np.linalg.solve(a, b[..., None])[..., 0]
    return Launch((2, 1, 1), [np.zeros((64, 4)), a, b], {0: expected}, 1e-7, 1e-9)


@case("local", (40, 1, 1))
def structs(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, 80, 6)
    out = []
    for i, row in enumerate(x.tolist()):
        places = [(k * 3 + i) & 7 for k in range(6)]
        tags = {place: v >> 2 for place, v in zip(places, row, strict=True)}
        at = (6 * 5 + i) & 7
        for place, v in zip(places, row, strict=True):
            if v * 0.5 > 20:
                at = place
        if at in tags:
            tags[at] = (tags[at] + 1) & 255
        out.append(sum(tags[place] * (k + 1) for k, place in enumerate(places)))
    return Launch((2, 1, 1), [np.zeros(80, I32), x, I32(6)], {0: out})


@case("local", (32, 1, 1))
def reverse_text(rng: np.random.Generator, block: Dim3) -> Launch:
    text, lengths = rng.integers(32, 127, (64, 48), dtype=np.uint8), ints(rng, 0, 49, 64)
    expected = text.copy()
    for row, n in zip(expected, lengths, strict=True):
        row[:n] = np.frombuffer(bytes(row[:n])[::-1].upper(), np.uint8)
    return Launch((2, 1, 1), [text, lengths, I32(48)], {0: expected})


@case("shared", (96, 1, 1), (256, 1, 1))
def relay(rng: np.random.Generator, block: Dim3) -> Launch:
    warps = block[0] // 32
    expected = []
    for b in range(2):
        value = b
        for _ in range(4):
            for warp in reversed(range(warps)):
                value = (value * 2 + warp) & 0xFFFFFFFF
        expected.append(np.full(block[0], value, np.uint32).view(I32))
    return Launch((2, 1, 1), [np.zeros(2 * block[0], I32), I32(4)], {0: np.concatenate(expected)})


@case("shared", (96, 1, 1), (32, 1, 1))
def wait_for_flag(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 1000, 32)
    return Launch((1, 1, 1), [np.zeros(block[0], I32), x], {0: np.tile(x * 3, block[0] // 32)})


@case("shared", (128, 1, 1), (256, 1, 1))
def pairs(rng: np.random.Generator, block: Dim3) -> Launch:
    x, t = ints(rng, 0, 1000, block[0]), np.arange(block[0])
    return Launch((1, 1, 1), [np.zeros_like(x), x], {0: (x[t ^ 32] + 1)[(t + 64) % block[0]]})


@case("shared", (96, 1, 1), (64, 1, 1))
def pipeline(rng: np.random.Generator, block: Dim3) -> Launch:
    t = np.arange(block[0])
    total = sum(r * 100 + (t % 32 + t // 32) % 32 for r in range(7))
    return Launch((1, 1, 1), [np.zeros(block[0], I32), I32(7)], {0: np.where(t < 32, 0, total)})


@case("shared", (16, 8, 1))
def life(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 2, (19, 40), dtype=np.uint8)
    n = sum(np.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)) - x
    expected = (n == 3) | ((n == 2) & (x == 1))
    return Launch((3, 3, 1), [np.zeros_like(x), x, I32(40), I32(19)], {0: expected.astype(np.uint8)})


@case("shared", (64, 1, 1), (50, 1, 1))
def stencil(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 9, 200).astype(F32)
    padded = np.pad(x, 3)
    expected = sum(padded[3 + k : 203 + k] * (k + 2) for k in range(-3, 4))
    args = [np.zeros_like(x), x, I32(200), I32(3)]
    return Launch(blocks_for(200, block), args, {0: expected}, shared=4 * (block[0] + 6))


@case("shared", (32, 1, 1))
def fourier(rng: np.random.Generator, block: Dim3) -> Launch:
    x = (rng.normal(size=(3, 64)) + 1j * rng.normal(size=(3, 64))).astype(np.complex64)
    expected = np.fft.fft(x, axis=1).astype(np.complex64)
    pair = x.view(F32)
    return Launch((3, 1, 1), [pair], {0: expected.view(F32)}, 1e-4, 1e-4)


@case("shared", (32, 1, 1))
def variables(rng: np.random.Generator, block: Dim3) -> Launch:
    # The module's variables keep their values from launch to launch, so the counter has a test of its own.
    return Launch((1, 1, 1), [np.zeros(1, I32), np.zeros(5, F32)], {1: [8, 2, 16, 1, 16]})


@case("shared", (64, 1, 1))
def anywhere(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, 64).astype(F32)
    table = [1, 2, 4, 8, 16, 32]
    out = []
    for t in range(64):
        kind, k = t % 4, t // 4 % 4
        if kind == 0:
            out.append(x[t ^ 1] * 2 + 1000)
        elif kind == 1:
            out.append(x[t] + (k - t) % 4 + 2000)
        elif kind == 2:
            out.append(x[t ^ 1] + 4000)
        else:
            out.append(table[k] + 4000)
    return Launch((1, 1, 1), [np.zeros(64, F32), x], {0: out})


@case("shared", (64, 1, 1))
def settings(rng: np.random.Generator, block: Dim3) -> Launch:
    record = np.zeros((), np.dtype([("scale", F32, 6), ("order", I32, 6), ("shift", F64)]))
    record["scale"], record["order"], record["shift"] = np.arange(6) + 0.5, rng.permutation(6), 0.25
    i = np.arange(N)
    expected = record["scale"][record["order"][i % 6]] * i + 0.25
    return Launch(blocks_for(N, block), [np.zeros(N), record[()], I32(N)], {0: expected}, 1e-6)


@case("shared", (64, 1, 1), (45, 1, 1))
def carved(rng: np.random.Generator, block: Dim3) -> Launch:
    n = 40
    x = floats(rng, n)
    t = np.arange(n)
    expected = x[::-1].astype(F64) + (t * 3 % n * 7) % 256
    return Launch((1, 1, 1), [np.zeros(n), x, I32(n)], {0: expected}, shared=9 * n)
