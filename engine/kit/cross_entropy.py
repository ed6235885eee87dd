"""Cross-entropy of softmax(logits) against a target, row by row: loss, log-sum-exp and gradient from one call."""

from __future__ import annotations

import ctypes

import numpy as np

from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.kit.arrays import Array
from ptxtrain.engine.kit.contracts import FLOATS, number
from ptxtrain.engine.kit.core import Argument, Call
from ptxtrain.engine.ops import cross_entropy as ops


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    scale: float = 1.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    gradient: bool = True,
    loss: Array | None = None,
    lse: Array | None = None,
    dlogits: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """loss = lse - logits[target] + z_loss * lse^2 in nats, lse = log(sum(exp(logits))) of each row, and the gradient
    dlogits = (exp(logits - lse) * (1 + 2 * z_loss * lse) - onehot(target)) * scale.

    loss is that of each row, not scaled: for their mean, scale is 1 / the number of targets that count. A row whose target is
    `ignore_index` has loss and gradient 0. Logits of -inf have probability 0; a target of probability 0 has loss inf. A row is
    read twice and takes no memory beside its results. z_loss: Chowdhery et al. 2022, PaLM.

    Args:
        logits: [..., V], f16, bf16 or f32.
        targets: [...], i32 or i64: 0 to V - 1, or `ignore_index`. On the host another one is an error; on a GPU, where they are
            not read back, it makes its row NaN.
        scale: a factor of the gradient.
        ignore_index: the target that counts nothing.
        z_loss: at least 0; keeps lse near 0.
        gradient: whether dlogits is wanted.
        loss: [...], f32.
        lse: [...], f32.
        dlogits: [..., V], of the dtype of logits; may be logits, whose place the gradient then takes.

    Returns:
        loss, lse, dlogits: what was passed in, or new arrays of the kind of logits; None for dlogits without `gradient`.

    Raises:
        ContractError: a shape, dtype, layout, place or target that does not fit.

    >>> logits, targets = np.array([[0, 0, 0, 0], [9, 9, 9, 9]], np.float32), np.array([1, -100], np.int32)
    >>> loss, lse, dlogits = kit.cross_entropy(logits, targets)
    >>> print(loss.round(4), lse.round(4), dlogits[0])
    [1.3863 0.    ] [ 1.3863 10.3863] [ 0.25 -0.75  0.25  0.25]
    """
    call = Call("cross_entropy")
    logits_ = call.input("logits", logits, ("...", "V"), FLOATS)
    targets_ = call.input("targets", targets, ("...",), ("i32", "i64"))
    scale = number(call.op, "scale", scale)
    z_loss = number(call.op, "z_loss", z_loss, low=0)
    fits = isinstance(ignore_index, int) and -(2**31) <= ignore_index < 2**31
    call.require(fits, "ignore_index", "a whole number of 32 bits", f"{ignore_index!r}")
    loss_ = call.output("loss", loss, ("...",), "f32")
    lse_ = call.output("lse", lse, ("...",), "f32")
    call.require(gradient or dlogits is None, "dlogits", "None without gradient", "an array")
    dlogits_ = call.output("dlogits", dlogits, ("...", "V"), logits_.dtype, shares=("logits",)) if gradient else None
    rows, vocab = call.sizes.rows, call.sizes["V"]
    call.require(vocab > 0, "logits", "at least one column", f"{vocab}")
    _check_targets(call, targets_, vocab, ignore_index)

    def record(rec: Recorder) -> None:
        ops.rows_of(
            rec, loss_.buffer, lse_.buffer, dlogits_.buffer if dlogits_ else None, logits_.buffer, targets_.buffer,
            rows=rows, vocab=vocab, dtype=logits_.dtype, target=targets_.dtype, ignored=ignore_index, z_loss=z_loss,
            scale=scale,
        )  # fmt: skip

    if rows:
        call.run(record)
    return loss_.result, lse_.result, dlogits_.result if dlogits_ else None


def _check_targets(call: Call, targets: Argument, vocab: int, ignored: int) -> None:
    """Targets on the host cost nothing to look at."""
    if targets.view.gpu is not None or not targets.count:
        return
    kind = ctypes.c_int64 if targets.dtype == "i64" else ctypes.c_int32
    found = np.ctypeslib.as_array((kind * targets.count).from_address(targets.view.ptr))
    wrong = ((found < 0) | (found >= vocab)) & (found != ignored)
    if wrong.any():
        place = int(wrong.argmax())
        expected = f"0 to {vocab - 1}, or {ignored} to ignore a row"
        call.require(False, "targets", expected, f"{int(found[place])} in row {place}")
