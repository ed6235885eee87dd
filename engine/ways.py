"""Ways: how each operation runs. `f32` (naive, everything f32), `bf16` (the same kernels on bf16 activations), `fast` (kernels
for tensor cores, on bf16).

A way is written `fast`, or with operations set apart: `fast,matmul=bf16`, so that anyone can put a naive twin in a fast
kernel's place and bisect a suspicion. Where a fast kernel does not take a model's shape, and was not asked for by name, its
twin is chosen and a note says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxtrain.engine.errors import PtxtrainError

if TYPE_CHECKING:
    from ptxtrain.engine.config import ModelConfig

WAYS = {"f32": 4, "bf16": 2, "fast": 2}  # way -> bytes of an activation
OPERATIONS = ("matmul", "attention", "cross_entropy")  # those that have a fast kernel and a naive twin


@dataclass(frozen=True, slots=True)
class Ways:
    """The way of each operation of one model. `notes` say where a twin was chosen and why."""

    base: str
    matmul: str
    attention: str
    cross_entropy: str
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Of the activations: "f32" or "bf16"."""
        return "f32" if self.base == "f32" else "bf16"

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return WAYS[self.base]


def parse(text: str) -> tuple[str, dict[str, str]]:
    """`fast,matmul=bf16` as ("fast", {"matmul": "bf16"}); without a way for all, `fast` is meant.

    Raises:
        PtxtrainError: an unknown way or operation, two ways for all, or f32 beside others (it has activations of its own).
    """
    base, apart = "", {}
    for word in text.split(","):
        operation, equals, way = (part.strip() for part in word.partition("="))
        if not equals:
            if base:
                raise PtxtrainError(f"way '{text}' names two ways for all operations: {base} and {operation}")
            base = operation
        elif operation not in OPERATIONS:
            raise PtxtrainError(
                f"way '{text}': unknown operation '{operation}'; it must be one of {', '.join(OPERATIONS)}. "
                f"The other kernels exist once"
            )
        else:
            apart[operation] = way
    base = base or "fast"
    for way in (base, *apart.values()):
        if way not in WAYS:
            raise PtxtrainError(f"unknown way '{way}': it must be one of {', '.join(WAYS)}")
    if any((way == "f32") != (base == "f32") for way in apart.values()):
        raise PtxtrainError(f"way '{text}' mixes f32 with others: in the way f32 all activations are f32")
    return base, apart


def changed(text: str, change: str) -> str:
    """`text` with what `change` sets: a way for all, operations, or both."""
    base, apart = parse(text)
    new_base, new_apart = parse(change)
    if all("=" in word for word in change.split(",")):
        apart = {**apart, **new_apart}
    else:
        base, apart = new_base, new_apart
    return ",".join([base, *(f"{op}={apart[op]}" for op in OPERATIONS if apart.get(op, base) != base)])


def resolve(cfg: ModelConfig, text: str) -> Ways:
    """The way of each operation for this model.

    Raises:
        PtxtrainError: as `parse`, or a fast kernel was asked for by name and does not take the model's shape.
    """
    from ptxtrain.engine.ops import cross_entropy

    base, apart = parse(text)
    chosen, notes = {op: apart.get(op, base) for op in OPERATIONS}, []
    for op, way in chosen.items():
        why = _obstacle(cfg, op) if way == "fast" else None
        if why is None:
            continue
        if op in apart:
            raise PtxtrainError(
                f"the fast {op} does not take this model: {why}. Leave {op}=fast out, or change the shape"
            )
        chosen[op] = "bf16"
        notes.append(f"{op}: the naive kernel instead of the fast one: {why}")
    if chosen["cross_entropy"] == "fast" and (why := cross_entropy.reads_twice(cfg.vocab_size)):
        notes.append(f"cross_entropy: logits are read twice: {why}")
    return Ways(base, **chosen, notes=tuple(notes))


def _obstacle(cfg: ModelConfig, op: str) -> str | None:
    """Why the fast kernels of an operation do not take this model, or None if they do."""
    from ptxtrain.engine.ops import cross_entropy, matmul
    from ptxtrain.ptx.attention_spec import HEAD_DIMS

    if op == "attention":
        known = ", ".join(map(str, HEAD_DIMS))
        return None if cfg.head_dim in HEAD_DIMS else f"head_dim is {cfg.head_dim}, the flash kernels have {known}"
    if op == "cross_entropy":
        return cross_entropy.obstacle(cfg.vocab_size)
    heads_width = cfg.heads * cfg.head_dim
    return matmul.obstacle(
        width=cfg.width,
        qkv=heads_width + 2 * cfg.kv_heads * cfg.head_dim,
        attention=heads_width,
        mlp=cfg.mlp_width,
        vocabulary=cfg.vocab_size,
    )
