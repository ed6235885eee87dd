"""Cross-entropy of softmax(logits) against a target token, row by row; a negative target is ignored.

`fused` (way "fast") reads a row once and leaves its gradient in its place. `forward` and `backward` are its twins: the forward
pass keeps each row's log-sum-exp, so that the backward pass recomputes the probabilities in place. `z_loss` adds z_loss * lse^2,
which keeps logits from drifting (Chowdhery et al. 2022).
"""

from __future__ import annotations

import numpy as np

from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import scalars as scalar_table
from ptxtrain.engine.ops.checks import holds, is_bf16, require, sizes
from ptxtrain.ptx.kit_spec import LossSpec
from ptxtrain.ptx.specs import CrossEntropySpec, RowSpec

# Threads of a block, and with them the order of a row's sum, follow from V: a long row leaves room for one to three blocks on a
# multiprocessor, a short one does not feed 512 threads (at V 4,096 they took 1.5 times as long on a CPU).
FEW_THREADS, MANY_THREADS, LONG_ROW = 256, 512, 16_384
ON_CHIP = 99 << 10  # bytes of shared memory that a block may have on every GPU from sm_80 on


def forward(
    rec: Recorder,
    loss: Buffer,  # [N] f32
    lse: Buffer,  # [N] f32
    logits: Buffer,  # [N, V] dtype
    targets: Buffer,  # [N] i32, each below V
    *,
    rows: int,
    vocab: int,
    dtype: str,
    z_loss: float = 0.0,
) -> None:
    """loss = lse - logits[target] + z_loss * lse^2 in nats (0 where target < 0), lse = log(sum(exp(logits)))."""
    op, spec = "cross_entropy.forward", RowSpec()
    sizes(op, rows=rows, vocab=vocab)
    bf16 = is_bf16(op, dtype)
    holds(op, "loss", loss, rows, "f32")
    holds(op, "lse", lse, rows, "f32")
    holds(op, "logits", logits, rows * vocab, dtype)
    holds(op, "targets", targets, rows, "i32")
    kernel = rec.ptx("cross_entropy_forward", spec=spec)
    args = (loss, lse, logits, targets, np.uint32(rows), np.uint32(vocab), np.float32(z_loss), bf16)
    rec.launch(kernel, spec.grid(rows), spec.block, *args)


def backward(
    rec: Recorder,
    logits: Buffer,  # [N, V] dtype, become their gradient
    lse: Buffer,  # [N] f32
    targets: Buffer,  # [N] i32
    scalars: Buffer,  # [scalars.COUNT] f32
    *,
    rows: int,
    vocab: int,
    dtype: str,
    z_loss: float = 0.0,
) -> None:
    """logits = (exp(logits - lse) * (1 + 2 z_loss lse) - onehot(target)) * scalars[GRAD_SCALE], 0 where target < 0; in place."""
    op, spec = "cross_entropy.backward", RowSpec()
    sizes(op, rows=rows, vocab=vocab)
    bf16 = is_bf16(op, dtype)
    holds(op, "logits", logits, rows * vocab, dtype)
    holds(op, "lse", lse, rows, "f32")
    holds(op, "targets", targets, rows, "i32")
    holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    kernel = rec.ptx("cross_entropy_backward", spec=spec)
    args = (logits, lse, targets, scalars, np.uint32(rows), np.uint32(vocab), np.float32(z_loss), bf16)
    rec.launch(kernel, spec.grid(rows), spec.block, *args)


def obstacle(vocab: int) -> str | None:
    """Why `fused` does not take rows of this length, or None if it does."""
    chunk = CrossEntropySpec().chunk
    if vocab % chunk:
        return f"rows of {vocab} logits are no multiple of {chunk}, which 16-byte accesses need"
    return None


def reads_twice(vocab: int) -> str | None:
    """Why `fused` reads rows of this length twice, or None if they stay on chip."""
    if 2 * vocab > ON_CHIP:
        return (
            f"a row of {vocab} logits takes {2 * vocab >> 10} KiB, more than the {ON_CHIP >> 10} KiB of shared memory"
        )
    return None


