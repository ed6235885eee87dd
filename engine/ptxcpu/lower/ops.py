"""Operations on integers of one width in `lanes` lanes, and how operands and results of instructions become such values."""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import splat, vec
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Instruction, Operand, Reg, Sink

Lowering = Callable[[Context, Instruction], None]


class Ops:
    """Operations on `lanes` values of `i{bits}`, as short as IR allows."""

    def __init__(self, ctx: Context, bits: int, lanes: int) -> None:
        self.ctx, self.bits, self.lanes = ctx, bits, lanes
        self.scalar = f"i{bits}"
        self.t = vec(self.scalar, lanes)
        self.b = vec("i1", lanes)

    def const(self, value: int) -> str:
        half = 1 << self.bits
        value %= half
        return splat(self.scalar, value - half if value >> (self.bits - 1) else value, self.lanes)

    def op(self, name: str, a: str, b: str) -> str:
        return self.ctx.emit.op(f"{name} {self.t} {a}, {b}")

    def compare(self, relation: str, a: str, b: str) -> str:
        return self.ctx.emit.op(f"icmp {relation} {self.t} {a}, {b}")

    def select(self, condition: str, a: str, b: str) -> str:
        return self.ctx.emit.select(self.scalar, self.lanes, condition, a, b)

    def intrinsic(self, name: str, *values: str) -> str:
        suffix = self.scalar if self.lanes == 1 else f"v{self.lanes}{self.scalar}"
        return self.ctx.emit.call(f"llvm.{name}.{suffix}", self.t, *((self.t, v) for v in values))

    def bit_intrinsic(self, name: str, value: str) -> str:
        """ctlz and cttz, with a zero's result defined."""
        suffix = self.scalar if self.lanes == 1 else f"v{self.lanes}{self.scalar}"
        return self.ctx.emit.call(f"llvm.{name}.{suffix}", self.t, (self.t, value), ("i1", "false"))

    def cast(self, name: str, value: str, to: int) -> str:
        return self.ctx.emit.op(f"{name} {self.t} {value} to {vec(f'i{to}', self.lanes)}")


def load(ctx: Context, ins: Instruction, type_: str, *operands: Operand) -> tuple[Ops, list[str]]:
    lanes = ctx.lanes_of(*operands)
    ops = Ops(ctx, TYPE_BITS[type_], lanes)
    return ops, [ctx.get(o, ops.scalar, lanes) for o in operands]


def target_of(ins: Instruction) -> Reg | Sink:
    target = ins.operands[0]
    assert isinstance(target, Reg | Sink)
    return target


def put(ctx: Context, ins: Instruction, ops: Ops, value: str, bits: int | None = None, *, signed: bool = False) -> None:
    """Write an integer; signed results narrower than their register are sign-extended into it."""
    target = target_of(ins)
    bits = bits or ops.bits
    if signed and isinstance(target, Reg) and TYPE_BITS[target.type] > bits:
        wide = TYPE_BITS[target.type]
        value = ctx.emit.op(f"sext {vec(f'i{bits}', ops.lanes)} {value} to {vec(f'i{wide}', ops.lanes)}")
        bits = wide
    ctx.set(target, value, f"i{bits}", ops.lanes)


def is_integer(type_: str) -> bool:
    """Whether arithmetic on this type is integer arithmetic."""
    return type_[0] in "usb" and not type_.startswith("bf")
