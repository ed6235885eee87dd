"""Wrong programs are refused in one line; programs with odd control flow run as the oracle runs them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import oracle
import pytest
from corpus_case import CORPUS
from mutants import cousin, mutant, relabelled

from ptxtrain.engine.device.nvrtc import compile_to_ptx
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.parser import parse

FILES = ("control", "shared", "votes", "scans", "functions", "local")
ODD = ("switch_dense", "nested_loops", "collatz", "early_returns", "irreducible", "bisect", "switch_sparse")
COUNT = 70


@cache
def text_of(file: str) -> str:
    return compile_to_ptx((CORPUS / f"{file}.cu").read_text(encoding="utf-8"), f"{file}.cu")


def look(seed: int) -> int:
    """Compile a mutant to IR, if it is accepted; how many kernels were."""
    change = cousin if seed % 4 else mutant
    accepted, refusal = 0, "x.ptx:1:1: none"
    try:
        module = load(change(text_of(FILES[seed % len(FILES)]), seed))
        for name, function in module.tree.functions.items():
            if function.is_entry:
                llvm.parse_assembly(module.ir(name, (48, 1, 1))).verify()
                accepted += 1
    except PtxtrainError as error:
        refusal = str(error)
    assert re.search(r":\d+:\d+: .", refusal) and "\n" not in refusal, refusal
    return accepted


def test_mutants_are_refused_or_compiled() -> None:
    assert sum(look(seed) > 0 for seed in range(60)) > 5  # else they say nothing about the compiler


@pytest.mark.slow
def test_many_mutants() -> None:
    for seed in range(100, 600):
        look(seed)


def runs_alike(seed: int) -> bool:
    """A kernel with some branches led elsewhere, in the oracle and compiled. False: it does not end, or goes astray."""
    name = ODD[seed % len(ODD)]
    source = relabelled(text_of("control"), name, seed)
    x = np.random.default_rng(seed).integers(0, 100, COUNT).astype(np.int32)
    results = []
    for run in ("oracle", "compiler"):
        args = [np.full(COUNT, -9, np.int32), x.copy(), np.int32(COUNT)]
        if name == "bisect":
            args = [args[0], np.sort(x), np.int32(COUNT), x[::-1].copy(), np.int32(COUNT)]
        elif name == "switch_sparse":
            args.insert(2, np.int32(1000))
        if run == "oracle":
            try:
                oracle.run(parse(source, Path("odd.ptx")), name, (2, 1, 1), (40, 1, 1), args)
            except (TimeoutError, IndexError):
                return False
        else:
            load(source).launch(name, grid=(2, 1, 1), block=(40, 1, 1), args=args)
        results.append(args[0])
    np.testing.assert_array_equal(results[1], results[0], f"seed {seed}: {name}\n{source}")
    return True


def test_odd_control_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_STEPS", 40_000)
    assert sum(runs_alike(seed) for seed in range(21)) > 8


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(6))
def test_much_odd_control_flow(hundred: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_STEPS", 100_000)
    assert sum(runs_alike(seed) for seed in range(100 * hundred + 100, 100 * hundred + 200)) > 40
