"""Random programs on the CPU device against the oracle, bit for bit. A failure prints its seed and its program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from programs import FLOATS, generate

from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.parser import parse


def differs(seed: int) -> str | None:
    """What went wrong with the program of this seed, or None."""
    source, block = generate(seed)
    threads = 2 * block
    rng = np.random.default_rng(seed)
    given = rng.integers(0, 1 << 32, (threads, 4), dtype=np.uint32)
    given[rng.random((threads, 4)) < 0.5] %= 9
    results = []
    for run in ("oracle", "compiler"):
        out, floats = np.full((threads, 10), 0xDEAD, np.uint32), np.zeros((threads, FLOATS), np.float32)
        args = [given.copy(), out, floats]
        if run == "oracle":
            oracle.run(parse(source, Path(f"{seed}.ptx")), "k", (2, 1, 1), (block, 1, 1), args)
        else:
            load(source).launch("k", grid=(2, 1, 1), block=(block, 1, 1), args=args)
        results.append((out, floats))
    (out, floats), (got, got_floats) = results
    bits, got_bits = (np.where(np.isnan(f), np.float32(np.nan), f).view(np.uint32) for f in (floats, got_floats))
    for name, a, b in (("out", out, got), ("floats", bits, got_bits)):
        if not np.array_equal(a, b):
            thread, column = (int(axis[0]) for axis in np.nonzero(a != b))
            shown = f"{b[thread, column]:#x}, expected {a[thread, column]:#x}"
            return f"seed {seed}, blocks of {block}: {name}[{thread}][{column}] is {shown}\n{source}"
    return None


# 1012: mul.wide.u32 by a negative immediate; 1111: a masked choice that LLVM gives a wrong truth table.
@pytest.mark.parametrize("seed", [*range(32), 1012, 1111])
def test_random_programs(seed: int) -> None:
    wrong = differs(seed)
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(30))
def test_thousands_of_random_programs(hundred: int) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        wrong = differs(seed)
        assert wrong is None, wrong


def test_programs_are_not_trivial() -> None:
    """Most have branches and loops, many have barriers and warp instructions: else the tests above say little."""
    sources = [generate(seed)[0] for seed in range(40)]
    assert all("bra " in source for source in sources)
    for what, least in (("LOOP", 25), ("bar.sync", 8), ("shfl", 6), ("ELSE", 25), ("fma", 20), ("%c1", 20)):
        assert sum(what in source for source in sources) >= least, what
