"""A small structured language over LLVM IR text, for the checks' own code: `when`, `loop`, `count`, functions.

Values are typed (scalars, or vectors such as `<8 x i64>`, to which scalars beside them are spread) and build instructions
by Python's operators; all integers are unsigned. Variables are stack slots, which LLVM turns into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ptxtrain.engine.ptxcpu.lower.emitter import Emitter, integer, iota, splat, vec


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An IR value of type i1, i8, i32, i64 or ptr, or a vector of integers."""

    code: Code
    type: str
    name: str

    @property
    def bits(self) -> int:
        return int(self.type.rsplit("i", 1)[1].rstrip(">"))

    @property
    def lanes(self) -> int:
        return int(self.type[1:].split(" ")[0]) if self.type.startswith("<") else 1

    def _other(self, other: Number) -> str:
        if isinstance(other, Value):
            if other.lanes == 1 and self.lanes > 1:
                return self.code.emit.broadcast(other.type, other.name, self.lanes)
            assert other.type == self.type, (self.type, other.type)
            return other.name
        return splat(f"i{self.bits}", integer(int(other), self.bits), self.lanes)

    def _binary(self, op: str, other: Number) -> Value:
        return self.code.op(self.type, f"{op} {self.type} {self.name}, {self._other(other)}")

    def __add__(self, other: Number) -> Value:
        if self.type == "ptr":
            at = other if isinstance(other, Value) else self.code.i64(other)
            return self.code.op("ptr", f"getelementptr i8, ptr {self.name}, {at.type} {at.name}")
        return self._binary("add", other)

    def __sub__(self, other: Number) -> Value:
        return self._binary("sub", other)

    def __mul__(self, other: Number) -> Value:
        return self._binary("mul", other)

    def __and__(self, other: Number) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Number) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Number) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Number) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Number) -> Value:
        return self._binary("lshr", other)

    def __mod__(self, other: Number) -> Value:
        return self._binary("urem", other)

    def __invert__(self) -> Value:
        return self._binary("xor", -1)

    def _compare(self, relation: str, other: Number) -> Value:
        return self.code.op(vec("i1", self.lanes), f"icmp {relation} {self.type} {self.name}, {self._other(other)}")

    def is_(self, other: Number) -> Value:
        return self._compare("eq", other)

    def is_not(self, other: Number) -> Value:
        return self._compare("ne", other)

    def __lt__(self, other: Number) -> Value:
        return self._compare("ult", other)

    def __le__(self, other: Number) -> Value:
        return self._compare("ule", other)

    def __gt__(self, other: Number) -> Value:
        return self._compare("ugt", other)

    def __ge__(self, other: Number) -> Value:
        return self._compare("uge", other)

    def to(self, type_: str) -> Value:
        """Cut, zero-extended, or between an address and a number."""
        if type_ == self.type:
            return self
        if self.type == "ptr" or type_ == "ptr":
            kind = "ptrtoint" if self.type == "ptr" else "inttoptr"
        else:
            kind = "trunc" if int(type_[1:]) < self.bits else "zext"
            type_ = vec(type_, self.lanes)
        return self.code.op(type_, f"{kind} {self.type} {self.name} to {type_}")

    def pick(self, yes: Number, no: Number) -> Value:
        """`self ? yes : no`; at least one of them is a value (of as many lanes as `self`, or one)."""
        given = [v for v in (yes, no) if isinstance(v, Value)]
        typed = max(given, key=lambda v: v.lanes)
        assert self.bits == 1
        if typed.lanes < self.lanes:
            name = self.code.emit.broadcast(typed.type, typed.name, self.lanes)
            typed = Value(self.code, vec(typed.type, self.lanes), name)
        t = typed.type
        return self.code.op(t, f"select {self.type} {self.name}, {t} {typed._other(yes)}, {t} {typed._other(no)}")

    def any(self) -> Value:
        """Of a vector of i1: whether one of them is true."""
        if self.lanes == 1:
            return self
        t = f"i{self.lanes}"
        return self.code.op(t, f"bitcast {self.type} {self.name} to {t}").is_not(0)


Number: TypeAlias = "Value | int"


@dataclass(frozen=True, slots=True)
class Var:
    """A stack slot."""

    code: Code
    type: str
    slot: str

    def get(self) -> Value:
        return self.code.op(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Number) -> None:
        name = value.name if isinstance(value, Value) else str(integer(value, int(self.type[1:])))
        self.code.emit.do(f"store {self.type} {name}, ptr {self.slot}")