def fused(
    rec: Recorder,
    loss: Buffer,  # [N] f32
    lse: Buffer,  # [N] f32
    logits: Buffer,  # [N, V] bf16, become their gradient where there are scalars
    targets: Buffer,  # [N] i32, each below V
    scalars: Buffer | None,  # [scalars.COUNT] f32; None: the loss alone
    *,
    rows: int,
    vocab: int,
    z_loss: float = 0.0,
) -> None:
    """`forward` and `backward` in one pass over bf16 logits.

    Raises:
        PtxtrainError: V is no multiple of 8, or the logits are not aligned to 16 bytes.
    """
    op, threads = "cross_entropy.fused", MANY_THREADS if vocab >= LONG_ROW else FEW_THREADS
    spec = CrossEntropySpec(threads=threads, on_chip=reads_twice(vocab) is None)
    sizes(op, rows=rows, vocab=vocab)
    why = obstacle(vocab)
    require(op, why is None, f"{why}")
    holds(op, "loss", loss, rows, "f32")
    holds(op, "lse", lse, rows, "f32")
    holds(op, "logits", logits, rows * vocab, "bf16")
    require(op, logits.ptr % 16 == 0, "logits are not aligned to 16 bytes")
    holds(op, "targets", targets, rows, "i32")
    if scalars is not None:
        holds(op, "scalars", scalars, scalar_table.COUNT, "f32")
    where = np.uint64(0) if scalars is None else scalars
    numbers = (np.uint32(vocab), np.float32(z_loss), np.uint32(scalars is not None))
    kernel, shared = rec.ptx("cross_entropy", spec=spec), spec.shared_bytes(vocab)
    rec.launch(kernel, (rows, 1, 1), spec.block, loss, lse, logits, targets, where, *numbers, shared=shared)


def rows_of(
    rec: Recorder,
    loss: Buffer,  # [N] f32
    lse: Buffer,  # [N] f32
    dlogits: Buffer | None,  # [N, V] dtype, may be logits; None: the loss alone
    logits: Buffer,  # [N, V] dtype
    targets: Buffer,  # [N] target
    *,
    rows: int,
    vocab: int,
    dtype: str,
    target: str = "i32",
    ignored: int = -100,
    z_loss: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Loss, log-sum-exp and the gradient times `scale`, in its own place or over the logits, for any V and dtype.

    A row whose target is `ignored` has loss and gradient 0; one whose target is another number below 0 or from V on is NaN.

    Raises:
        PtxtrainError: a dtype that the kernel does not have, or a buffer that is too small.
    """
    op, spec = "cross_entropy.rows_of", LossSpec(dtype, target)
    sizes(op, rows=rows, vocab=vocab)
    require(op, dtype in ("f32", "f16", "bf16"), f'dtype is "{dtype}", must be "f32", "f16" or "bf16"')
    require(op, target in ("i32", "i64"), f'target is "{target}", must be "i32" or "i64"')
    require(op, -(2**31) <= ignored < 2**31, f"ignored is {ignored}, must fit 32 bits")
    for name, buffer in (("loss", loss), ("lse", lse)):
        holds(op, name, buffer, rows, "f32")
    holds(op, "logits", logits, rows * vocab, dtype)
    holds(op, "targets", targets, rows * spec.target_item // 4, "i32")
    if dlogits is not None:
        holds(op, "dlogits", dlogits, rows * vocab, dtype)
    where = np.uint64(0) if dlogits is None else dlogits
    numbers = (np.uint32(vocab), np.uint32(ignored & 0xFFFFFFFF), np.float32(z_loss), np.float32(scale))
    kernel = rec.ptx("cross_entropy_rows", spec=spec)
    rec.launch(kernel, (rows, 1, 1), spec.block, loss, lse, where, logits, targets, *numbers)
