"""Each way to break each function's contract is one error that names function and argument, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kitbench import Place, normal

from ptxtrain.engine import kit
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kit.contracts import Sizes, bind, number
from ptxtrain.engine.kit.core import Call
from ptxtrain.engine.ops import add

Arrays = dict[str, Any]


def arrays(**shapes: tuple[int, ...]) -> Arrays:
    """Arrays of f32 that hold something."""
    return {name: normal(len(name), *shape) for name, shape in shapes.items()}


# A right call of each function: arrays that are read, arrays that are written, and what else it takes.
X, ROW, N = (3, 5), (5,), (3,)
NUMBERS = {"lr": 0.1, "bc1": 0.1, "bc2": 0.1}
QUERIES, KEYS = (1, 2, 3, 4), (1, 1, 3, 4)
CALLS: dict[str, tuple[Arrays, Arrays, dict[str, Any]]] = {
    "adamw_step": (arrays(grads=ROW), arrays(params=ROW, m=ROW, v=ROW), NUMBERS),
    "attention_backward": (
        arrays(q=QUERIES, k=KEYS, v=KEYS, out=QUERIES, dout=QUERIES, lse=(1, 2, 3)),
        arrays(dq=QUERIES, dk=KEYS, dv=KEYS),
        {},
    ),
    "attention_forward": (arrays(q=QUERIES, k=KEYS, v=KEYS), arrays(out=QUERIES, lse=(1, 2, 3)), {}),
    "cross_entropy": (arrays(logits=X), arrays(loss=N, lse=N, dlogits=X), {"targets": np.zeros(3, np.int32)}),
    "fused_layernorm_gemv": (arrays(x=X, gamma=ROW, beta=ROW, weight=(5, 4)), arrays(out=(3, 4)), {}),
    "fused_rmsnorm_gemv": (arrays(x=X, gamma=ROW, weight=(5, 4)), arrays(out=(3, 4)), {}),
    "gemm": (arrays(a=X, b=(5, 4), bias=(4,)), arrays(out=(3, 4)), {}),
    "layernorm_backward": (
        arrays(x=X, gamma=ROW, dout=X, mean=N, rstd=N),
        arrays(dx=X, dgamma=ROW, dbeta=ROW),
        {},
    ),
    "layernorm_forward": (arrays(x=X, gamma=ROW, beta=ROW), arrays(out=X, mean=N, rstd=N), {}),
    "rmsnorm_backward": (arrays(x=X, gamma=ROW, dout=X, rstd=N), arrays(dx=X, dgamma=ROW), {}),
    "rmsnorm_forward": (arrays(x=X, gamma=ROW), arrays(out=X, rstd=N), {}),
    "rope_backward": (arrays(cos=(3, 2), sin=(3, 2)), arrays(dx=(2, 1, 3, 4)), {}),
    "rope_forward": (arrays(cos=(3, 2), sin=(3, 2)), arrays(x=(2, 1, 3, 4)), {}),
    "softmax_backward": (arrays(out=X, dout=X), arrays(dx=X), {}),
    "softmax_forward": (arrays(x=X), arrays(out=X), {}),
    "swiglu_backward": (arrays(gate=ROW, up=ROW, dout=ROW), arrays(dgate=ROW, dup=ROW), {}),
    "swiglu_forward": (arrays(gate=ROW, up=ROW), arrays(out=ROW), {}),
}
PARAMETERS = [(function, name) for function, (read, written, _) in CALLS.items() for name in (*read, *written)]
# What decides what the others must be: with another size it is they that do not fit.
FIRST = {(function, next(iter(read or written))) for function, (read, written, _) in CALLS.items()} | {
    ("adamw_step", "params"),
    ("rope_forward", "x"),
    ("rope_backward", "dx"),
}
# What brings a letter that later arrays have.
COLUMNS = {*FIRST, ("gemm", "b"), ("fused_rmsnorm_gemv", "weight"), ("fused_layernorm_gemv", "weight")}


def call(function: str, changed: Arrays) -> None:
    read, written, numbers = CALLS[function]
    getattr(kit, function)(**{**read, **written, **changed}, **numbers)


def refused(function: str, changed: Arrays, said: str) -> str:
    """The message of the error, after seeing that no array was changed."""
    read, written, _ = CALLS[function]
    before = {name: a.tobytes() for name, a in {**read, **written}.items()}
    with pytest.raises(kit.ContractError, match=said) as caught:
        call(function, changed)
    assert {name: a.tobytes() for name, a in {**read, **written}.items()} == before
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{function}: ")
    return str(caught.value)


def test_all_functions_are_here_and_right() -> None:
    """Or the refusals below would prove nothing."""
    for function, (read, written, numbers) in CALLS.items():
        getattr(kit, function)(**{n: a.copy() for n, a in {**read, **written}.items()}, **numbers)


@pytest.mark.parametrize(("function", "name"), PARAMETERS)
def test_shapes(function: str, name: str) -> None:
    read, written, _ = CALLS[function]
    right = {**read, **written}[name]
    longer = np.zeros((*right.shape[:-1], right.shape[-1] + 2), np.float32)
    said = refused(function, {name: longer}, "expected shape")
    if (function, name) not in COLUMNS:
        assert said.startswith(f"{function}: {name}: expected shape (") and said.endswith(f", got {longer.shape}")
    if right.ndim > 1:
        said = refused(function, {name: right.reshape(-1)}, "expected shape")
        assert (function, name) in FIRST or said.endswith(f", got ({right.size},)")


@pytest.mark.parametrize(("function", "name"), PARAMETERS)
def test_dtypes(function: str, name: str) -> None:
    read, written, _ = CALLS[function]
    right = {**read, **written}[name]
    for dtype in (np.float64, np.int32, np.bool_, np.dtype(">f4"), ml_dtypes.float8_e5m2):
        said = refused(function, {name: right.astype(dtype)}, f"{name}: expected dtype ")
        assert "f32" in said and said.endswith((f"got {np.dtype(dtype)}", "got i32"))
    if (function, name) not in {*FIRST, ("adamw_step", "grads"), ("gemm", "bias"), ("gemm", "out")}:
        refused(function, {name: right.astype(np.float16)}, f"{name}: expected dtype f32, got f16")


@pytest.mark.parametrize(("function", "name"), PARAMETERS)
def test_layout_kind_and_leave_to_write(function: str, name: str) -> None:
    read, written, _ = CALLS[function]
    right = {**read, **written}[name]
    apart = np.repeat(right, 2, axis=-1)[..., ::2]
    refused(function, {name: apart}, f"{name}: expected a C-contiguous array, got strides")
    refused(function, {name: right.tolist()}, rf"{name}: expected an array \(NumPy, CuPy, .*, got list")
    crooked = np.zeros(right.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(right.shape)
    refused(function, {name: crooked}, f"{name}: expected numbers at multiples of their 4 bytes, got address 0x")
    closed = right.copy()
    closed.flags.writeable = False
    if name in written:
        refused(function, {name: closed}, f"{name}: expected an array that may be written, got a read-only one")
    else:
        spare = {n: a.copy() for n, a in written.items()}
        call(function, {name: closed, **spare})


@pytest.mark.parametrize("function", CALLS)
def test_outputs_that_lie_over_other_arrays(function: str) -> None:
    """Half over an input, which no function can do; and over each other."""
    read, written, _ = CALLS[function]
    names = [*read, *written]
    for name, target in written.items():
        for other in names:
            source = {**read, **written}[other]
            if other == name or source.dtype != target.dtype:
                continue
            room = np.zeros(target.size + source.size, np.float32)
            first = room[: source.size].reshape(source.shape)
            shifted = room[source.size - 1 : source.size - 1 + target.size].reshape(target.shape)
            said = refused(function, {other: first, name: shifted}, "memory of its own")
            assert {name, other} == {said.split(": ")[1], said.split("got memory that ")[1].removesuffix(" has too")}


@pytest.mark.parametrize(
    ("function", "name", "other"),
    [
        ("adamw_step", "params", "m"),
        ("layernorm_backward", "dx", "x"),
        ("layernorm_backward", "dx", "dout"),
        ("layernorm_backward", "dgamma", "dbeta"),
        ("layernorm_forward", "mean", "rstd"),
        ("rmsnorm_backward", "dx", "dout"),
        ("rope_forward", "x", "cos"),
        ("swiglu_backward", "dgate", "dup"),
    ],
)
def test_outputs_that_are_other_arrays(function: str, name: str, other: str) -> None:
    """Where the function cannot work in place; where it can, its own tests do."""
    shape = {**CALLS[function][0], **CALLS[function][1]}[name].shape
    if function == "rope_forward":
        shape = (1, 2, 4)
    one = np.zeros(shape, np.float32)
    changed = {name: one, other: one}
    if function == "rope_forward":
        changed = {"x": one, "cos": one.reshape(-1)[:4].reshape(2, 2), "sin": np.zeros((2, 2), np.float32)}
    refused(function, changed, "memory of its own")


def test_outputs_hold_nothing_in_checked_mode(checked_place: Place) -> None:
    """So a kernel that reads what it is to write is found out, also in memory that does hold something."""
    x, out = normal(1, 40), normal(2, 40)
    call = Call("sum")
    x_, out_ = call.input("x", x, ("N",), "f32"), call.output("out", out, ("N",), "f32")
    with pytest.raises(PtxtrainError, match=r"uninitialised: .* reads byte 0 of out and a"):
        call.run(lambda rec: add.into(rec, out_.buffer, out_.buffer, x_.buffer, count=40))
    call = Call("sum")
    x_, out_ = call.input("x", x, ("N",), "f32"), call.state("out", out, ("N",), "f32")
    call.run(lambda rec: add.into(rec, out_.buffer, out_.buffer, x_.buffer, count=40))
    np.testing.assert_array_equal(out, normal(2, 40) + x)


def test_a_contract_error_is_what_callers_expect() -> None:
    """One line at the command line's edge, and a ValueError in other people's code."""
    assert issubclass(kit.ContractError, PtxtrainError) and issubclass(kit.ContractError, ValueError)
    assert kit.ContractError.exit_code == 1


def shapes() -> Iterator[tuple[Callable[[Sizes], None], str]]:
    yield lambda s: bind("op", "x", (3, 4), ("N", "N"), s), r"x: expected shape \(N, N\), got \(3, 4\)"
    yield lambda s: bind("op", "x", (), ("...", "D"), s), r"x: expected shape \(..., D\), got \(\)"
    yield lambda s: bind("op", "x", (4, 3), (2, "D"), s), r"x: expected shape \(2, D\) = \(2, \?\), got \(4, 3\)"
    yield (
        lambda s: bind("op", "x", (2**31, 1), ("N", "D"), s),
        r"x: expected N of at most 2,147,483,647, got 2,147,483,648",
    )
    yield lambda s: bind("op", "x", (2**20, 2**20, 1), ("...", "D"), s), r"x: expected at most 2,147,483,647 rows"
    yield lambda s: _twice(s, (2, 3, 4), ("...", "D"), (3, 2, 4), ("...", "D")), r"shape \(..., D\) = \(2, 3, 4\), got"
    yield lambda s: _twice(s, (4,), ("...", "D"), (1, 4), ("...", "D")), r"shape \(..., D\) = \(4,\), got \(1, 4\)"
    yield lambda s: _twice(s, (4,), ("...", "D"), (1,), ("...",)), r"shape \(...,\) = \(\), got \(1,\)"
    yield lambda s: _twice(s, (3, 4), ("M", "K"), (5, 6), ("K", "N")), r"shape \(K, N\) = \(4, \?\), got \(5, 6\)"


def _twice(sizes: Sizes, a: tuple[int, ...], axes_a: Any, b: tuple[int, ...], axes_b: Any) -> None:
    bind("op", "a", a, axes_a, sizes)
    bind("op", "b", b, axes_b, sizes)


@pytest.mark.parametrize("case", range(len(list(shapes()))))
def test_axes_are_said_as_they_are_known(case: int) -> None:
    broken, said = list(shapes())[case]
    with pytest.raises(kit.ContractError, match=said):
        broken(Sizes())


def test_a_refused_shape_binds_no_letter() -> None:
    sizes = Sizes()
    with pytest.raises(kit.ContractError):
        bind("op", "x", (3, 4), ("N", "N"), sizes)
    bind("op", "x", (5, 4), ("N", "D"), sizes)
    assert sizes["N"] == 5 and sizes["D"] == 4


@pytest.mark.parametrize("value", [None, "1", [1.0], float("inf"), -1.0, 3.0])
def test_numbers(value: Any) -> None:
    assert number("op", "x", np.float32(2), low=0, high=2.5) == 2.0
    with pytest.raises(kit.ContractError, match=r"op: x: expected a (finite )?number"):
        number("op", "x", value, low=0, high=2.5)
