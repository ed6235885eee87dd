"""The body of a function: scopes, declarations, labels, instructions and their operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ptxtrain.engine.ptxcpu import declare
from ptxtrain.engine.ptxcpu.check import check
from ptxtrain.engine.ptxcpu.lexer import Cursor, Token, fold, nearest
from ptxtrain.engine.ptxcpu.operands import Operands
from ptxtrain.engine.ptxcpu.scope import REGISTER_TYPES, SPECIAL_VECTORS, SPECIALS, Family, Names, Scope
from ptxtrain.engine.ptxcpu.tree import (
    Function,
    Guard,
    Instruction,
    Label,
    Module,
    Operand,
    PtxError,
    Symbol,
    Variable,
)

_MOST_REGISTERS: Final = 1 << 24
_DEEPEST: Final = 200  # nested scopes


class Body:
    """Reads one body into a `Function` whose head is read already; the cursor stands behind its `{`."""

    def __init__(self, cursor: Cursor, module: Module, function: Function, names: Names) -> None:
        self.cursor, self.module, self.function, self.names = cursor, module, function, names
        self._labels: list[tuple[int, int, Scope, Token]] = []  # body index, operand index, scope, name: to resolve
        self._targets: list[tuple[str, Scope, list[Token]]] = []
        self.operands = Operands(cursor, module, names)
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
            for name, variable in declare.variables(cursor, word[1:], self.operands.symbol):
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
            self.operands.symbol(cursor.word("a function"))
            while cursor.accept(","):
                self.operands.symbol(cursor.word("a function"))
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
            reg = self.operands.register(token)
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
            operands.append(self.operands.call())
        else:
            branch = opcode in ("bra", "brx")
            while not cursor.at(";") and (operands or cursor.token.kind != "end"):
                if operands:
                    cursor.expect(",", "or ';' after an operand")
                places.append(cursor.token)
                if branch and cursor.token.kind == "word" and self._is_label(opcode, modifiers, len(operands)):
                    token = cursor.word("a label")
                    self._labels.append((len(self.function.body), len(operands), self.names.scope, token))
                    operands.append(Symbol(token.text))
                else:
                    operands.append(self.operands.operand())
        end = cursor.token.offset
        cursor.expect(";", f"after {opcode}")
        text = fold(cursor.text[start:end])
        instruction = Instruction(opcode, tuple(modifiers), tuple(operands), guard, cursor.span(start), text)
        wrong = check(instruction, self._space_of)
        if wrong is not None:
            index, message = wrong
            at = places[index].offset if 0 <= index < len(places) else name.offset
            raise PtxError(message, cursor.path, cursor.span(at), text)
        self.function.body.append(instruction)

    def _space_of(self, name: str) -> str | None:
        """The state space of a variable, None for a function."""
        function = self.function
        variable = function.variables.get(name) or self.module.variables.get(name)
        if variable is None:
            variable = next((v for v in (*function.params, *function.returns) if v.name == name), None)
        return None if variable is None else variable.space

    @staticmethod
    def _is_label(opcode: str, modifiers: list[str], index: int) -> bool:
        return index == (1 if opcode == "brx" and "idx" in modifiers else 0)

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
