"""Operands of instructions: registers, constants, addresses, vectors, pairs, calls; names are resolved on the way."""

from __future__ import annotations

from typing import NoReturn

from ptxtrain.engine.ptxcpu.lexer import Cursor, Token, nearest
from ptxtrain.engine.ptxcpu.scope import COMPONENTS, SPECIAL_VECTORS, SPECIALS, Names
from ptxtrain.engine.ptxcpu.tree import (
    Address,
    Call,
    Function,
    Imm,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)


class Operands:
    """Reads operands at a cursor, with the names of a function and its module."""

    def __init__(self, cursor: Cursor, module: Module, names: Names) -> None:
        self.cursor, self.module, self.names = cursor, module, names

    def operand(self) -> Operand:
        cursor = self.cursor
        token = cursor.token
        if token.kind == "word":
            found = self._named()
            if cursor.at("|"):
                cursor.take()
                second = self._named()
                if not isinstance(found, Reg | Sink) or not isinstance(second, Reg | Sink):
                    cursor.fail("both sides of | are registers", token)
                return Pair(found, second)
            return found
        if token.text == "[" and token.kind == "punct":
            return self._address()
        if token.text == "{" and token.kind == "punct":
            return self._vector()
        if token.text == "!" and token.kind == "punct" and cursor.after().kind == "word":
            cursor.take()
            name = cursor.take()
            reg = self.register(name)
            if reg.type != "pred":
                cursor.fail(f"! takes a predicate; {name.text} is a .{reg.type} register", name)
            return Negated(reg)
        if token.kind in ("int", "float") or (token.kind == "punct" and token.text in "-+~!("):
            return cursor.constant()
        cursor.fail(f"expected an operand, found {cursor.shown()}")

    def _named(self) -> Operand:
        """A register, vector of registers, special register, symbol with an offset, `_` or `WARP_SZ`."""
        cursor = self.cursor
        if cursor.token.kind != "word":
            cursor.fail(f"expected a register, found {cursor.shown()}")
        token = cursor.take()
        if token.text == "_":
            return Sink()
        named = self.names.find(token.text)
        if named is not None and named.registers:
            if named.kind == "register":
                if cursor.token.kind == "dot":
                    cursor.fail(f"{token.text} is not a vector and has no {cursor.token.text}")
                return named.registers[0]
            component = self._component(token, named.registers)
            return Vector(named.registers) if component is None else component
        if token.text[0] == "%" and token.text in SPECIAL_VECTORS:
            part = cursor.token
            if part.kind != "dot" or part.text[1:] not in tuple(COMPONENTS):
                cursor.fail(f"{token.text} needs a component: {token.text}.x, .y or .z")
            cursor.take()
            return Special(token.text + part.text)
        if token.text in SPECIALS:
            return Special(token.text)
        if token.text == "WARP_SZ":
            return Imm(32, "int")
        name = self.symbol(token)
        return Symbol(name, self._offset())

    def _component(self, token: Token, registers: tuple[Reg, ...]) -> Reg | None:
        cursor = self.cursor
        if cursor.token.kind != "dot":
            return None
        part = cursor.take()
        index = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}.get(part.text[1:], 9)
        if index >= len(registers):
            cursor.fail(f"{token.text} has {len(registers)} elements and no {part.text}", part)
        return registers[index]

    def register(self, token: Token) -> Reg:
        named = self.names.find(token.text)
        if named is None or not named.registers:
            self._undeclared(token)
        if named.kind == "vector":
            reg = self._component(token, named.registers)
            if reg is None:
                self.cursor.fail(f"{token.text} is a vector; name one element, as {token.text}.x", token)
            return reg
        return named.registers[0]

    def symbol(self, token: Token) -> str:
        named = self.names.find(token.text)
        if named is not None and named.kind in ("variable", "prototype", "targets"):
            return named.unique
        if named is None and (token.text in self.module.variables or token.text in self.module.functions):
            return token.text
        if named is not None and named.kind == "label":
            self.cursor.fail(f"{token.text} is a label; only branches take labels", token)
        self._undeclared(token)

    def _undeclared(self, token: Token) -> NoReturn:
        names = self.names.visible("register", "variable")
        what = "register" if token.text[0] == "%" else "name"
        if what == "name":
            names += [*self.module.variables, *self.module.functions]
        else:
            names += SPECIALS
        self.cursor.fail(f"undeclared {what} {token.text}{nearest(token.text, names)}", token)

    def _address(self) -> Address:
        cursor = self.cursor
        cursor.take()
        base: Reg | Symbol | None = None
        offset = 0
        if cursor.token.kind == "word":
            token = cursor.token
            found = self._named()
            if isinstance(found, Symbol):
                base, offset = Symbol(found.name), found.offset
            elif isinstance(found, Reg):
                base = found
                offset = self._offset()
            elif isinstance(found, Imm):
                offset = found.value
            else:
                cursor.fail(f"an address is a register or a symbol, with an offset; not {token.text}", token)
        elif cursor.at("]"):
            cursor.fail("an address needs a register, a symbol or a constant")
        else:
            offset = cursor.integer()
        if cursor.at(","):
            cursor.fail("addresses with coordinates (textures, tensor maps) are not supported")
        if cursor.at("["):
            cursor.fail("write an offset in bytes, as [name+16], not an index")
        cursor.expect("]", "after an address")
        return Address(base, offset)

    def _offset(self) -> int:
        """`+4`, `+-4` or nothing."""
        cursor = self.cursor
        if cursor.at("-"):
            cursor.fail(f"write a negative offset as +-{cursor.after().text}: NVIDIA's assembler takes no other form")
        return cursor.integer() if cursor.accept("+") else 0

    def _vector(self) -> Vector:
        cursor = self.cursor
        cursor.take()
        elements: list[Reg | Imm | Sink] = []
        while True:
            token = cursor.token
            element = self._named() if token.kind == "word" else cursor.constant()
            if not isinstance(element, Reg | Imm | Sink):
                cursor.fail(f"a vector's elements are registers, constants or _; not {token.text}", token)
            elements.append(element)
            if not cursor.accept(","):
                break
        cursor.expect("}", "after a vector")
        return Vector(tuple(elements))

    def call(self) -> Call:
        cursor = self.cursor
        returns: list[Symbol | Reg] = []
        if cursor.accept("("):
            while True:
                token = cursor.token
                value = self._named()
                if not isinstance(value, Symbol | Reg):
                    cursor.fail(f"a call returns into a register or a .param variable, not {token.text}", token)
                returns.append(value)
                if not cursor.accept(","):
                    break
            cursor.expect(")", "after what a call returns")
            cursor.expect(",", "before the function")
        name = cursor.word("a function")
        named = self.names.find(name.text)
        callee: Symbol | Reg
        if named is not None and named.registers:
            callee = self.register(name)
        elif named is None and name.text in self.module.functions:
            callee = Symbol(name.text)
        elif named is not None or name.text in self.module.variables:
            cursor.fail(f"{name.text} is not a function", name)
        else:
            close = nearest(name.text, self.module.functions)
            cursor.fail(f"undeclared function {name.text}{close}", name)
        arguments: list[Symbol | Reg | Imm] = []
        if cursor.accept(","):
            if cursor.accept("("):
                while not cursor.at(")"):
                    if arguments:
                        cursor.expect(",", "between arguments")
                    token = cursor.token
                    value = self._named() if token.kind == "word" else cursor.constant()
                    if not isinstance(value, Symbol | Reg | Imm):
                        cursor.fail(f"a call takes registers, constants and .param variables, not {token.text}", token)
                    arguments.append(value)
                cursor.take()
                if cursor.accept(","):
                    self._prototype()
            else:
                self._prototype()
        if isinstance(callee, Symbol):
            self._fits(name, self.module.functions[callee.name], returns, arguments)
        return Call(tuple(returns), callee, tuple(arguments))

    def _prototype(self) -> None:
        token = self.cursor.word("a prototype")
        named = self.names.find(token.text)
        if (named is None or named.kind != "prototype") and token.text not in self.module.functions:
            self.cursor.fail(f"{token.text} is not a .callprototype or .calltargets label above this call", token)

    def _fits(
        self, token: Token, callee: Function, returns: list[Symbol | Reg], arguments: list[Symbol | Reg | Imm]
    ) -> None:
        variadic = bool(callee.params) and callee.params[-1].nbytes == 0
        for what, given, wanted in (("arguments", arguments, callee.params), ("results", returns, callee.returns)):
            if len(given) != len(wanted) and not (variadic and what == "arguments" and len(given) >= len(wanted) - 1):
                self.cursor.fail(
                    f"{callee.name} has {len(wanted)} {what if len(wanted) != 1 else what[:-1]}, not {len(given)}",
                    token,
                )
