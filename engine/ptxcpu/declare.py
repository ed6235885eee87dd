"""Declarations of variables and parameters: types, sizes, alignment, initialisers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from ptxtrain.engine.ptxcpu.lexer import Cursor, Token
from ptxtrain.engine.ptxcpu.tree import TYPE_BITS, Imm, Symbol, Variable

SPACES: Final = {".shared", ".global", ".const", ".local", ".param"}
_OPAQUE: Final = {".texref", ".samplerref", ".surfref"}
_LARGEST: Final = (1 << 40) - 1  # bytes of a variable
_MOST_INITIALISED: Final = 1 << 26

# Resolves a symbol of an initialiser, or fails at the token.
Resolver = Callable[[Token], str]


def align_of(cursor: Cursor) -> int:
    """The number after `.align`, which is taken already."""
    token = cursor.token
    align = cursor.count("an alignment", 1, 1 << 20)
    if align & (align - 1):
        cursor.fail(f"an alignment is a power of two, not {align}", token)
    return align


def skip_attribute(cursor: Cursor) -> None:
    """`.attribute(.managed)` or `.attribute(.unified(…))`, which mean nothing on one device."""
    while cursor.accept(".attribute"):
        cursor.expect("(", "after .attribute")
        depth = 1
        while depth:
            if cursor.token.kind in ("end", "bad") or cursor.at(";", "{", "}"):
                cursor.fail(f"expected ')' after .attribute, found {cursor.shown()}")
            depth += {"(": 1, ")": -1}.get(cursor.take().text, 0)


def element_type(cursor: Cursor) -> str:
    """A fundamental type that memory can hold, as in a declaration."""
    token = cursor.token
    name = token.text[1:]
    if token.text in _OPAQUE:
        cursor.fail(f"textures and surfaces are not supported ({token.text})")
    if token.kind != "dot" or name not in TYPE_BITS:
        cursor.fail(f"expected a type, found {cursor.shown()}")
    if name in ("pred", "tf32"):
        cursor.fail(f"a variable cannot be of type .{name}")
    cursor.take()
    return name


def variables(cursor: Cursor, space: str, resolve: Resolver, extern: bool = False) -> list[tuple[Token, Variable]]:
    """The declarations of one statement after its state space (`.shared`), to the `;`: name tokens and variables."""
    skip_attribute(cursor)
    align, width = 0, 1
    while cursor.at(".align", ".v2", ".v4", ".v8"):
        word = cursor.take().text
        if word == ".align":
            align = align_of(cursor)
        else:
            width = int(word[2:])
    skip_attribute(cursor)
    type = element_type(cursor)
    element = TYPE_BITS[type] // 8
    if element * width > 16:
        cursor.fail(f"a vector is at most 16 bytes; .v{width} .{type} has {element * width}")
    declared: list[tuple[Token, Variable]] = []
    while True:
        name = cursor.word("the name of a variable")
        dims = dimensions(cursor)
        init: bytes | None = None
        relocations: tuple[tuple[int, Symbol], ...] = ()
        if cursor.at("="):
            if space not in ("global", "const"):
                cursor.fail(f"a variable in .{space} cannot have an initialiser")
            if extern:
                cursor.fail("an .extern variable cannot have an initialiser")
            cursor.take()
            init, relocations = _Initialiser(cursor, type, width, dims, resolve).read()
        count = 1
        for dim in dims:
            count *= dim or 0
        nbytes = len(init) if init is not None else count * element * width
        if nbytes > _LARGEST:
            cursor.fail(f"{name.text} has {nbytes} bytes; at most {_LARGEST} are possible", name)
        if not nbytes and not (extern and dims):
            cursor.fail(f"{name.text} has no size; only .extern arrays may leave it open", name)
        span = cursor.span(name.offset)
        variable = Variable(name.text, space, type, align or element * width, nbytes, span, extern, init, relocations)
        declared.append((name, variable))
        if not cursor.accept(","):
            break
    cursor.expect(";", "after a declaration")
    return declared


def dimensions(cursor: Cursor) -> list[int | None]:
    """`[4][8]`, or `[]` whose length is open (None): only the first may be."""
    dims: list[int | None] = []
    while cursor.at("["):
        if len(dims) == 8:
            cursor.fail("an array has at most 8 dimensions")
        cursor.take()
        if cursor.at("]"):
            if dims:
                cursor.fail("only the first dimension of an array may be left open")
            dims.append(None)
        else:
            dims.append(cursor.count("a dimension", 0, _LARGEST))
        cursor.expect("]", "after a dimension")
    return dims


def parameters(cursor: Cursor, function: str, is_entry: bool) -> list[tuple[Token | None, Variable]]:
    """`( .param …, … )`. A name `_` (in prototypes) gives None for its token; `.reg` parameters have space `reg`."""
    found: list[tuple[Token | None, Variable]] = []
    cursor.expect("(", f"before the parameters of {function}")
    while not cursor.at(")"):
        if found:
            cursor.expect(",", "between parameters")
        found.append(_parameter(cursor, is_entry))
    cursor.take()
    return found


def _parameter(cursor: Cursor, is_entry: bool) -> tuple[Token | None, Variable]:
    start = cursor.token
    if is_entry and cursor.at(".reg"):
        cursor.fail("parameters of an .entry are in .param")
    if not cursor.at(".param", ".reg"):
        cursor.fail(f"expected .param, found {cursor.shown()}")
    space = cursor.take().text[1:]
    align = 0
    if cursor.accept(".align"):
        align = align_of(cursor)
    if space == "reg" and cursor.accept(".pred"):
        type = "pred"
    else:
        type = element_type(cursor)
    if cursor.accept(".ptr"):
        while cursor.at(".const", ".global", ".local", ".shared", ".generic"):
            cursor.take()
        if cursor.accept(".align"):
            align_of(cursor)  # of what it points to
    if cursor.accept(".align"):
        align = align_of(cursor)
    if cursor.token.kind != "word":
        cursor.fail(f"expected the name of a parameter, found {cursor.shown()}")
    name = cursor.take()
    nbytes = max(TYPE_BITS[type] // 8, 1)
    dims = dimensions(cursor)
    for dim in dims:
        nbytes *= dim or 0  # an open size: a variadic parameter
    if nbytes > 1 << 20:
        cursor.fail(f"the parameter {name.text} has {nbytes} bytes; at most {1 << 20} are possible", name)
    span = cursor.span(start.offset)
    variable = Variable(name.text, space, type, align or max(TYPE_BITS[type] // 8, 1), nbytes, span)
    return (None if name.text == "_" else name), variable


class _Initialiser:
    """The bytes of `= …`. Shorter lists are filled up with zeros."""

    def __init__(self, cursor: Cursor, type: str, width: int, dims: list[int | None], resolve: Resolver) -> None:
        self.cursor, self.type, self.resolve = cursor, type, resolve
        self.size = TYPE_BITS[type] // 8
        self.dims = [*dims, *([width] if width > 1 else [])]
        self.bytes = bytearray()
        self.relocations: list[tuple[int, Symbol]] = []

    def read(self) -> tuple[bytes, tuple[tuple[int, Symbol], ...]]:
        if self.dims:
            self._list(0)
        elif self.cursor.accept("{"):
            self._element()
            self.cursor.expect("}", "after the value of a scalar")
        else:
            self._element()
        return bytes(self.bytes), tuple(self.relocations)

    def _list(self, level: int) -> None:
        """One `{ … }` of dimension `level`; inner braces may be left out."""
        start, begin = len(self.bytes), self.cursor.token
        self.cursor.expect("{", "at the start of an array's values")
        row = self.size
        for dim in self.dims[level + 1 :]:
            row *= dim or 0
        length = self.dims[level]
        limit = None if length is None else row * length
        if limit is not None and limit > _MOST_INITIALISED:
            self.cursor.fail(f"initialised variables have at most {_MOST_INITIALISED} bytes", begin)
        while not self.cursor.at("}"):
            if limit is not None and len(self.bytes) - start >= limit:
                self.cursor.fail(f"more values than the array has room for ({length})")
            if self.cursor.at("{") and level + 1 < len(self.dims):
                self._list(level + 1)
            else:
                self._element()
            if not self.cursor.accept(","):
                break
        self.cursor.expect("}", "after an array's values")
        if limit is None:
            limit = -(-(len(self.bytes) - start) // row) * row if row else 0
        self.bytes.extend(bytes(start + limit - len(self.bytes)))

    def _element(self) -> None:
        cursor, token = self.cursor, self.cursor.token
        if token.kind == "word" and token.text != "WARP_SZ":
            self._symbol()
            return
        value = cursor.constant()
        if value.kind == "int":
            if self.type in ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64"):
                cursor.fail(f"a .{self.type} needs a float, such as 0f3F800000, not an integer", token)
            bits = TYPE_BITS[self.type]
            if not -(1 << bits - 1) <= value.value < 1 << bits:
                cursor.fail(f"{value.value} does not fit .{self.type}", token)
            self.bytes += (value.value & ((1 << bits) - 1)).to_bytes(self.size, "little")
        elif self.type in ("f32", "f64"):
            self.bytes += convert_float(value, self.type).to_bytes(self.size, "little")
        else:
            cursor.fail(f"a .{self.type} cannot start as a float; give its bits as an integer", token)

    def _symbol(self) -> None:
        """`name`, `generic(name)`, each with `+ offset`."""
        cursor, start = self.cursor, self.cursor.token
        wrapped = cursor.at("generic") and cursor.after().text == "("
        if wrapped:
            cursor.take()
            cursor.take()
        name = self.resolve(cursor.word("the name of a variable or function"))
        if wrapped:
            cursor.expect(")", "after the name in generic()")
        offset = cursor.integer() if cursor.at("+", "-") else 0
        if self.size != 8 or self.type[0] not in "bus":
            cursor.fail(f"an address needs an element of 8 bytes, such as .u64, not .{self.type}", start)
        self.relocations.append((len(self.bytes), Symbol(name, offset)))
        self.bytes += bytes(8)


def convert_float(value: Imm, type: str) -> int:
    """The bits of a float literal as `f32` or `f64` (rounded to nearest if it is narrowed)."""
    if value.kind == type:
        return value.value
    if type == "f64":
        number = struct.unpack("<f", value.value.to_bytes(4, "little"))[0]
        return int.from_bytes(struct.pack("<d", number), "little")
    number = struct.unpack("<d", value.value.to_bytes(8, "little"))[0]
    try:
        return int.from_bytes(struct.pack("<f", number), "little")
    except OverflowError:  # beyond the largest float: infinity, with the sign
        return 0x7F800000 | (0x80000000 if number < 0 else 0)
