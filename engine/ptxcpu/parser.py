"""PTX text into a `tree.Module`: the directives of a file, the heads of functions.

A recursive-descent parser by hand, for PTX ISA 8.8. It is strict: what it does not know, or what the instruction table
in `check` forbids, is a `PtxError` with line, column and the statement; nothing is skipped but debugging information.
Reading order: `lexer` (tokens, constants), `declare` (variables), `scope` (names), `body` (instructions), `check`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu import declare
from ptxtrain.engine.ptxcpu.body import Body, skip_line_directive, skip_pragma
from ptxtrain.engine.ptxcpu.lexer import Cursor, Token, nearest
from ptxtrain.engine.ptxcpu.scope import Names
from ptxtrain.engine.ptxcpu.tree import Function, Module, PtxError, Span, Variable

_LINKAGE: Final = (".visible", ".extern", ".weak", ".common")
_DIRECTIVES: Final = (
    *_LINKAGE,
    ".entry",
    ".func",
    ".global",
    ".const",
    ".shared",
    ".local",
    ".file",
    ".loc",
    ".section",
    ".pragma",
    ".alias",
    ".version",
    ".target",
    ".address_size",
)
# Performance and ABI directives of a function, and how many numbers follow each.
_TUNING: Final = {
    ".maxntid": 3,
    ".reqntid": 3,
    ".reqnctapercluster": 3,
    ".minnctapersm": 1,
    ".maxnctapersm": 1,
    ".maxnreg": 1,
    ".maxclusterrank": 1,
    ".abi_preserve": 1,
    ".abi_preserve_control": 1,
    ".noreturn": 0,
    ".explicitcluster": 0,
    ".blocksareclusters": 0,
    ".unique": 0,
}


def parse(text: str, path: Path) -> Module:
    """The module that `text` is. `path` names it in messages. Raises `PtxError`."""
    return _Parser(text, path).read()


def parse_file(path: Path) -> Module:
    """The module in a file. Raises `PtxError`, or `PtxtrainError` if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PtxtrainError(f"cannot read the PTX file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PtxError(f"this is not text: byte {error.start} is not UTF-8", path, Span(1, 1)) from error
    return parse(text, path)


class _Parser:
    def __init__(self, text: str, path: Path) -> None:
        self.cursor = Cursor(text, path)
        self.module = Module(path, text, (0, 0), "")
        self.aliases: dict[str, str] = {}

    def read(self) -> Module:
        cursor = self.cursor
        self._head()
        while cursor.token.kind != "end":
            cursor.statement = cursor.token.offset
            self._directive()
            cursor.statement = None
        return self.module

    def _head(self) -> None:
        """`.version 8.8`, `.target sm_80, …`, `.address_size 64`."""
        cursor = self.cursor
        while cursor.at(".file"):
            skip_line_directive(cursor)
        cursor.statement = cursor.token.offset
        if not cursor.at(".version"):
            cursor.fail(f"a PTX file starts with .version, not {cursor.shown()}")
        cursor.take()
        version = cursor.token
        if version.kind != "float" or not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", version.text):
            cursor.fail(f"expected a version such as 8.0, found {cursor.shown()}")
        cursor.take()
        major, minor = version.text.split(".")
        self.module.version = int(major), int(minor)
        cursor.statement = cursor.token.offset
        if not cursor.at(".target"):
            cursor.fail(f"expected .target after .version, found {cursor.shown()}")
        cursor.take()
        target = cursor.word("a target such as sm_80")
        if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", target.text):
            cursor.fail(f"expected a target such as sm_80, found {target.text}", target)
        self.module.target = target.text
        while cursor.accept(","):
            cursor.word("an option of .target")
        if cursor.accept(".address_size"):
            size = cursor.token
            if cursor.count("the address size") != 64:
                cursor.fail("only .address_size 64 is supported", size)

    def _directive(self) -> None:
        cursor = self.cursor
        token = cursor.token
        if token.kind != "dot":
            cursor.fail(f"expected a directive, found {cursor.shown()}")
        if token.text in (".file", ".loc"):
            skip_line_directive(cursor)
        elif token.text == ".pragma":
            skip_pragma(cursor)
        elif token.text == ".section":
            self._section()
        elif token.text == ".alias":
            self._alias()
        elif token.text in (".version", ".target", ".address_size"):
            cursor.fail(f"{token.text} stands once, at the start of the file")
        else:
            linkage = cursor.take().text if cursor.at(*_LINKAGE) else ""
            self._declaration(linkage)

    def _declaration(self, linkage: str) -> None:
        cursor = self.cursor
        token = cursor.token
        if cursor.at(".entry", ".func"):
            cursor.take()
            self._function(token.text == ".entry", linkage)
        elif cursor.at(".global", ".const", ".shared", ".local"):
            cursor.take()
            extern = linkage in (".extern", ".common")
            for name, variable in declare.variables(cursor, token.text[1:], self._symbol, extern):
                self._add_variable(name, variable)
        elif token.kind == "dot":
            cursor.fail(f"unknown directive {token.text}{nearest(token.text, _DIRECTIVES)}")
        else:
            cursor.fail(f"expected a declaration after {linkage}, found {cursor.shown()}")

    def _add_variable(self, name: Token, variable: Variable) -> None:
        variables = self.module.variables
        earlier = variables.get(name.text)
        if name.text in self.module.functions:
            self.cursor.fail(f"{name.text} is a function already", name)
        if earlier is not None and not (earlier.extern or variable.extern):
            self.cursor.fail(f"{name.text} is declared in line {earlier.span.line} already", name)
        if earlier is not None and (earlier.space, earlier.type) != (variable.space, variable.type):
            was = f".{earlier.space} .{earlier.type}"
            self.cursor.fail(f"{name.text} is declared as {was} in line {earlier.span.line}", name)
        if earlier is None or earlier.extern:
            variables[name.text] = variable

    def _symbol(self, token: Token) -> str:
        """A variable or function that an initialiser names."""
        if token.text not in self.module.variables and token.text not in self.module.functions:
            names = [*self.module.variables, *self.module.functions]
            self.cursor.fail(f"undeclared name {token.text}{nearest(token.text, names)}", token)
        return token.text

    def _section(self) -> None:
        """`.section .debug_info { … }`: debugging information, skipped."""
        cursor = self.cursor
        start = cursor.take()
        if cursor.take().kind not in ("dot", "word"):
            cursor.fail("expected the name of a section", start)
        cursor.expect("{", "after the name of a section")
        while not cursor.at("}"):
            if cursor.token.kind in ("end", "bad"):
                cursor.fail("this .section has no end: '}' is missing", start if cursor.token.kind == "end" else None)
            cursor.take()
        cursor.take()

    def _alias(self) -> None:
        """`.alias new, function;`: another name of a function that has a body."""
        cursor = self.cursor
        cursor.take()
        alias = cursor.word("the alias")
        cursor.expect(",", "after the alias")
        name = cursor.word("a function")
        cursor.expect(";", "after .alias")
        functions = self.module.functions
        if name.text not in functions or functions[name.text].is_declaration:
            cursor.fail(f"{name.text} is not a function with a body", name)
        if alias.text not in functions or not functions[alias.text].is_declaration:
            cursor.fail(f"{alias.text} must be declared as a .func without a body first", alias)
        functions[alias.text] = replace(functions[name.text], name=alias.text)

    # Functions

    def _function(self, is_entry: bool, linkage: str) -> None:
        cursor = self.cursor
        names = Names()
        declare.skip_attribute(cursor)
        returns: list[tuple[Token | None, Variable]] = []
        if cursor.at("("):
            if is_entry:
                cursor.fail("an .entry returns nothing")
            returns = declare.parameters(cursor, "a function", False)
        name = cursor.word("the name of a function")
        params = declare.parameters(cursor, name.text, is_entry) if cursor.at("(") else []
        function = Function(
            name=name.text,
            is_entry=is_entry,
            params=tuple(variable for _, variable in params),
            returns=tuple(variable for _, variable in returns),
            registers=names.registers,
            variables={},
            body=[],
            branch_targets={},
            span=cursor.span(name.offset),
        )
        self._tuning(function)
        function.is_declaration = not cursor.at("{")
        self._add_function(name, function)
        if function.is_declaration:
            cursor.expect(";", f"or '{{' after the head of {name.text}")
            return
        if linkage == ".extern":
            cursor.fail(f"{name.text} is .extern and cannot have a body")
        for token, variable in (*returns, *params):
            self._name_parameter(names, token, variable)
        cursor.take()
        Body(cursor, self.module, function, names).read()

    def _name_parameter(self, names: Names, token: Token | None, variable: Variable) -> None:
        if token is None:
            return
        if earlier := names.here(token.text):
            self.cursor.fail(f"the parameter {token.text} is declared in line {earlier.line} already", token)
        if variable.space == "reg":
            names.declare_register(token.text, variable.type, 1, variable.span)
        else:
            names.declare(token.text, "variable", variable.span)

    def _tuning(self, function: Function) -> None:
        cursor = self.cursor
        while cursor.token.kind == "dot":
            token = cursor.token
            if token.text == ".pragma":
                skip_pragma(cursor)
                continue
            if token.text not in _TUNING:
                cursor.fail(f"unknown directive {token.text}{nearest(token.text, [*_TUNING, '.pragma'])}")
            cursor.take()
            numbers: list[int] = []
            while len(numbers) < _TUNING[token.text] and (not numbers or cursor.accept(",")):
                numbers.append(cursor.count(f"a number of {token.text}", 0))
            if token.text in (".maxntid", ".reqntid"):
                x, y, z = (*numbers, 1, 1)[:3]
                if 0 in numbers:
                    cursor.fail(f"{token.text} counts threads from 1", token)
                setattr(function, token.text[1:], (x, y, z))

    def _add_function(self, name: Token, function: Function) -> None:
        cursor, functions = self.cursor, self.module.functions
        if name.text in self.module.variables:
            cursor.fail(f"{name.text} is a variable already", name)
        earlier = functions.get(name.text)
        if earlier is not None:
            if not earlier.is_declaration and not function.is_declaration:
                cursor.fail(f"{name.text} is defined in line {earlier.span.line} already", name)

            def shape(f: Function) -> object:
                return f.is_entry, [(v.space, v.nbytes) for v in f.params], [(v.space, v.nbytes) for v in f.returns]

            if shape(earlier) != shape(function):
                cursor.fail(f"{name.text} is declared with other parameters in line {earlier.span.line}", name)
        if earlier is None or earlier.is_declaration:
            functions[name.text] = function
