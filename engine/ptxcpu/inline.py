"""Calls, spliced into their callers before anything else looks at a function.

Each call becomes a copy of the callee's body with its own names: registers, labels and variables get the suffix `@n` of the
instance. Arguments and results in `.param` variables become registers where every access is to the same pieces, and local
memory elsewhere. A call through a register becomes a chain of comparisons with the functions that fit. Divergent calls and
early returns are then ordinary divergence. Recursion is refused, since a body cannot hold itself.

Of the functions that CUDA's run-time library has, `__assertfail` ends the launch with the assertion's text, and `vprintf`
prints nothing and returns 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ptxtrain.engine.ptxcpu.params import place_params
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Address,
    Call,
    Function,
    Guard,
    Imm,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    PtxError,
    Reg,
    Symbol,
    Variable,
    Vector,
)

_ASSERT = "__assertfail"
MOST_DEEP = 100  # calls within calls
MOST_INSTRUCTIONS = 200_000  # of a function with everything that it calls
# Where an indirect call compares: functions are at FIRST_ADDRESS, FIRST_ADDRESS + ADDRESS_STEP, … in the order of the text.
FIRST_ADDRESS, ADDRESS_STEP = 1 << 20, 16

_Item = Instruction | Label


def function_address(module: Module, name: str) -> int:
    """The number that stands for a function's address."""
    return FIRST_ADDRESS + ADDRESS_STEP * list(module.functions).index(name)


def inline_calls(module: Module, function: Function) -> Function:
    """`function` without calls; itself if it has none.

    Raises:
        PtxError: a call of a function without a body, a recursive call, or more instructions than MOST_INSTRUCTIONS.
    """
    if not any(isinstance(item, Instruction) and item.opcode == "call" for item in function.body):
        return function
    inliner = _Inliner(module)
    inliner.variables.update(function.variables)
    body = inliner.expand(function, _Names(), (function.name,))
    return place_params(
        replace(
            function,
            body=body,
            registers={**function.registers, **inliner.registers},
            variables={**function.variables, **inliner.variables},
            branch_targets={**function.branch_targets, **inliner.branch_targets},
        )
    )


@dataclass(slots=True)
class _Names:
    """What a callee's names are called in one copy of it: the suffix, and the variables that stand for its parameters."""

    suffix: str = ""
    symbols: dict[str, str] = field(default_factory=dict)
    labels: frozenset[str] = frozenset()