class Code:
    """The body of one function."""

    def __init__(self, library: Library, result: str) -> None:
        self.library, self.result = library, result
        self.emit = Emitter()

    def op(self, type_: str, text: str) -> Value:
        return Value(self, type_, self.emit.op(text))

    def i64(self, value: int) -> Value:
        return Value(self, "i64", str(integer(value, 64)))

    def i32(self, value: int) -> Value:
        return Value(self, "i32", str(integer(value, 32)))

    def null(self) -> Value:
        return Value(self, "ptr", "null")

    def numbers(self, first: Value, lanes: int) -> Value:
        """first, first + 1, … as a vector; `first` itself for one lane."""
        if lanes == 1:
            return first
        return Value(self, vec("i64", lanes), iota("i64", 1, lanes)) + first

    def var(self, initial: Value) -> Var:
        slot = Var(self, initial.type, self.emit.alloca(initial.type))
        slot.set(initial)
        return slot

    def load(self, type_: str, pointer: Value, offset: Number = 0) -> Value:
        at = pointer if isinstance(offset, int) and offset == 0 else pointer + offset
        bytes_ = "" if not type_.startswith("<") else f", align {int(type_.rsplit('i', 1)[1].rstrip('>')) // 8}"
        return self.op(type_, f"load {type_}, ptr {at.name}{bytes_}")

    def store(self, value: Value, pointer: Value, offset: Number = 0) -> None:
        at = pointer if isinstance(offset, int) and offset == 0 else pointer + offset
        align = f", align {value.bits // 8}" if value.lanes > 1 else ""
        self.emit.do(f"store {value.type} {value.name}, ptr {at.name}{align}")

    def fill(self, pointer: Value, byte: int, count: Value) -> None:
        name = self.emit.declare("llvm.memset.p0.i64", "void", "ptr, i8, i64, i1")
        self.emit.do(f"call void {name}(ptr {pointer.name}, i8 {byte}, i64 {count.name}, i1 false)")

    def copy(self, target: Value, source: Value, count: Value) -> None:
        name = self.emit.declare("llvm.memcpy.p0.p0.i64", "void", "ptr, ptr, i64, i1")
        self.emit.do(f"call void {name}(ptr {target.name}, ptr {source.name}, i64 {count.name}, i1 false)")

    def trailing_zeros(self, value: Value) -> Value:
        t = value.type
        return Value(self, t, self.emit.call(f"llvm.cttz.{t}", t, (t, value.name), ("i1", "false")))

    def ones(self, value: Value) -> Value:
        t = value.type
        return Value(self, t, self.emit.call(f"llvm.ctpop.{t}", t, (t, value.name)))

    def either(self, name: str, a: Value, b: Value) -> Value:
        """umax or umin."""
        t = a.type
        return Value(self, t, self.emit.call(f"llvm.{name}.{t}", t, (t, a.name), (t, b.name)))

    def leading_zeros(self, value: Value) -> Value:
        t = value.type
        return Value(self, t, self.emit.call(f"llvm.ctlz.{t}", t, (t, value.name), ("i1", "false")))

    def call(self, name: str, *arguments: Value) -> Value:
        """One of the library's own functions."""
        given = ", ".join(f"{a.type} {a.name}" for a in arguments)
        result = self.library.results[name]
        return self.op(result, f"call {result} @{name}({given})")

    # Control

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        yes, on = self.emit.label("when"), self.emit.label("on")
        self.emit.branch(condition.name, yes, on)
        self.emit.start(yes)
        yield
        self.emit.jump(on)
        self.emit.start(on)

    def choose(self, condition: Value, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Both sides of a condition."""
        first, second, on = self.emit.label("yes"), self.emit.label("no"), self.emit.label("on")
        self.emit.branch(condition.name, first, second)
        for label, side in ((first, yes), (second, no)):
            self.emit.start(label)
            side()
            self.emit.jump(on)
        self.emit.start(on)

    @contextmanager
    def loop(self, condition: Callable[[], Value]) -> Iterator[None]:
        """While `condition`, made anew at the head of each round."""
        head, body, on = self.emit.label("head"), self.emit.label("body"), self.emit.label("on")
        self.emit.jump(head)
        self.emit.start(head)
        self.emit.branch(condition().name, body, on)
        self.emit.start(body)
        yield
        self.emit.jump(head)
        self.emit.start(on)

    @contextmanager
    def count(self, end: Number, step: int = 1) -> Iterator[Value]:
        """i64 numbers from 0 below `end`, as a loop that LLVM can turn into vectors."""
        limit = end if isinstance(end, Value) else self.i64(end)
        index = self.var(self.i64(0))
        with self.loop(lambda: index.get() < limit):
            now = index.get()
            yield now
            index.set(now + step)

    def give(self, value: Number) -> None:
        """Return from the function; what follows in the block is dead."""
        name = value.name if isinstance(value, Value) else str(value)
        self.emit.do(f"ret {self.result} {name}")
        self.emit.start(self.emit.label("dead"))


class Library:
    """Functions that make one IR module."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._declarations: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.names: list[str] = []

    @contextmanager
    def function(
        self, name: str, parameters: Sequence[str], *, external: bool = False, result: str = "i32"
    ) -> Iterator[tuple[Code, list[Value]]]:
        """Define `name`; `parameters` are their types. It returns 0 where it does not `give` something else."""
        code = Code(self, result)
        self.results[name] = result
        arguments = [Value(code, t, f"%a{i}") for i, t in enumerate(parameters)]
        yield code, arguments
        listed = ", ".join(f"{a.type} {a.name}" for a in arguments)
        body = "\n".join(code.emit.lines)
        allocas = "\n".join(code.emit.allocas)
        self._parts.append(
            f"define {'' if external else 'internal '}{result} @{name}({listed}) nounwind {{\n"
            f"entry:\n{allocas}\n{body}\n  ret {result} 0\n}}"
        )
        self._declarations.update(code.emit.declarations)
        if external:
            self.names.append(name)

    def ir(self) -> str:
        """The module's text."""
        return "\n".join([*self._declarations.values(), *self._parts])
