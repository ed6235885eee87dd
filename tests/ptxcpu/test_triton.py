"""What Triton makes of its tutorials' kernels, on the CPU device, against NumPy.

Triton compiles in a process of its own: this Python if it has Triton, else `$PTXTRAIN_TRITON_PYTHON`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptxtrain.engine.ptxcpu import load

pytestmark = pytest.mark.slow

F16, BF16, F32, F64, I32 = np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32
Result = tuple[
    tuple[int, int, int], list[Any], dict[int, Any], float, float
]  # grid, arguments, right results, rtol, atol


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = os.environ.get("PTXTRAIN_TRITON_PYTHON")
    if python is None:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed (pip install 'ptxtrain[triton]')")
        python = sys.executable
    folder = tmp_path_factory.mktemp("triton")
    script = Path(__file__).parent / "triton_kernels.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


BUILDERS: dict[str, Callable[[np.random.Generator], Result]] = {}


def case(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    def register(build: Callable[..., Result]) -> Callable[..., Result]:
        for name in names:
            BUILDERS[name] = (lambda rng, name=name: build(rng, name)) if len(names) > 1 else build
        return build

    return register


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> Any:
    return rng.normal(size=shape).astype(dtype)


def softmax64(x: Any) -> Any:
    e = np.exp(x.astype(F64) - x.astype(F64).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@case("add")
def _add(rng: np.random.Generator) -> Result:
    x, y = normal(rng, F32, 1300), normal(rng, F32, 1300)
    return (3, 1, 1), [np.zeros(1300, F32), x, y, I32(1300)], {0: x + y}, 0, 0


@case("softmax")
def _softmax(rng: np.random.Generator) -> Result:
    x = normal(rng, F32, 7, 201) * 3
    return (7, 1, 1), [np.zeros_like(x), x, I32(201)], {0: softmax64(x)}, 1e-5, 1e-8


@case("layer_norm_forward")
def _layer_norm_forward(rng: np.random.Generator) -> Result:
    x, w, b = normal(rng, BF16, 5, 300), normal(rng, F32, 300), normal(rng, F32, 300)
    v = x.astype(F64)
    mean, rstd = v.mean(1), 1 / np.sqrt(v.var(1) + 1e-5)
    y = (v - mean[:, None]) * rstd[:, None] * w + b
    args = [x, np.zeros((5, 300), BF16), w, b, np.zeros(5, F32), np.zeros(5, F32), I32(300), F32(1e-5)]
    return (5, 1, 1), args, {1: y, 4: mean, 5: rstd}, 5e-3, 1e-5


@case("layer_norm_backward")
def _layer_norm_backward(rng: np.random.Generator) -> Result:
    rows, width = 10, 200
    x, dy, w = normal(rng, BF16, rows, width), normal(rng, BF16, rows, width), normal(rng, F32, width)
    v, g = x.astype(F64), dy.astype(F64)
    mean = v.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(v.var(1, keepdims=True) + 1e-5)
    normed, wg = (v - mean) * rstd, w * g
    dx = (wg - (normed * (normed * wg).mean(1, keepdims=True) + wg.mean(1, keepdims=True))) * rstd
    dw = np.stack([(g * normed)[i::3].sum(0) for i in range(3)])
    db = np.stack([g[i::3].sum(0) for i in range(3)])
    args = [np.zeros((rows, width), F32), dy, np.zeros((3, width), F32), np.zeros((3, width), F32), x, w]
    args += [mean[:, 0].astype(F32), rstd[:, 0].astype(F32), np.zeros(6, I32), I32(width)]
    return (rows, 1, 1), args, {0: dx, 2: dw, 3: db}, 1e-4, 1e-4


@case("layer_norm_sums")
def _layer_norm_sums(rng: np.random.Generator) -> Result:
    x = normal(rng, F32, 11, 150)
    return (3, 1, 1), [x, np.zeros(150, F32), I32(11), I32(150)], {1: x.sum(0, dtype=F64)}, 1e-5, 1e-5


@case("matmul_f16", "matmul_bf16", "matmul_tf32", "matmul_f32")
def _matmul(rng: np.random.Generator, name: str) -> Result:
    given = {"f16": F16, "bf16": BF16}.get(name.removeprefix("matmul_"), F32)
    out = F16 if name.endswith("_f16") else F32
    m, n, k = 70, 144, 80
    a, b = normal(rng, given, m, k), normal(rng, given, k, n)
    if name == "matmul_tf32":  # representable exactly, so that rounding is no question
        a, b = (v.view(np.uint32) & 0xFFFFE000 for v in (a, b))
        a, b = a.view(F32), b.view(F32)
    expected = a.astype(F64) @ b.astype(F64)
    args = [a, b, np.zeros((m, n), out), I32(m), I32(n), I32(k)]
    tolerance = 2e-3 if out is F16 else 1e-4
    return (3 * 3, 1, 1), args, {2: expected}, tolerance, tolerance * 10


@case("matmul_split")
def _matmul_split(rng: np.random.Generator) -> Result:
    a, b = normal(rng, BF16, 64, 160), normal(rng, BF16, 160, 64)
    args = [a, b, np.zeros((64, 64), F32), I32(64), I32(64), I32(160)]
    return (2, 2, 2), args, {2: a.astype(F64) @ b.astype(F64)}, 1e-4, 1e-3


def _heads(rng: np.random.Generator, dtype: Any, count: int, heads: int, length: int, dim: int) -> list[Any]:
    return [normal(rng, dtype, heads, length, dim) for _ in range(count)]


def _scores(q: Any, k: Any, causal: bool) -> Any:
    s = q.astype(F64) @ k.astype(F64).transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    return np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf) if causal else s


def _base2(s: Any) -> Any:
    """log2 of the sum of exponentials."""
    most = s.max(-1)
    return (most + np.log(np.exp(s - most[..., None]).sum(-1))) / np.log(2)


@case("attention_forward", "attention_full")
def _attention(rng: np.random.Generator, name: str) -> Result:
    causal = name == "attention_forward"
    dtype, out, dim, block = (BF16, BF16, 32, 32) if causal else (F16, F32, 64, 64)
    length = 75
    q, k, v = _heads(rng, dtype, 3, 2, length, dim)
    s = _scores(q, k, causal)
    expected = softmax64(s) @ v.astype(F64)
    scale = F32(1 / np.sqrt(dim) / np.log(2))
    args = [q, k, v, np.zeros((2, length, dim), out), np.zeros((2, length), F32), I32(length), scale]
    return (-(-length // block), 2, 1), args, {3: expected, 4: _base2(s)}, 2e-2, 2e-2


@case("attention_delta")
def _attention_delta(rng: np.random.Generator) -> Result:
    out, do = _heads(rng, BF16, 2, 2, 75, 32)
    expected = (out.astype(F64) * do.astype(F64)).sum(-1)
    return (3, 2, 1), [out, do, np.zeros((2, 75), F32), I32(75)], {2: expected}, 1e-4, 1e-4


@case("attention_backward")
def _attention_backward(rng: np.random.Generator) -> Result:
    length, dim = 75, 32
    q, k, v, do = _heads(rng, BF16, 4, 2, length, dim)
    s, g = _scores(q, k, True), do.astype(F64)
    p = softmax64(s)
    delta = ((p @ v.astype(F64)) * g).sum(-1)
    ds = p * (g @ v.astype(F64).transpose(0, 2, 1) - delta[..., None]) / np.sqrt(dim)
    dq, dk, dv = ds @ k.astype(F64), ds.transpose(0, 2, 1) @ q.astype(F64), p.transpose(0, 2, 1) @ g
    shape = (2, length, dim)
    args = [q, k, v, do, np.zeros(shape, F32), np.zeros(shape, F32), np.zeros(shape, F32)]
    args += [_base2(s).astype(F32), delta.astype(F32), I32(length), F32(1 / np.sqrt(dim) / np.log(2))]
    return (3, 2, 1), args, {4: dq, 5: dk, 6: dv}, 3e-2, 3e-2


@case("cross_entropy")
def _cross_entropy(rng: np.random.Generator) -> Result:
    x, target = normal(rng, BF16, 6, 200) * 2, rng.integers(0, 200, 6, dtype=I32)
    x = x.astype(BF16)
    p = softmax64(x)
    loss = -np.log(p[np.arange(6), target])
    p[np.arange(6), target] -= 1
    return (6, 1, 1), [np.zeros(6, F32), x.copy(), target, I32(200)], {0: loss, 1: p}, 1e-2, 1e-4


@case("swiglu")
def _swiglu(rng: np.random.Generator) -> Result:
    gate, up = normal(rng, BF16, 900), normal(rng, BF16, 900)
    g = gate.astype(F64)
    return (2, 1, 1), [np.zeros(900, BF16), gate, up, I32(900)], {0: g / (1 + np.exp(-g)) * up.astype(F64)}, 1e-2, 1e-6


def _philox(seed: int, counter: Any) -> Any:
    """The first word of Philox 4x32, ten rounds, as Triton counts: the offset in the first word of the counter."""
    c = [counter.astype(np.uint64), *(np.zeros_like(counter, dtype=np.uint64) for _ in range(3))]
    k, low = [seed & 0xFFFFFFFF, seed >> 32], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (q >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            q & low,
            (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            p & low,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


@case("dropout")
def _dropout(rng: np.random.Generator) -> Result:
    x = normal(rng, F32, 700)
    word = _philox(1234, np.arange(700)).astype(np.uint32).view(I32)
    uniform = np.where(word < 0, -word.astype(np.int64) - 1, word).astype(F32) * F32(4.6566127342e-10)
    expected = np.where(uniform > F32(0.3), x / F32(0.7), 0)
    return (3, 1, 1), [np.zeros(700, F32), x, I32(700), F32(0.3), I32(1234)], {0: expected}, 1e-6, 0


@case("scan")
def _scan(rng: np.random.Generator) -> Result:
    x = rng.integers(-9, 9, (3, 256)).astype(F32)
    return (3, 1, 1), [np.zeros_like(x), x], {0: np.cumsum(x, 1)}, 0, 0


@case("order")
def _order(rng: np.random.Generator) -> Result:
    x = rng.permutation(4 * 128).reshape(4, 128).astype(I32)
    return (4, 1, 1), [np.zeros_like(x), np.zeros(4, I32), x], {0: np.sort(x, 1), 1: x.argmax(1)}, 0, 0


@case("histogram")
def _histogram(rng: np.random.Generator) -> Result:
    x = rng.integers(0, 32, 500, dtype=I32)
    counts = np.bincount(x, minlength=32)
    counts[31] += 12
    return (2, 1, 1), [np.zeros(32, I32), x, I32(500)], {0: counts}, 0, 0


def test_at_least_twelve_kernels() -> None:
    assert len(BUILDERS) >= 12


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("name", BUILDERS)
def test_kernel(folder: Path, name: str, arch: int) -> None:
    about = json.loads((folder / "kernels.json").read_text())[f"{name}-{arch}"]
    module = load(folder / f"{name}-{arch}.ptx")
    grid, args, expected, rtol, atol = BUILDERS[name](np.random.default_rng(len(name)))
    missing = len(module.tree.entry(about["entry"]).params) - len(args)
    args = [*args, *[np.uint64(0)] * missing]  # scratch memory that these kernels do not use
    module.launch(
        about["entry"], grid=grid, block=(about["threads"], 1, 1), args=args, shared=about["shared"], threads=2
    )
    for index, wanted in expected.items():
        got = np.asarray(args[index]).astype(F64)
        np.testing.assert_allclose(got, np.asarray(wanted, F64), rtol=rtol, atol=atol, err_msg=f"argument {index}")