class _Inliner:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.registers: dict[str, Reg] = {}
        self.variables: dict[str, Variable] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self._instances = 0
        self._size = 0

    def fail(self, ins: Instruction, why: str) -> PtxError:
        return PtxError(why, self.module.path, ins.span, ins.text)

    def expand(self, function: Function, names: _Names, stack: tuple[str, ...], after: str = "") -> list[_Item]:
        """The body of `function` under other names, calls expanded; returns jump to the label `after` if there is one."""
        out: list[_Item] = []
        targets = {
            _renamed(label, names.suffix): tuple(_renamed(name, names.suffix) for name in labels)
            for label, labels in function.branch_targets.items()
        }
        self.branch_targets.update(targets)
        names.labels = frozenset(i.name for i in function.body if isinstance(i, Label)) | set(function.branch_targets)
        for item in function.body:
            if isinstance(item, Label):
                out.append(replace(item, name=_renamed(item.name, names.suffix)))
                continue
            ins = self._rename(item, function, names) if names.suffix else item
            if ins.opcode == "call":
                self._call(ins, stack, out)
            elif ins.opcode == "ret" and after:
                out.append(self._made(ins, "bra", (), (Symbol(after),), ins.guard))
            else:
                out.append(ins)
            self._size += 1
            if self._size > MOST_INSTRUCTIONS:
                raise self.fail(
                    item, f"with all calls inlined {stack[0]} has more than {MOST_INSTRUCTIONS:,} instructions"
                )
        return out

    # Names

    def _rename(self, ins: Instruction, function: Function, names: _Names) -> Instruction:
        local = function.variables

        def operand(o: Operand) -> Operand:
            match o:
                case Reg():
                    return self._register(o, names.suffix)
                case Negated(reg):
                    return Negated(self._register(reg, names.suffix))
                case Symbol(name, offset):
                    return Symbol(symbol(name), offset)
                case Address(Reg() as base, offset):
                    return Address(self._register(base, names.suffix), offset)
                case Address(Symbol(name, more), offset):
                    return Address(Symbol(symbol(name), more), offset)
                case Vector(elements):
                    return Vector(tuple(self._register(e, names.suffix) if isinstance(e, Reg) else e for e in elements))
                case Pair(first, second):
                    both = (self._register(r, names.suffix) if isinstance(r, Reg) else r for r in (first, second))
                    return Pair(*both)
                case Call(returns, callee, arguments):
                    return Call(
                        tuple(value(r) for r in returns),
                        self._register(callee, names.suffix) if isinstance(callee, Reg) else callee,
                        tuple(a if isinstance(a, Imm) else value(a) for a in arguments),
                    )
                case _:
                    return o

        def value(o: Symbol | Reg) -> Symbol | Reg:
            return self._register(o, names.suffix) if isinstance(o, Reg) else Symbol(symbol(o.name), o.offset)

        def symbol(name: str) -> str:
            if name in names.symbols:
                return names.symbols[name]
            variable = local.get(name)
            if variable is not None:
                # Static shared and global variables exist once, whoever calls; the others belong to the call.
                unique = name if variable.space in ("shared", "global", "const") else _renamed(name, names.suffix)
                self.variables.setdefault(unique, replace(variable, name=unique))
                return unique
            return _renamed(name, names.suffix) if name in names.labels else name

        guard = Guard(self._register(ins.guard.reg, names.suffix), ins.guard.negated) if ins.guard else None
        modifiers = ins.modifiers
        if ins.opcode in ("ld", "st", "cvta") and any(
            isinstance(o, Reg) or (isinstance(o, Address) and isinstance(o.base, Reg)) for o in ins.operands
        ):
            # A callee's parameters whose address is taken are in local memory.
            taken = ins.opcode == "cvta" or isinstance(ins.operands[ins.opcode == "ld"].base, Reg)  # type: ignore[union-attr]
            if taken:
                modifiers = tuple("local" if m in ("param", "param::func") else m for m in modifiers)
        return replace(ins, operands=tuple(operand(o) for o in ins.operands), guard=guard, modifiers=modifiers)

    def _register(self, reg: Reg, suffix: str) -> Reg:
        found = Reg(_renamed(reg.name, suffix), reg.type)
        self.registers[found.name] = found
        return found

    # Calls

    def _call(self, ins: Instruction, stack: tuple[str, ...], out: list[_Item]) -> None:
        (call,) = ins.operands
        assert isinstance(call, Call)
        skip = ""
        if ins.guard is not None:
            skip = self._label("skip")
            guard = Guard(ins.guard.reg, not ins.guard.negated)
            out.append(self._made(ins, "bra", (), (Symbol(skip),), guard))
        if isinstance(call.callee, Reg):
            self._indirect(ins, call, call.callee, stack, out)
        else:
            self._direct(ins, call, self.module.functions[call.callee.name], stack, out)
        if skip:
            out.append(Label(skip, ins.span))

    def _indirect(self, ins: Instruction, call: Call, callee: Reg, stack: tuple[str, ...], out: list[_Item]) -> None:
        """Compare with every function whose parameters are as large as the arguments given; another address traps."""
        shape = self._sizes(call.returns), self._sizes(call.arguments)
        fitting = [
            f
            for f in self.module.functions.values()
            if not f.is_entry and not f.is_declaration and f.name not in stack
            if (tuple(v.nbytes for v in f.returns), tuple(v.nbytes for v in f.params)) == shape
        ]
        if not fitting:
            raise self.fail(ins, "this file has no function that the indirect call can reach")
        done = self._label("called")
        for function in fitting:
            following = self._label("other")
            self._instances += 1
            is_other = Reg(f"other@{self._instances}", "pred")
            self.registers[is_other.name] = is_other
            address = Imm(function_address(self.module, function.name), "int")
            out.append(self._made(ins, "setp", ("ne", "b64"), (is_other, callee, address)))
            out.append(self._made(ins, "bra", (), (Symbol(following),), Guard(is_other, False)))
            self._direct(ins, call, function, stack, out)
            out.append(self._made(ins, "bra", (), (Symbol(done),)))
            out.append(Label(following, ins.span))
        out.append(self._made(ins, "trap", (), ()))
        out.append(Label(done, ins.span))

    def _sizes(self, values: Iterable[Symbol | Reg | Imm]) -> tuple[int, ...]:
        """Bytes of each argument; registers count as the variables that they fill."""
        sizes = []
        for value in values:
            if isinstance(value, Symbol):
                sizes.append(self._variable(value.name).nbytes)
            else:
                sizes.append(TYPE_BITS[value.type] // 8 if isinstance(value, Reg) else 4)
        return tuple(sizes)

    def _variable(self, name: str) -> Variable:
        return self.variables.get(name) or self.module.variables[name]

    def _direct(self, ins: Instruction, call: Call, callee: Function, stack: tuple[str, ...], out: list[_Item]) -> None:
        if callee.name in stack:
            path = " -> ".join((*stack[stack.index(callee.name) :], callee.name))
            raise self.fail(ins, f"recursive calls are not supported ({path})")
        if len(stack) > MOST_DEEP:
            raise self.fail(ins, f"calls nest at most {MOST_DEEP} deep")
        if callee.is_declaration:
            self._library(ins, call, callee, out)
            return
        self._instances += 1
        suffix = f"@{self._instances}"
        names = _Names(suffix)
        for param, argument in zip(callee.params, call.arguments, strict=True):
            self._bind(ins, names, param, argument, out, before=True)
        late: list[_Item] = []
        for result, target in zip(callee.returns, call.returns, strict=True):
            self._bind(ins, names, result, target, late, before=False)
        after = self._label("after")
        out += self.expand(callee, names, (*stack, callee.name), after)
        out.append(Label(after, ins.span))
        out += late

    def _bind(
        self,
        ins: Instruction,
        names: _Names,
        formal: Variable,
        actual: Symbol | Reg | Imm,
        out: list[_Item],
        *,
        before: bool,
    ) -> None:
        """Let a parameter (`before`) or result stand for what the call gives it: itself where both are variables."""
        type_ = f"b{formal.nbytes * 8}" if formal.space == "param" else formal.type
        if formal.space == "param" and isinstance(actual, Symbol):
            names.symbols[formal.name] = actual.name
            return
        if formal.space == "param":
            unique = _renamed(formal.name, names.suffix)
            self.variables[unique] = replace(formal, name=unique)
            names.symbols[formal.name] = unique
            where = Address(Symbol(unique), 0)
            assert not isinstance(actual, Symbol)
            if before:
                out.append(self._made(ins, "st", ("param", type_), (where, actual)))
            else:
                assert isinstance(actual, Reg)
                out.append(self._made(ins, "ld", ("param", type_), (actual, where)))
            return
        reg = self._register(Reg(formal.name, formal.type), names.suffix)
        move = "pred" if type_ == "pred" else f"b{TYPE_BITS[type_]}"
        if isinstance(actual, Symbol):
            where = Address(actual, 0)
            made = (
                self._made(ins, "ld", ("param", move), (reg, where))
                if before
                else self._made(ins, "st", ("param", move), (where, reg))
            )
        elif before:
            made = self._made(ins, "mov", (move,), (reg, actual))
        else:
            made = self._made(ins, "mov", (move,), (actual, reg))
        out.append(made)

    def _library(self, ins: Instruction, call: Call, callee: Function, out: list[_Item]) -> None:
        """Functions that the CUDA run-time library has."""
        if callee.name == _ASSERT:
            out.append(self._made(ins, "trap", ("assert",), ()))
        elif callee.name in ("vprintf", "printf"):
            for target, result in zip(call.returns, callee.returns, strict=True):
                zero = Imm(0, "int")
                if isinstance(target, Reg):
                    out.append(self._made(ins, "mov", (f"b{TYPE_BITS[target.type]}",), (target, zero)))
                else:
                    stored = (f"b{8 * result.nbytes}",) if result.nbytes in (1, 2, 4, 8) else ("b32",)
                    out.append(self._made(ins, "st", ("param", *stored), (Address(target, 0), zero)))
        else:
            raise self.fail(ins, f"{callee.name} has no body in this file, and it is not a function that is known here")

    def _label(self, hint: str) -> str:
        self._instances += 1
        return f"{hint}@{self._instances}"

    @staticmethod
    def _made(
        ins: Instruction,
        opcode: str,
        modifiers: tuple[str, ...],
        operands: tuple[Operand, ...],
        guard: Guard | None = None,
    ) -> Instruction:
        return Instruction(opcode, modifiers, operands, guard, ins.span, ins.text)


def _renamed(name: str, suffix: str) -> str:
    return f"{name}{suffix}"


def trap_messages(module: Module) -> dict[int, str]:
    """What each instruction that ends a launch says, by its line. Assertions say their text where it can be found."""
    messages = {}
    for function in module.functions.values():
        for index, item in enumerate(function.body):
            if not isinstance(item, Instruction):
                continue
            message = "the kernel executed trap"
            if item.opcode == "call":
                (call,) = item.operands
                assert isinstance(call, Call)
                if not isinstance(call.callee, Symbol):
                    message = "an indirect call went to an address that is no function it fits"
                elif call.callee.name == _ASSERT:
                    message, where = (_argument(module, call, function.body[:index], i) for i in (0, 1))
                    message = f"assertion failed: {message or '(its text is not known)'}" + (
                        f" in {where}" if where else ""
                    )
                else:
                    continue
            elif item.opcode != "trap":
                continue
            messages[item.span.line] = f"{message} ({module.path.name}:{item.span.line})"
    return messages


def _argument(module: Module, call: Call, body: list[_Item], index: int) -> str:
    """The string that a pointer argument of a call points to, if the definitions above it say so."""
    wanted: object = call.arguments[index] if index < len(call.arguments) else None
    for item in reversed(body[-200:]):
        if not isinstance(item, Instruction) or not item.operands:
            continue
        first = item.operands[0]
        stores = item.opcode == "st" and isinstance(first, Address) and first.base == wanted and first.offset == 0
        if stores or (item.opcode in ("mov", "cvta", "add") and first == wanted):
            source = item.operands[1]
            if isinstance(source, Symbol):
                return _string(module.variables, source)
            wanted = source
    return ""


def _string(variables: Mapping[str, Variable], symbol: Symbol) -> str:
    variable = variables.get(symbol.name)
    if variable is None or variable.init is None:
        return ""
    return variable.init[symbol.offset :].split(b"\0")[0].decode("utf-8", "replace")
