"""PTX text into tokens, and a cursor over them that reads constants and reports errors.

Nothing is raised while the text is cut up: what cannot be a token becomes a `bad` token that carries its message, and
the cursor raises when the parser gets there. So the first mistake in the file is the one that is reported.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from ptxtrain.engine.ptxcpu.tree import Imm, PtxError, Span


class Token(NamedTuple):
    """A piece of the text: what it is, how it is written, where it starts (an offset from 0)."""

    kind: str  # "word", "dot", "int", "float", "string", "punct", "bad", "end"
    text: str
    offset: int


# In this order: the first alternative that matches wins.
_TOKEN: Final = re.compile(
    r"""
    (?P<space>  (?: \s+ | //[^\n]* | /\*.*?\*/ )+ )
  | (?P<word>   (?: [A-Za-z_$] | %(?=[A-Za-z_$0-9]) ) [A-Za-z0-9_$]* )
  | (?P<dot>    \. [A-Za-z0-9_$]+ (?: :: [A-Za-z0-9_$]+ )* )
  | (?P<float>  (?: 0[fF][0-9a-fA-F]{8} | 0[dD][0-9a-fA-F]{16}
                  | [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ ) (?![A-Za-z0-9_$.]) )
  | (?P<int>    (?: 0[xX][0-9a-fA-F]+ | 0[bB][01]+ | 0[0-7]* | [1-9][0-9]* ) U? (?![A-Za-z0-9_$.]) )
  | (?P<comment> /\* )
  | (?P<string> " (?: [^"\\\n] | \\. )* " )
  | (?P<punct>  << | >> | <= | >= | == | != | && | \|\| | [][{}()<>,;:+\-*/%!~&|^?=@] )
  | (?P<number> [0-9] [A-Za-z0-9_$.]* )
  | (?P<quote>  " )
  | (?P<other>  . )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEEPEST: Final = 64  # nested parentheses in a constant


def tokenize(text: str) -> list[Token]:
    """The tokens of `text`, the last of kind `end`. Never raises."""
    tokens: list[Token] = []
    position, end = 0, len(text)
    match = _TOKEN.match
    while position < end:
        found = match(text, position)
        assert found is not None and found.lastgroup is not None
        kind, written = found.lastgroup, found.group()
        if kind == "number":
            tokens.append(Token("bad", f"{written} is not a number", position))
        elif kind == "comment":
            tokens.append(Token("bad", "this comment has no end: */ is missing", position))
            break
        elif kind == "quote":
            tokens.append(Token("bad", "this string has no end on its line", position))
        elif kind == "other":
            tokens.append(Token("bad", f"the character {written!r} has no place in PTX", position))
        elif kind != "space":
            tokens.append(Token(kind, written, position))
        position = found.end()
    tokens.append(Token("end", "", end))
    return tokens


def fold(text: str) -> str:
    """`text` on one line without comments, for messages."""
    if "/" in text:
        text = _COMMENT.sub(" ", text)
    return " ".join(text.split())


# The binary operators of constants, by how tightly they bind, as in C.
_BINDING: Final = {
    **dict.fromkeys(("*", "/", "%"), 10),
    **dict.fromkeys(("+", "-"), 9),
    **dict.fromkeys(("<<", ">>"), 8),
    **dict.fromkeys(("<", ">", "<=", ">="), 7),
    **dict.fromkeys(("==", "!="), 6),
    **{"&": 5, "^": 4, "|": 3, "&&": 2, "||": 1},
}

_OPERATIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "^": operator.xor,
    "|": operator.or_,
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
}


class Cursor:
    """A place among the tokens of one file."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        self.tokens = tokenize(text)
        self.index = 0
        self.statement: int | None = None  # the offset at which the statement being read starts
        self._lines = [0, *(m.end() for m in re.finditer("\n", text))]

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.index]

    def after(self) -> Token:
        """The token after the next one."""
        return self.tokens[min(self.index + 1, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, which is then behind the cursor. The last one, `end`, stays."""
        token = self.tokens[self.index]
        if token.kind != "end":
            self.index += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token is written as one of `texts`."""
        return self.tokens[self.index].text in texts and self.tokens[self.index].kind not in ("end", "bad")

    def accept(self, text: str) -> bool:
        """Take the next token if it is written as `text`."""
        if self.tokens[self.index].text != text or self.tokens[self.index].kind in ("end", "bad"):
            return False
        self.index += 1
        return True

    def expect(self, text: str, where: str) -> Token:
        """Take `text`, or fail and say where it was wanted."""
        if not self.at(text):
            self.fail(f"expected {text} {where}, found {self.shown()}")
        return self.take()

    def word(self, what: str) -> Token:
        """Take an identifier, or fail and say what it should name."""
        if self.token.kind != "word" or self.token.text == "_":
            self.fail(f"expected {what}, found {self.shown()}")
        return self.take()

    def shown(self) -> str:
        """The next token as messages show it."""
        token = self.token
        return (
            "the end of the file" if token.kind == "end" else token.text if token.kind != "punct" else f"'{token.text}'"
        )

    def span(self, offset: int) -> Span:
        """Line and column of an offset."""
        line = bisect_right(self._lines, offset)
        return Span(line, offset - self._lines[line - 1] + 1)

    def fail(self, message: str, at: Token | int | None = None) -> NoReturn:
        """Raise `PtxError` at a token or an offset (the next token if None) with the statement's text."""
        place = self.token if at is None else at
        if isinstance(place, Token):
            if place.kind == "bad":
                message = place.text
            place = place.offset
        start = place if self.statement is None else min(self.statement, place)
        raise PtxError(message, self.path, self.span(place), self._quote(start, place))

    def _quote(self, start: int, place: int) -> str:
        """The statement at `start`, which goes on at least to the end of the token at `place`: one line, not too long."""
        end = self.text.find(";", place)
        line = self.text.find("\n", place)
        end = len(self.text) if end < 0 else end
        line = len(self.text) if line < 0 else line
        quoted = fold(self.text[start : min(end, line)]).strip(";{} ")
        return quoted if len(quoted) <= 160 else f"{quoted[:157]}…"

    # Constants

    def constant(self) -> Imm:
        """An immediate: a number, or a constant expression of integers."""
        negative = False
        start = self.index
        while self.at("-", "+"):
            negative ^= self.take().text == "-"
        if self.token.kind == "float":
            return self._float(self.take(), negative)
        if self.token.kind == "dot" and self.token.text[1:].isdigit():
            self.fail(f"write 0{self.token.text}: a number starts with a digit")
        self.index = start
        return Imm(self.integer(), "int")

    def integer(self, least: int = 1) -> int:
        """A constant expression of integers, from -2^63 to 2^64 - 1, of operators that bind at least so tightly."""
        start = self.token
        value = self._expression(0, least)
        if not -(1 << 63) <= value < 1 << 64:
            self.fail("this constant does not fit 64 bits", start)
        return value

    def count(self, what: str, least: int = 0, most: int = (1 << 31) - 1) -> int:
        """A constant between `least` and `most`."""
        start = self.token
        value = self.integer()
        if not least <= value <= most:
            self.fail(f"{what} must be from {least} to {most}, not {value}", start)
        return value

    def _float(self, token: Token, negative: bool) -> Imm:
        text = token.text
        if text[:2] in ("0f", "0F"):
            return Imm(int(text[2:], 16) ^ (negative << 31), "f32")
        if text[:2] in ("0d", "0D"):
            return Imm(int(text[2:], 16) ^ (negative << 63), "f64")
        value = float(text)
        if math.isinf(value):
            self.fail(f"{text} is too large for a double", token)
        return Imm(int.from_bytes(struct.pack("<d", value), "little") ^ (negative << 63), "f64")

    def _expression(self, depth: int, least: int = 1) -> int:
        """Precedence climbing; `?:` binds least and only outside operators."""
        if depth > _DEEPEST:
            self.fail(f"constants nest at most {_DEEPEST} deep")
        value = self._unary(depth)
        while self.token.kind == "punct" and (binding := _BINDING.get(self.token.text, 0)) >= least:
            sign = self.take()
            right = self._expression(depth + 1, binding + 1)
            value = self._apply(sign, value, right)
        if least == 1 and self.accept("?"):
            yes = self._expression(depth + 1)
            self.expect(":", "in a constant with '?'")
            no = self._expression(depth + 1)
            return yes if value else no
        return value

    def _unary(self, depth: int) -> int:
        if depth > _DEEPEST:
            self.fail(f"constants nest at most {_DEEPEST} deep")
        token = self.take()
        if token.kind == "int":
            digits = token.text.removesuffix("U")
            if len(digits) > 70:
                self.fail("this constant does not fit 64 bits", token)
            octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
            value = int(digits, 8) if octal else int(digits, 0)
            if value >= 1 << 64:
                self.fail("this constant does not fit 64 bits", token)
            return value
        if token.kind == "word" and token.text == "WARP_SZ":
            return 32
        if token.kind == "punct" and token.text in "-+~!":
            value = self._unary(depth + 1)
            return {"-": -value, "+": value, "~": ~value, "!": int(not value)}[token.text]
        if token.kind == "punct" and token.text == "(":
            if self.at(".s64", ".u64"):
                to = self.take().text
                self.expect(")", "after the type of a cast")
                value = self._unary(depth + 1) & ((1 << 64) - 1)
                return value - (1 << 64) if to == ".s64" and value >> 63 else value
            value = self._expression(depth + 1)
            self.expect(")", "in a constant")
            return value
        if token.kind == "float":
            self.fail(f"{token.text} is a float; an integer constant is needed here", token)
        if token.kind != "end":
            self.index -= 1
        self.fail(f"expected a constant, found {self.shown()}", token)

    def _apply(self, sign: Token, a: int, b: int) -> int:
        op = sign.text
        if op in ("/", "%"):
            if b == 0:
                self.fail("this constant divides by zero", sign)
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return quotient if op == "/" else a - quotient * b
        if op in ("<<", ">>"):
            if not 0 <= b < 64:
                self.fail(f"this constant shifts by {b}; 0 to 63 is possible", sign)
            return a << b & ((1 << 64) - 1) if op == "<<" else a >> b
        value = int(_OPERATIONS[op](a, b))
        if value.bit_length() > 66:
            self.fail("this constant does not fit 64 bits", sign)
        return value


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` if one of `names` is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, list(names)[:5000], 1, 0.65)
    return f"; did you mean {close[0]}?" if close else ""
