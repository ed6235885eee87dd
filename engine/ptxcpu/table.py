"""The instruction table: which types, modifiers and operands each form of an opcode takes.

From the PTX ISA 8.8, chapter "Instruction Set", and compared with what NVIDIA's assembler accepts. Roles of operands
(`d`, `s`, …) are explained where they are checked, in `check.ROLES`.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """A form of an opcode: the first one whose `when` modifiers are all there and whose `types` fit is taken.

    `operands` are roles; forms with other numbers of them are parted by `/`. `types` and `second` are the possible
    first and second types (empty: the form has none). One modifier of `need` must be there; more are in `allow`.
    """

    operands: str
    types: str = ""
    allow: str = ""
    need: str = ""
    when: str = ""
    second: str = ""


_INT = "u16 s16 u32 s32 u64 s64"
_WIDE = "u32 s32 u64 s64"
_HALF = "f16 bf16 f16x2 bf16x2"
_BITS = "b16 b32 b64"
_REAL = "f32 f64"
_ANY = f"{_BITS} {_INT} {_REAL}"
_MEMORY = f"b8 u8 s8 {_ANY} b128"
_ROUND = "rn rz rm rp"
_ORDER = "eq ne lt le gt ge"
_COMPARISONS = (
    (_BITS, "eq ne"),
    ("s16 s32 s64", _ORDER),
    ("u16 u32 u64", f"{_ORDER} lo ls hi hs"),
    (f"{_REAL} {_HALF}", f"{_ORDER} equ neu ltu leu gtu geu num nan"),
)
_COMPARE = f"{_ORDER} lo ls hi hs equ neu ltu leu gtu geu num nan"
_SETS = (
    ("u16 s16 u32 s32", f"{_ANY} {_HALF}"),
    ("f32", _ANY),
    ("f16", f"{_ANY} f16"),
    ("bf16", f"{_ANY} f16 bf16"),
    ("f16x2", "f16x2"),
    ("bf16x2", "bf16x2"),
)
_BOOL = "and or xor"
_SPACES = "global shared local const param shared::cta shared::cluster param::entry param::func"
_SCOPES = "cta cluster gpu sys"
_ACCESS = (
    f"{_SPACES} {_SCOPES} volatile relaxed acquire release acq_rel weak mmio unified ca cg cs lu cv wb wt nc v2 v4 v8"
)
_CLASSES = "finite infinite number notanumber normal subnormal"

_ADD = [
    Row("d s s", _WIDE, "cc", when="cc"),
    Row("d s s", "s32", "sat"),
    Row("d s s", _INT),
    Row("d s s", "f32", f"{_ROUND} ftz sat"),
    Row("d s s", "f64", _ROUND),
    Row("d s s", "f16 f16x2", "rn ftz sat"),
    Row("d s s", "bf16 bf16x2", "rn"),
]
_MINMAX = [
    Row("d s s", "s32 s16x2", "relu", when="relu"),
    Row("d s s", "u16x2 s16x2"),
    Row("d s s", f"{_INT} f64"),
    Row("d s s / d s s s", "f32", "ftz NaN xorsign abs"),
    Row("d s s", "f16 f16x2", "ftz NaN xorsign abs"),
    Row("d s s", "bf16 bf16x2", "NaN xorsign abs"),
]
_SIGN = [Row("d s", "s16 s32 s64 f64 bf16 bf16x2"), Row("d s", "f32 f16 f16x2", "ftz")]
_LOGIC = [Row("d s s", _BITS), Row("P p p", "pred")]
_COUNT = [Row("di s", "b32 b64")]

ROWS: Final[dict[str, list[Row]]] = {
    # Integers and floats
    "add": [*_ADD, Row("d s s", "u16x2 s16x2")],
    "sub": _ADD,
    "addc": [Row("d s s", _INT, "cc")],
    "subc": [Row("d s s", _INT, "cc")],
    "mul": [
        Row("w s s", "u16 s16 u32 s32", "wide", when="wide"),
        Row("d s s", _INT, "", "lo hi"),
        *_ADD[3:],
    ],
    "mad": [
        Row("w s s ws", "u16 s16 u32 s32", "wide", when="wide"),
        Row("d s s s", _WIDE, "cc", "lo hi", "cc"),
        Row("d s s s", _INT, "sat", "lo hi"),
        Row("d s s s", "f32", "ftz sat", _ROUND),
        Row("d s s s", "f64", "", _ROUND),
    ],
    "madc": [Row("d s s s", _INT, "cc", "lo hi")],
    "mul24": [Row("d s s", "u32 s32", "", "lo hi")],
    "mad24": [Row("d s s s", "u32 s32", "sat", "lo hi")],
    "fma": [
        Row("d s s s", "f32", "ftz sat", _ROUND),
        Row("d s s s", "f64", "", _ROUND),
        Row("d s s s", "f16 f16x2", "ftz sat relu oob", "rn"),
        Row("d s s s", "bf16 bf16x2", "relu oob", "rn"),
    ],
    "div": [Row("d s s", _INT), Row("d s s", "f32", "ftz", f"{_ROUND} approx full"), Row("d s s", "f64", "", _ROUND)],
    "rem": [Row("d s s", _INT)],
    "min": _MINMAX,
    "max": _MINMAX,
    "abs": _SIGN,
    "neg": _SIGN,
    "sad": [Row("d s s s", _INT)],
    "rcp": [
        Row("d s", "f32", "ftz", f"{_ROUND} approx"),
        Row("d s", "f64", "approx", "ftz", "approx"),
        Row("d s", "f64", "", _ROUND),
    ],
    "sqrt": [Row("d s", "f32", "ftz", f"{_ROUND} approx"), Row("d s", "f64", "", _ROUND)],
    "rsqrt": [Row("d s", _REAL, "ftz", "approx")],
    "sin": [Row("d s", "f32", "ftz", "approx")],
    "cos": [Row("d s", "f32", "ftz", "approx")],
    "lg2": [Row("d s", "f32", "ftz", "approx")],
    "ex2": [
        Row("d s", "f32", "ftz", "approx"),
        Row("d s", "f16 f16x2", "", "approx"),
        Row("d s", "bf16 bf16x2", "approx", "ftz"),
    ],
    "tanh": [Row("d s", f"f32 {_HALF}", "", "approx")],
    "copysign": [Row("d s s", _REAL)],
    "testp": [Row("P s", _REAL, "", _CLASSES)],
    "dp4a": [Row("di i i i", "u32 s32", second="u32 s32")],
    "dp2a": [Row("di i i i", "u32 s32", "", "lo hi", second="u32 s32")],
    # Bits
    "and": _LOGIC,
    "or": _LOGIC,
    "xor": _LOGIC,
    "not": [Row("d s", _BITS), Row("P p", "pred")],
    "cnot": [Row("d s", _BITS)],
    "shl": [Row("d s i", _BITS)],
    "shr": [Row("d s i", f"{_BITS} {_INT}")],
    "shf": [Row("d s s i", "b32", "clamp wrap l r", "clamp wrap")],
    "popc": _COUNT,
    "clz": _COUNT,
    "brev": [Row("d s", "b32 b64")],
    "bfind": [Row("di s", _WIDE, "shiftamt")],
    "bfe": [Row("d s i i", _WIDE)],
    "bfi": [Row("d s s i i", "b32 b64")],
    "bmsk": [Row("d s s", "b32", "", "clamp wrap")],
    "szext": [Row("d s i", "u32 s32", "", "clamp wrap")],
    "fns": [Row("d s s s", "b32")],
    "prmt": [Row("d s s s", "b32", "f4e b4e rc8 ecl ecr rc16")],
    "lop3": [*(Row("dP s s s n p", "b32", word, when=word) for word in ("and", "or")), Row("d s s s n", "b32")],
    # Comparing and choosing
    "setp": [
        Row(f"PP s s{c}", types, f"{op} ftz", compare, op)
        for op, c in (("and", " p"), ("or", " p"), ("xor", " p"), ("", ""))
        for types, compare in _COMPARISONS
    ],
    "set": [
        Row(f"d t t{c}", types, f"{op} ftz", _COMPARE, op, second)
        for op, c in (("and", " p"), ("or", " p"), ("xor", " p"), ("", ""))
        for types, second in _SETS
    ],
    "selp": [Row("d s s p", _ANY)],
    "slct": [Row("d s s t", _ANY, "ftz", second="s32 f32")],
    # Moving and converting
    "cvta": [Row("d q", "u32 u64", f"{_SPACES} to", _SPACES)],
    "isspacep": [Row("P x", "", "", _SPACES)],
    "activemask": [Row("di", "b32")],
    "ld": [Row("ld a", _MEMORY, _ACCESS)],
    "ldu": [Row("ld a", _MEMORY, _ACCESS)],
    "st": [Row("a st", _MEMORY, _ACCESS)],
    "prefetch": [Row("a", "", f"{_SPACES} L1 L2 tensormap")],
    "prefetchu": [Row("a", "", "L1")],
    "atom": [
        Row("e a s s", "b16 b32 b64 b128", f"{_ACCESS} cas", when="cas"),
        Row("e a s", "b32 b64 b128", f"{_ACCESS} exch", when="exch"),
        Row("e a s", "u32", _ACCESS, "inc dec", when="inc"),
        Row("e a s", "u32", f"{_ACCESS} dec", when="dec"),
        Row("e a s", "b32 b64", _ACCESS, _BOOL),
        Row("e a s", _WIDE, _ACCESS, "min max", "min"),
        Row("e a s", _WIDE, f"{_ACCESS} max", when="max"),
        Row("ev a sv", "u32 s32 u64 f32 f64", _ACCESS, "add"),
        Row("ev a sv", _HALF, f"{_ACCESS} add min max", "noftz"),
    ],
    "red": [
        Row("a s", "u32", _ACCESS, "inc dec", when="inc"),
        Row("a s", "u32", f"{_ACCESS} dec", when="dec"),
        Row("a s", "b32 b64", _ACCESS, _BOOL),
        Row("a s", _WIDE, _ACCESS, "min max", "min"),
        Row("a s", _WIDE, f"{_ACCESS} max", when="max"),
        Row("a sv", "u32 s32 u64 f32 f64", _ACCESS, "add"),
        Row("a sv", _HALF, f"{_ACCESS} add min max", "noftz"),
    ],
    # Threads together
    "shfl": [
        Row("dP s i i i", "b32", "sync", "up down bfly idx", "sync"),
        Row("dP s i i", "b32", "", "up down bfly idx"),
    ],
    "vote": [
        Row("di p i", "b32", "sync ballot", when="sync ballot"),
        Row("P p i", "pred", "sync", "all any uni", "sync"),
        Row("di p", "b32", "ballot", when="ballot"),
        Row("P p", "pred", "", "all any uni"),
    ],
    "match": [
        Row("di s i", "b32 b64", "any sync", when="any sync"),
        Row("iP s i", "b32 b64", "all sync", when="all sync"),
    ],
    "redux": [
        Row("d s i", "u32 s32", "sync", "add min max", "sync"),
        Row("d s i", "b32", "sync", _BOOL, "sync"),
        Row("d s i", "f32", "sync abs NaN", "min max", "sync"),
    ],
    "elect": [Row("dP i", "", "sync", when="sync")],
    "bar": [],
    "barrier": [
        Row("", "", "cluster aligned acquire release relaxed", "arrive wait", "cluster"),
    ],
    "nanosleep": [Row("i", "u32")],
    "griddepcontrol": [Row("", "", "", "launch_dependents wait")],
    "setmaxnreg": [Row("n", "u32", "sync aligned", "inc dec")],
    "membar": [Row("", "", "", "cta gl sys gpu")],
    "cp": [
        Row("", "", "async commit_group", when="async commit_group"),
        Row("n", "", "async wait_group", when="async wait_group"),
        Row("", "", "async wait_all", when="async wait_all"),
        *(
            Row("a a n / a a n ip", "", "async shared shared::cta global ca cg", "ca cg", when)
            for when in ("async shared", "async shared::cta")
        ),
    ],
    # Control
    "bra": [Row("l", "", "uni")],
    "brx": [Row("i l", "", "idx uni", when="idx")],
    "ret": [Row("", "", "uni")],
    "exit": [Row("")],
    "trap": [Row("")],
    "brkpt": [Row("")],
    "pmevent": [Row("n", "", "mask")],
}

_BAR = [
    Row("di i p / di i i p", "u32", "cta aligned red popc", when="red popc"),
    Row("P i p / P i i p", "pred", "cta aligned red", "and or", "red"),
    Row("i i", "", "cta aligned arrive", when="arrive"),
    Row("i", "", "warp sync", when="warp sync"),
    Row("i / i i", "", "cta aligned sync", when="sync"),
]
ROWS["bar"] += _BAR
ROWS["barrier"] += [row for row in _BAR if "warp" not in row.when]
