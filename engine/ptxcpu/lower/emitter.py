"""A builder of textual LLVM IR: names, labels, declarations. Knows nothing of PTX.

Text rather than an object model: a kernel of 4,000 instructions is written in tens of milliseconds.
"""

from __future__ import annotations

LANES = 32


def vec(scalar: str, lanes: int) -> str:
    """The LLVM type of `lanes` values: `i32` for 1, `<32 x i32>` for 32."""
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


def splat(scalar: str, value: int | str, lanes: int) -> str:
    """A constant of `lanes` equal values, as an operand without its type."""
    return str(value) if lanes == 1 else f"splat ({scalar} {value})"


def iota(scalar: str, stride: int, lanes: int = LANES) -> str:
    """The constant vector 0, stride, 2 * stride, …"""
    bits = int(scalar[1:])
    return "<" + ", ".join(f"{scalar} {_signed(stride * lane, bits)}" for lane in range(lanes)) + ">"


def _signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def integer(value: int, bits: int) -> int:
    """`value` modulo 2^bits as the signed number that IR text takes."""
    return _signed(value, bits)


class Emitter:
    """Collects one function's instructions, and the module's declarations."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.declarations: dict[str, str] = {}
        self._names = 0
        self.blocks = 0  # blocks begun; what was found in one holds only until the next begins
        self._mark: dict[str, int] = {}

    def fresh(self, hint: str = "t") -> str:
        """A new local name."""
        self._names += 1
        return f"%{hint}{self._names}"

    def label(self, hint: str) -> str:
        """A new label, without the percent sign."""
        self._names += 1
        return f"{hint}.{self._names}"

    def op(self, text: str) -> str:
        """Emit `name = text` and return the name."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Emit an instruction without a result."""
        self.lines.append(f"  {text}")

    def start(self, label: str) -> None:
        """Begin a block."""
        self.blocks += 1
        self.lines.append(f"{label}:")

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, condition: str, yes: str, no: str) -> None:
        self.do(f"br i1 {condition}, label %{yes}, label %{no}")

    def alloca(self, type_: str, hint: str = "v") -> str:
        """A stack slot in the entry block; LLVM turns those whose address stays inside into values."""
        name = self.fresh(hint)
        self.allocas.append(f"  {name} = alloca {type_}")
        return name

    def declare(self, name: str, result: str, arguments: str, attributes: str = "") -> str:
        """Declare a function once and return its name with the sign."""
        self.declarations.setdefault(name, f"declare {result} @{name}({arguments}) {attributes}".rstrip())
        return f"@{name}"

    def call(self, name: str, result: str, *arguments: tuple[str, str]) -> str:
        """Call an intrinsic or helper by name with (type, value) arguments; declares it. Returns the result's name."""
        callee = self.declare(name, result, ", ".join(t for t, _ in arguments))
        return self.op(f"call {result} {callee}({', '.join(f'{t} {v}' for t, v in arguments)})")

    def select(self, type_: str, lanes: int, condition: str, yes: str, no: str) -> str:
        """`condition ? yes : no`, lane by lane."""
        t = vec(type_, lanes)
        return self.op(f"select {vec('i1', lanes)} {condition}, {t} {yes}, {t} {no}")

    def broadcast(self, type_: str, value: str, lanes: int = LANES) -> str:
        """A scalar in every lane."""
        t = vec(type_, lanes)
        first = self.op(f"insertelement {t} poison, {type_} {value}, i32 0")
        return self.op(f"shufflevector {t} {first}, {t} poison, <{lanes} x i32> zeroinitializer")
