"""The body of a function: scopes, declarations, labels, instructions and their operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NoReturn

from ptxtrain.engine.ptxcpu import declare
from ptxtrain.engine.ptxcpu.check import check
from ptxtrain.engine.ptxcpu.lexer import Cursor, Token, fold, nearest
from ptxtrain.engine.ptxcpu.scope import COMPONENTS, REGISTER_TYPES, SPECIAL_VECTORS, SPECIALS, Family, Names, Scope
from ptxtrain.engine.ptxcpu.tree import (
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
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

_MOST_REGISTERS: Final = 1 << 24
_DEEPEST: Final = 200  # nested scopes


class Body:
    """Reads one body into a `Function` whose head is read already; the cursor stands behind its `{`."""

    def __init__(self, cursor: Cursor, module: Module, function: Function, names: Names) -> None:
        self.cursor, self.module, self.function, self.names = cursor, module, function, names
        self._labels: list[tuple[int, int, Scope, Token]] = []  # body index, operand index, scope, name: to resolve
        self._targets: list[tuple[str, Scope, list[Token]]] = []
        self._depth = 1

    def read(self) -> None:
        """The statements up to the `}` that ends the function."""
        cursor = self.cursor
        while True:
            token = cursor.token
            cursor.statement = token.offset
            if token.kind == "word":
                self._label() if cursor.after().text == ":" else self._instruction()
            elif token.kind == "dot":
                self._directive()
            elif token.text == "@":
                self._instruction()
            elif token.text == "{":
                if self._depth == _DEEPEST:
                    cursor.fail(f"scopes nest at most {_DEEPEST} deep")
                cursor.take()
                self._depth += 1
                self.names.enter()
            elif token.text == "}":
                cursor.take()
                self._depth -= 1
                if not self.names.leave():
                    break
            elif token.text == ";" and token.kind == "punct":
                cursor.take()
            elif token.kind == "end":
                cursor.fail(f"the file ends inside {self.function.name}: '}}' is missing")
            else:
                cursor.fail(f"expected an instruction, found {cursor.shown()}")
        self._resolve()

    # Declarations

    def _directive(self) -> None:
        cursor = self.cursor
        word = cursor.token.text
        if word == ".reg":
            cursor.take()
            self._registers()
        elif word in declare.SPACES:
            cursor.take()
            for name, variable in declare.variables(cursor, word[1:], self.resolve):
                self.declare_variable(name, variable)
        elif word in (".loc", ".file"):
            skip_line_directive(cursor)
        elif word == ".pragma":
            skip_pragma(cursor)
        elif word in (".branchtargets", ".callprototype", ".calltargets"):
            cursor.fail(f"{word} needs a label before it")
        elif word == ".extern":
            cursor.fail(".extern declarations stand outside functions")
        else:
            known = [*declare.SPACES, ".reg", ".loc", ".file", ".pragma"]
            cursor.fail(f"unknown directive {word}{nearest(word, known)}")

    def _registers(self) -> None:
        cursor, width = self.cursor, 1
        if cursor.at(".v2", ".v4"):
            width = int(cursor.take().text[2:])
        token = cursor.token
        type = token.text[1:]
        if token.kind != "dot" or type not in REGISTER_TYPES:
            cursor.fail(f"expected the type of a register, found {cursor.shown()}")
        cursor.take()
        while True:
            name = cursor.word("the name of a register")
            span = cursor.span(name.offset)
            if name.text in SPECIALS or name.text in SPECIAL_VECTORS:
                cursor.fail(f"{name.text} is a special register; declare another name", name)
            if cursor.accept("<"):
                number = cursor.token
                count = cursor.integer(8)  # no comparison: > ends it
                if not 0 <= count <= _MOST_REGISTERS:
                    cursor.fail(f"0 to {_MOST_REGISTERS} registers are possible, not {count}", number)
                cursor.expect(">", "after the number of registers")
                if width > 1:
                    for i in range(min(count, 4096)):
                        self._fresh(name, f"{name.text}{i}")
                        self.names.declare_register(f"{name.text}{i}", type, width, span)
                elif earlier := self.names.declare_family(Family(name.text, count, type, span)):
                    cursor.fail(f"registers of {name.text}<{count}> are declared in line {earlier.line} already", name)
            else:
                self._fresh(name)
                self.names.declare_register(name.text, type, width, span)
            if not cursor.accept(","):
                break
        cursor.expect(";", "after a declaration")

    def _fresh(self, token: Token, name: str = "") -> None:
        """Fail if the innermost scope has the name already."""
        name = name or token.text
        if earlier := self.names.here(name):
            self.cursor.fail(f"{name} is declared in line {earlier.line} already", token)

    def declare_variable(self, name: Token, variable: Variable) -> None:
        """A variable of the innermost scope."""
        self._fresh(name)
        unique = self.names.declare(name.text, "variable", variable.span)
        self.function.variables[unique] = replace(variable, name=unique)

    def _label(self) -> None:
        cursor = self.cursor
        name = cursor.take()
        cursor.take()
        if name.text == "_":
            cursor.fail("_ cannot be a label", name)
        self._fresh(name)
        span = cursor.span(name.offset)
        if cursor.accept(".branchtargets"):
            unique = self.names.declare(name.text, "targets", span)
            targets = [cursor.word("a label")]
            while cursor.accept(","):
                targets.append(cursor.word("a label"))
            cursor.expect(";", "after .branchtargets")
            self._targets.append((unique, self.names.scope, targets))
        elif cursor.accept(".calltargets"):
            self.names.declare(name.text, "prototype", span)
            self._symbol(cursor.word("a function"))
            while cursor.accept(","):
                self._symbol(cursor.word("a function"))
            cursor.expect(";", "after .calltargets")
        elif cursor.accept(".callprototype"):
            self.names.declare(name.text, "prototype", span)
            if cursor.at("("):
                declare.parameters(cursor, "a prototype", False)
            if cursor.token.kind != "word":
                cursor.fail(f"expected _ in .callprototype, found {cursor.shown()}")
            cursor.take()
            if cursor.at("("):
                declare.parameters(cursor, "a prototype", False)
            while cursor.at(".noreturn", ".abi_preserve", ".abi_preserve_control"):
                if cursor.take().text != ".noreturn" and cursor.token.kind == "int":
                    cursor.take()
            cursor.expect(";", "after .callprototype")
        else:
            self.function.body.append(Label(self.names.declare(name.text, "label", span), span))

    # Instructions

    def _instruction(self) -> None:
        cursor = self.cursor
        start = cursor.token.offset
        guard = None
        if cursor.accept("@"):
            negated = cursor.accept("!")
            token = cursor.word("a predicate")
            reg = self._register(token)
            if reg.type != "pred":
                cursor.fail(f"a guard is a predicate; {token.text} is a .{reg.type} register", token)
            guard = Guard(reg, negated)
        name = cursor.word("an instruction")
        opcode = name.text
        modifiers: list[str] = []
        while cursor.token.kind == "dot":
            modifiers.append(cursor.take().text[1:])
        operands: list[Operand] = []
        places: list[Token] = []
        if opcode == "call":
            places.append(cursor.token)
            operands.append(self._call())
        else:
            branch = opcode in ("bra", "brx")
            while not cursor.at(";"):
                if operands:
                    cursor.expect(",", "or ';' after an operand")
                places.append(cursor.token)
                if branch and cursor.token.kind == "word" and self._is_label(opcode, modifiers, len(operands)):
                    token = cursor.word("a label")
                    self._labels.append((len(self.function.body), len(operands), self.names.scope, token))
                    operands.append(Symbol(token.text))
                else:
                    operands.append(self._operand())
        end = cursor.token.offset
        cursor.expect(";", f"after {opcode}")
        text = fold(cursor.text[start:end])
        instruction = Instruction(opcode, tuple(modifiers), tuple(operands), guard, cursor.span(start), text)
        wrong = check(instruction)
        if wrong is not None:
            index, message = wrong
            at = places[index].offset if 0 <= index < len(places) else name.offset
            raise PtxError(message, cursor.path, cursor.span(at), text)
        self.function.body.append(instruction)

    @staticmethod
    def _is_label(opcode: str, modifiers: list[str], index: int) -> bool:
        return index == (1 if opcode == "brx" and "idx" in modifiers else 0)

    def _operand(self) -> Operand:
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
            reg = self._register(name)
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
        name = self._symbol(token)
        return Symbol(name, cursor.integer() if cursor.at("+", "-") else 0)

    def _component(self, token: Token, registers: tuple[Reg, ...]) -> Reg | None:
        cursor = self.cursor
        if cursor.token.kind != "dot":
            return None
        part = cursor.take()
        index = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}.get(part.text[1:], 9)
        if index >= len(registers):
            cursor.fail(f"{token.text} has {len(registers)} elements and no {part.text}", part)
        return registers[index]

    def _register(self, token: Token) -> Reg:
        named = self.names.find(token.text)
        if named is None or not named.registers:
            self._undeclared(token)
        if named.kind == "vector":
            reg = self._component(token, named.registers)
            if reg is None:
                self.cursor.fail(f"{token.text} is a vector; name one element, as {token.text}.x", token)
            return reg
        return named.registers[0]

    def resolve(self, token: Token) -> str:
        """The unique name of a variable or function."""
        return self._symbol(token)

    def _symbol(self, token: Token) -> str:
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
        """`+4`, `+-4`, `-4` or nothing."""
        if self.cursor.accept("+"):
            return self.cursor.integer()
        return self.cursor.integer() if self.cursor.at("-") else 0

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

    def _call(self) -> Call:
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
        token = cursor.word("a function")
        named = self.names.find(token.text)
        callee: Symbol | Reg
        if named is not None and named.registers:
            callee = self._register(token)
        elif named is None and token.text in self.module.functions:
            callee = Symbol(token.text)
        elif named is not None or token.text in self.module.variables:
            cursor.fail(f"{token.text} is not a function", token)
        else:
            close = nearest(token.text, self.module.functions)
            cursor.fail(f"undeclared function {token.text}{close}", token)
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
            self._fits(token, self.module.functions[callee.name], returns, arguments)
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
                self.cursor.fail(f"{callee.name} has {len(wanted)} {what}, not {len(given)}", token)

    # Labels, which may stand behind the branches to them

    def _find_label(self, token: Token, scope: Scope, kind: str) -> str:
        named = self.names.find(token.text, scope)
        if named is None or named.kind != kind:
            what = "label" if kind == "label" else ".branchtargets list"
            names: list[str] = []
            look: Scope | None = scope
            while look is not None:
                names += [name for name, entry in look.names.items() if entry.kind == kind]
                look = look.parent
            if named is not None:
                self.cursor.fail(f"{token.text} is not a {what}", token)
            self.cursor.fail(f"undeclared {what} {token.text}{nearest(token.text, names)}", token)
        return named.unique

    def _resolve(self) -> None:
        body, function = self.function.body, self.function
        for index, operand, scope, token in self._labels:
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            self.cursor.statement = token.offset
            unique = self._find_label(token, scope, "targets" if operand else "label")
            if unique != token.text:
                operands = list(instruction.operands)
                operands[operand] = Symbol(unique)
                body[index] = replace(instruction, operands=tuple(operands))
        for name, scope, tokens in self._targets:
            function.branch_targets[name] = tuple(self._find_label(token, scope, "label") for token in tokens)
        function.registers = self.names.registers


def skip_line_directive(cursor: Cursor) -> None:
    """`.loc 1 10 3, function_name $L__info0, inlined_at 1 10 3` or `.file 1 "name", 0, 0`: for debuggers."""
    word = cursor.take().text
    if word == ".file":
        cursor.count("a file's number")
        if cursor.token.kind != "string":
            cursor.fail(f"expected the file's name, found {cursor.shown()}")
        cursor.take()
        while cursor.accept(","):
            cursor.count("a number")
        return
    for what in ("a file's number", "a line", "a column"):
        if cursor.token.kind != "int":
            cursor.fail(f"expected {what} after .loc, found {cursor.shown()}")
        cursor.take()
    while cursor.accept(","):
        if cursor.accept("function_name"):
            cursor.word("a label")
            if cursor.at("+"):
                cursor.integer()
        elif cursor.accept("inlined_at"):
            for what in ("a file's number", "a line", "a column"):
                if cursor.token.kind != "int":
                    cursor.fail(f"expected {what} after inlined_at, found {cursor.shown()}")
                cursor.take()
        else:
            cursor.fail(f"expected function_name or inlined_at, found {cursor.shown()}")


def skip_pragma(cursor: Cursor) -> None:
    """`.pragma "nounroll";`: advice to the assembler."""
    cursor.take()
    while True:
        if cursor.token.kind != "string":
            cursor.fail(f"expected a string after .pragma, found {cursor.shown()}")
        cursor.take()
        if not cursor.accept(","):
            break
    cursor.expect(";", "after .pragma")
