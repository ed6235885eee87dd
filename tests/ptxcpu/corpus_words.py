"""Cases of the corpus: integers and bits, scans and sorts, atomics, votes and shuffles."""

from __future__ import annotations

import zlib

import numpy as np
from corpus_case import Dim3, Launch, blocks_for, case, floats, ints

F32, F64, I32, U32, I64, U64 = np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64
N = 150


def _words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 1 << 64, shape, dtype=U64)


def _s(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


@case("integers", (64, 1, 1))
def products(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = _words(rng, N), _words(rng, N)
    high, low, signed = [], [], []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        high.append(x * y >> 64)
        low.append((x * y + ((x & 0xFFFFFFFF) * (y & 0xFFFFFFFF) >> 32)) % (1 << 64))
        signed.append(_s((_s(x, 64) * _s(y, 64) >> 64) + (_s(x, 32) * _s(y, 32) >> 32), 64))
    args = [np.zeros(N, U64), np.zeros(N, U64), np.zeros(N, I64), a, b, I32(N)]
    return Launch(blocks_for(N, block), args, {0: np.array(high, U64), 1: np.array(low, U64), 2: signed})


@case("integers", (64, 1, 1))
def modpow(rng: np.random.Generator, block: Dim3) -> Launch:
    base, power, m = _words(rng, 40), rng.integers(0, 200, 40, dtype=U32), (1 << 61) - 1
    expected = [pow(x, e, m) for x, e in zip(base.tolist(), power.tolist(), strict=True)]
    return Launch((1, 1, 1), [np.zeros(40, U64), base, power, U64(m), I32(40)], {0: np.array(expected, U64)})


@case("integers", (64, 1, 1))
def quotients(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = _words(rng, N), _words(rng, N) >> rng.integers(0, 60, N).astype(U64)
    b |= U64(1)
    rows = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):

        def divide(bits: int, signed: bool, p: int, q: int) -> tuple[int, int]:
            p, q = (_s(p, bits), _s(q, bits)) if signed else (p % (1 << bits), q % (1 << bits))
            quotient = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
            return quotient, p - quotient * q

        rows.append(
            [
                *divide(64, True, x, y),
                *(_s(v, 64) for v in divide(64, False, x, y)),
                *(divide(32, True, x, y | 1)[0], divide(32, False, x, y | 1)[1]),
                *(divide(16, True, x, y | 1)[0], divide(8, False, x, y | 1)[1]),
            ]
        )
    args = [np.zeros((N, 8), I64), a.view(I64), b.view(I64), I32(N)]
    return Launch(blocks_for(N, block), args, {0: rows})


@case("integers", (64, 1, 1))
def bits(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(0, 1 << 32, (2, N), dtype=U32) >> rng.integers(0, 32, (2, N)).astype(U32)
    rows = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        both, eight = y << 32 | x, [(y << 32 | x) >> 8 * i & 255 for i in range(8)]
        wide = x << 32 | y
        low = (x & 1) << 40 | y
        rows.append(
            [
                *(int(f"{x:032b}"[::-1], 2), (x ^ y).bit_count(), 32 - x.bit_length(), (x & -x).bit_length()),
                sum(eight[n] << 8 * i for i, n in enumerate((5, 2, 6, 3))),
                (both << (y & 31) >> 32) & 0xFFFFFFFF,
                both >> min(y & 63, 32) & 0xFFFFFFFF,
                *(wide.bit_count(), 64 - low.bit_length(), int(f"{wide:064b}"[::-1], 2) >> 11 & 0xFFFFFFFF),
            ]
        )
    return Launch(blocks_for(N, block), [np.zeros((N, 10), U32), a, b, I32(N)], {0: np.array(rows, U32)})


@case("integers", (64, 1, 1))
def media(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(0, 1 << 32, (2, N), dtype=U32).view(I32)
    rows = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        ux, uy = x % (1 << 32), y % (1 << 32)
        bx, by = [_s(x >> 8 * i, 8) for i in range(4)], [_s(y >> 8 * i, 8) for i in range(4)]
        low = sum(_s(x >> 16 * i, 16) * by[i] for i in range(2)) + 5
        high = sum((ux >> 16 * i & 0xFFFF) * (uy >> 16 + 8 * i & 255) for i in range(2)) + 6
        row = [abs(x - y) + 7, abs(ux - uy) + 9, x + y >> 1, x + y + 1 >> 1, _s(x, 24) * _s(y, 24)]
        row += [(ux & 0xFFFFFF) * (uy & 0xFFFFFF), sum(p * q for p, q in zip(bx, by, strict=True)) + 100]
        rows.append([_s(v, 32) for v in (*row, _s(low, 32) ^ _s(high, 32))])
    return Launch(blocks_for(N, block), [np.zeros((N, 8), I32), a, b, I32(N)], {0: rows})


@case("integers", (48, 1, 1))
def crc32(rng: np.random.Generator, block: Dim3) -> Launch:
    text = rng.integers(0, 256, (96, 21), dtype=np.uint8)
    expected = np.array([zlib.crc32(row.tobytes()) for row in text], U32)
    return Launch((2, 1, 1), [np.zeros(96, U32), text, I32(21)], {0: expected})


@case("integers", (64, 1, 1))
def gcd(rng: np.random.Generator, block: Dim3) -> Launch:
    f = rng.integers(1, 1000, (3, N)).astype(U64)
    a, b = f[0] * f[2] * U64(6), f[1] * f[2] * U64(4)
    return Launch(blocks_for(N, block), [np.zeros(N, U64), a, b, I32(N)], {0: np.gcd(a, b)})


@case("integers", (64, 1, 1))
def wide_sums(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = rng.integers(0, 1 << 32, (2, 70, 8), dtype=U32)
    a[::3, 2:6], b[::3, 2:6] = 0xFFFFFFFF, 0  # long carries
    sums, differences = [], []
    for x, y in zip(a, b, strict=True):
        p, q = (int.from_bytes(v.tobytes(), "little") for v in (x, y))
        sums.append(np.frombuffer((p + q).to_bytes(36, "little"), U32))
        differences.append(np.frombuffer(((p - q) % (1 << 288)).to_bytes(36, "little"), U32))
    args = [np.zeros((70, 9), U32), np.zeros((70, 9), U32), a, b, I32(70)]
    return Launch((2, 1, 1), args, {0: np.stack(sums), 1: np.stack(differences)})


@case("integers", (64, 1, 1))
def wide_product(rng: np.random.Generator, block: Dim3) -> Launch:
    a, b = _words(rng, 70, 2), _words(rng, 70, 2)
    a[::4] = 0xFFFFFFFFFFFFFFFF
    expected = []
    for x, y in zip(a, b, strict=True):
        product = int.from_bytes(x.tobytes(), "little") * int.from_bytes(y.tobytes(), "little")
        expected.append(np.frombuffer(product.to_bytes(32, "little"), U64))
    return Launch((2, 1, 1), [np.zeros((70, 4), U64), a, b, I32(70)], {0: np.stack(expected)})


@case("integers", (40, 1, 1))
def generator(rng: np.random.Generator, block: Dim3) -> Launch:
    i = np.arange(80, dtype=U32)
    with np.errstate(over="ignore"):
        x, y, z, w = U32(123456789) + i, U32(362436069) ^ i, U32(521288629) * (i + U32(1)), np.full(80, 88675123, U32)
        for _ in range(25):
            t = x ^ x << U32(11)
            x, y, z = y, z, w
            w = w ^ w >> U32(19) ^ (t ^ t >> U32(8))
            z = z << U32(13) | z >> U32(19)
        return Launch((2, 1, 1), [np.zeros(80, U32), I32(25)], {0: w + z})


@case("scans", (64, 1, 1), (16, 1, 1))
def scan_tree(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 10, 3, 2 * block[0])
    return Launch((3, 1, 1), [np.zeros_like(x), x], {0: np.cumsum(x, 1) - x}, shared=8 * block[0])


@case("scans", (64, 1, 1), (256, 1, 1))
def scan_shuffle(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 10, 500)
    expected = np.concatenate([np.cumsum(x[i : i + block[0]]) for i in range(0, 500, block[0])])
    return Launch(blocks_for(500, block), [np.zeros_like(x), x, I32(500)], {0: expected})


@case("scans", (64, 1, 1), (128, 1, 1))
def scan_chained(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, -9, 10, 1500)
    grid = blocks_for(1500, block)
    args = [np.zeros_like(x), np.zeros(grid[0], I32), np.zeros(grid[0], I32), x, I32(1500)]
    return Launch(grid, args, {0: np.cumsum(x)})


@case("scans", (64, 1, 1))
def scan_segments(rng: np.random.Generator, block: Dim3) -> Launch:
    x, starts = ints(rng, -9, 10, N).astype(F32), (rng.random(N) < 0.2).astype(np.uint8)
    expected, total = [], F32(0)
    for i, v in enumerate(x):
        total = v if starts[i] or i % 32 == 0 else total + v
        expected.append(total)
    return Launch(blocks_for(N, block), [np.zeros_like(x), x, starts, I32(N)], {0: expected})


@case("scans", (64, 1, 1))
def compact(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 1000, N)
    kept = x[x % 3 == 0]
    out = np.full(N, 1 << 30, I32)
    expected = np.full(N, 1 << 30, I32)
    expected[: kept.size] = kept
    # One worker, so that warps come in order.
    return Launch(blocks_for(N, block), [out, np.zeros(1, I32), x, I32(N)], {0: expected, 1: [kept.size]}, threads=1)


@case("scans", (64, 1, 1), (100, 1, 1))
def sort_bitonic(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 1 << 32, (3, 256), dtype=U32)
    return Launch((3, 1, 1), [x.copy(), I32(256)], {0: np.sort(x, 1)}, shared=1024)


@case("scans", (64, 1, 1), (256, 1, 1))
def sort_radix(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 4096, (2, block[0]), dtype=U32)
    return Launch((2, 1, 1), [x.copy()], {0: np.sort(x, 1)})


@case("atomics", (64, 1, 1), (100, 1, 1))
def histogram(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 256, 2000, dtype=np.uint8)
    return Launch((3, 1, 1), [np.zeros(64, U32), x, I32(2000)], {0: np.bincount(x & 63, minlength=64)})


@case("atomics", (64, 1, 1), (50, 1, 1))
def histogram_matched(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 256, N, dtype=np.uint8)
    return Launch(blocks_for(N, block), [np.zeros(8, U32), x, I32(N)], {0: np.bincount(x & 7, minlength=8)})


@case("atomics", (64, 1, 1))
def maxima(rng: np.random.Generator, block: Dim3) -> Launch:
    x = np.abs(floats(rng, N))
    expected = [x[i::5].max() for i in range(5)]
    return Launch(blocks_for(N, block), [np.zeros(5, F32), x, I32(N), I32(5)], {0: expected})


@case("atomics", (64, 1, 1), (40, 1, 1))
def locked_sum(rng: np.random.Generator, block: Dim3) -> Launch:
    count = 4 * block[0]
    args = [np.zeros(1, I32), np.zeros(1), np.zeros(1, I32)]
    return Launch((4, 1, 1), args, {0: [0], 1: [1.5 * count], 2: [count]})


@case("atomics", (64, 1, 1), (20, 1, 1))
def spinning_sum(rng: np.random.Generator, block: Dim3) -> Launch:
    total = 2 * block[0] * (block[0] - 1) // 2
    return Launch((2, 1, 1), [np.zeros(1, I32), np.zeros(1, I32)], {0: [0], 1: [total]})


@case("atomics", (64, 1, 1))
def tickets(rng: np.random.Generator, block: Dim3) -> Launch:
    args = [np.zeros(128, U32), np.zeros(1, U32), np.zeros(1, U64), np.zeros(1, I64)]
    return Launch(
        (2, 1, 1), args, {0: np.arange(128), 1: [128], 2: [(127 * 64) << 20], 3: [-127 * 3000000000]}, threads=1
    )


@case("atomics", (64, 1, 1), (90, 1, 1))
def queue(rng: np.random.Generator, block: Dim3) -> Launch:
    args = [np.zeros(block[0], I32), np.zeros(1, I32), I32(25)]
    return Launch((3, 1, 1), args, {0: np.full(block[0], 25 * 24 // 2), 1: [28]})


@case("votes", (64, 1, 1))
def votes(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 100, 3, 32)
    x[0] |= 64
    x[1] = x[1] // 3 + 55
    all_, any_ = (x > 10).all(1), (x > 90).any(1)
    uni = (x > 50).all(1) | ~(x > 50).any(1)
    word = all_ | any_ * 2 | (x & 1).sum(1) * 4 | uni * 1024
    padded = np.concatenate([x.ravel(), x[0]])
    expected = np.repeat(np.append(word, word[0]), 32).astype(U32)
    return Launch((2, 1, 1), [np.zeros(128, U32), padded], {0: expected})


@case("votes", (64, 1, 1))
def matches(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 6, 2, 32)
    x[1] += 100 * (np.arange(32) % 2)
    any_ = np.array([[sum(1 << j for j in range(32) if row[j] == v) for v in row] for row in x], U32)
    every = [0xFFFFFFFF] * 32 + [7] * 32
    args = [np.zeros(64, U32), np.zeros(64, U32), x]
    return Launch((1, 1, 1), args, {0: any_.ravel(), 1: np.array(every, U32)})


@case("votes", (64, 1, 1))
def shuffles(rng: np.random.Generator, block: Dim3) -> Launch:
    x, lane = ints(rng, -99, 99, 2, 32), np.arange(32)
    up = np.where(lane >= 3, lane - 3, lane)
    down = np.where(lane % 16 + 5 < 16, lane + 5, lane)
    total = x[:, up] * 3 + x[:, down] * 5 + x[:, lane ^ 7] * 7 + x[:, lane * 3 % 32] * 11 + x[:, lane // 4 * 4 + 2] * 13
    total = total + x[:, lane ^ 1] * 17 + x[:, np.maximum(lane - 1, 0)] * 19
    return Launch((1, 1, 1), [np.zeros(64, I32), x], {0: total.ravel()})


@case("votes", (64, 1, 1))
def active(rng: np.random.Generator, block: Dim3) -> Launch:
    x, lane = ints(rng, 0, 60, 2, 32), np.arange(32)
    expected = []
    for row in x:
        third = sum(1 << i for i in lane.tolist() if row[i] % 3 == 0)
        sixth = sum(1 << i for i in lane.tolist() if row[i] % 6 == 0)
        expected += [0 if v % 3 else third if v % 2 else sixth for v in row.tolist()]
    return Launch((1, 1, 1), [np.zeros(64, U32), x], {0: np.array(expected, U32)})


@case("votes", (64, 1, 1), (90, 1, 1))
def block_votes(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 98, block[0])
    every = ((x > 50) | (np.arange(block[0]) < 90)).all()
    expected = (x > 50).sum() * 4 + int(every) * 2 + int((x > 98).any())
    return Launch((1, 1, 1), [np.zeros_like(x), x, I32(90)], {0: np.full(block[0], expected)})


@case("votes", (64, 1, 1))
def reductions(rng: np.random.Generator, block: Dim3) -> Launch:
    x = rng.integers(0, 100, (2, 32), dtype=U32)
    sums = x.sum(1) + x.min(1) * 3 + np.bitwise_or.reduce(x, 1) * 5
    most = (x.astype(I64).max(1) - 50) * 7
    halves = np.bitwise_xor.reduce(x.reshape(2, 2, 16), 2).astype(I64) * 11
    expected = np.repeat((sums.astype(I64) + most)[:, None] + halves, 16, 1).astype(U32)
    return Launch((1, 1, 1), [np.zeros(64, U32), x], {0: expected.ravel()})


@case("votes", (64, 1, 1))
def group_sums(rng: np.random.Generator, block: Dim3) -> Launch:
    x = ints(rng, 0, 50, 2, 32)
    expected = []
    for row in x.tolist():
        leaders = {v % 5: i for i, v in reversed(list(enumerate(row)))}
        expected += [sum(v for v in row if v % 5 == w % 5) * 100 + (leaders[w % 5] == i) for i, w in enumerate(row)]
    return Launch((1, 1, 1), [np.zeros(64, I32), x], {0: expected})
