"""Every form of every instruction, lane by lane, against the oracle: equal bits where IEEE 754 or the ISA fix them.

A result that is NaN need only be NaN: the ISA leaves its payload open. Approximate instructions have the bound that the
ISA gives the hardware, or less where ours are better, in units of the last place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lanewise import Form, compare

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def integer_forms(type: str) -> Iterator[Form]:
    two, three = (type, type), (type, type, type)
    for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
        yield Form(f"{op}.{type} $d, $a, $b", type, two)
    for op in ("div", "rem"):
        if type[0] == "u":
            yield Form(f"{op}.{type} $d, $a, $b", type, two, nonzero=True)
        else:  # the least number by -1 is left open
            yield Form(f"abs.{type} $d, $a; max.{type} $d, $d, 1; {op}.{type} $d, $b, $d", type, two)
    for op in ("mad.lo", "mad.hi", "sad"):
        yield Form(f"{op}.{type} $d, $a, $b, $c", type, three)
    if type in WIDE:
        yield Form(f"mul.wide.{type} $d, $a, $b", WIDE[type], two)
        yield Form(f"mad.wide.{type} $d, $a, $b, $c", WIDE[type], (type, type, WIDE[type]))
    if type[0] == "s":
        yield Form(f"abs.{type} $d, $a", type, (type,))
        yield Form(f"neg.{type} $d, $a", type, (type,))
    if type == "s32":
        for op in ("add.sat", "sub.sat"):
            yield Form(f"{op}.{type} $d, $a, $b", type, two)
        yield Form("mad.hi.sat.s32 $d, $a, $b, $c", type, three)
    if type in ("u32", "s32"):
        for op in ("mul24.lo", "mul24.hi"):
            yield Form(f"{op}.{type} $d, $a, $b", type, two)
        yield Form(f"mad24.lo.{type} $d, $a, $b, $c", type, three)
    yield Form(f"add.{type} $d, $a, -1", type, (type,))
    yield Form(f"sub.{type} $d, 100, $a", type, (type,))


def bit_forms() -> Iterator[Form]:
    for type in BITS:
        for op in ("and", "or", "xor"):
            yield Form(f"{op}.{type} $d, $a, $b", type, (type, type))
        yield Form(f"not.{type} $d, $a", type, (type,))
        yield Form(f"cnot.{type} $d, $a", type, (type,))
        yield Form(f"shl.{type} $d, $a, $b", type, (type, "shift"))
    for op in ("and", "or", "xor"):
        yield Form(f"{op}.pred $d, $a, !$b", "pred", ("pred", "pred"))
    yield Form("not.pred $d, $a", "pred", ("pred",))
    for type in ("b16", "b32", "b64", *INTEGERS):
        yield Form(f"shr.{type} $d, $a, $b", type, (type, "shift"))
    for type in ("b32", "b64"):
        for op in ("popc", "clz"):
            yield Form(f"{op}.{type} $d, $a", "u32", (type,))
        yield Form(f"brev.{type} $d, $a", type, (type,))
    for way in ("l.wrap", "l.clamp", "r.wrap", "r.clamp"):
        yield Form(f"shf.{way}.b32 $d, $a, $b, $c", "b32", ("b32", "b32", "shift"))


def field_forms() -> Iterator[Form]:
    for type in ("u32", "s32", "u64", "s64"):
        # 64-bit positions beyond a byte: the ISA's text and the hardware differ
        low = "and.b32 $b, $b, 63; and.b32 $c, $c, 63; " if type[1:] == "64" else ""
        yield Form(f"{low}bfe.{type} $d, $a, $b, $c", type, (type, "shift", "shift"))
        yield Form(f"bfind.{type} $d, $a", "u32", (type,))
        yield Form(f"bfind.shiftamt.{type} $d, $a", "u32", (type,))
    for type in ("b32", "b64"):
        yield Form(f"and.b32 $c, $c, 63; bfi.{type} $d, $a, $b, $c, 9", type, (type, type, "shift"))
        yield Form(f"and.b32 $c, $c, 63; bfi.{type} $d, $a, $b, 5, $c", type, (type, type, "shift"))
    for table in (0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF):
        yield Form(f"lop3.b32 $d, $a, $b, $c, {table}", "b32", ("b32", "b32", "b32"))
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield Form(f"prmt.b32{mode} $d, $a, $b, $c", "b32", ("b32", "b32", "b32"))
    yield Form("prmt.b32 $d, $a, $b, 0x7531", "b32", ("b32", "b32"))


def float_forms(type: str) -> Iterator[Form]:
    two, three = (type, type), (type, type, type)
    directed = ("rn", "rz", "rm", "rp") if type in ("f32", "f64") else ("rn",)
    for rounding in directed:
        for op in ("add", "sub", "mul"):
            yield Form(f"{op}.{rounding}.{type} $d, $a, $b", type, two)
        yield Form(f"fma.{rounding}.{type} $d, $a, $b, $c", type, three)
        if type in ("f32", "f64"):
            yield Form(f"div.{rounding}.{type} $d, $a, $b", type, two)
            yield Form(f"rcp.{rounding}.{type} $d, $a", type, (type,))
            yield Form(f"sqrt.{rounding}.{type} $d, $a", type, (type,))
    for op in ("min", "max"):
        yield Form(f"{op}.{type} $d, $a, $b", type, two)
        if type != "f64":
            yield Form(f"{op}.NaN.{type} $d, $a, $b", type, two)
    for op in ("abs", "neg"):
        yield Form(f"{op}.{type} $d, $a", type, (type,))
    if type == "f32":
        for op in ("add.rn", "sub.rn", "mul.rn", "add.rz", "mul.rp", "div.rn", "min", "max"):
            yield Form(f"{op}.ftz.f32 $d, $a, $b", type, two)
        for op in ("add.rn", "mul.rn"):
            yield Form(f"{op}.sat.f32 $d, $a, $b", type, two, open_zero=True)
        yield Form("fma.rn.ftz.f32 $d, $a, $b, $c", type, three)
        yield Form("fma.rn.ftz.sat.f32 $d, $a, $b, $c", type, three, open_zero=True)
        for op in ("abs", "neg", "rcp.rn", "sqrt.rn"):
            yield Form(f"{op}.ftz.f32 $d, $a", type, (type,))
    if type in ("f32", "f64"):
        yield Form(f"copysign.{type} $d, $a, $b", type, two)
        for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            yield Form(f"testp.{what}.{type} $d, $a", "pred", (type,))
    if type in HALVES:
        yield Form(f"fma.rn.relu.{type} $d, $a, $b, $c", type, three, open_zero=True)


def compare_forms(type: str) -> Iterator[Form]:
    ops = {"b": "eq ne", "s": "eq ne lt le gt ge", "u": "eq ne lt le gt ge lo ls hi hs"}
    every = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
    isfloat = type[0] == "f" or type.startswith("bf")
    for op in (every if isfloat else ops[type[0]]).split():
        yield Form(f"setp.{op}.{type} $d, $a, $b", "pred", (type, type))
    if type in ("f32", "s32", "u64"):
        for op in ("and", "or", "xor"):
            yield Form(f"setp.gt.{op}.{type} $d, $a, $b, $c", "pred", (type, type, "pred"))
            yield Form(f"setp.le.{op}.{type} _|$d, $a, $b, !$c", "pred", (type, type, "pred"))
        yield Form(f"set.lt.u32.{type} $d, $a, $b", "u32", (type, type))
        yield Form(f"set.ge.and.s32.{type} $d, $a, $b, $c", "s32", (type, type, "pred"))
        yield Form(f"set.ne.f32.{type} $d, $a, $b", "f32", (type, type))
        yield Form(f"slct.{type}.s32 $d, $a, $b, $c", type, (type, type, "s32"))
        yield Form(f"slct.{type}.f32 $d, $a, $b, $c", type, (type, type, "f32"))
    if type == "f32":
        for op in ("lt", "equ", "neu"):
            yield Form(f"setp.{op}.ftz.f32 $d, $a, $b", "pred", ("f32", "f32"))
    if type not in ("f16", "bf16"):
        yield Form(f"selp.{type} $d, $a, $b, $c", type, (type, type, "pred"))


def cvt_forms(to: str) -> Iterator[Form]:
    small = ("u8", "s8")
    for of in (*small, *INTEGERS, "f16", "bf16", "f32", "f64"):
        if "bf16" in (to, of) and (to in small or of in small):
            continue
        floats = [t for t in (to, of) if "f" in t]
        for how in ("", ".rn", ".rz", ".rm", ".rp", ".rni", ".rzi", ".rmi", ".rpi", ".sat", ".ftz"):
            rounds = how in (".rn", ".rz", ".rm", ".rp")
            whole = how in (".rni", ".rzi", ".rmi", ".rpi")
            if "f" not in to:
                possible = (
                    whole if "f" in of else how == "" or (how == ".sat" and to != of and (of[0] == "s" or to[0] == "s"))
                )
                if how == ".sat" and possible and "f" not in of:
                    lossy = (of[0] == "s" and to[0] == "u") or int(of[1:]) > int(to[1:]) - (
                        of[0] == "u" and to[0] == "s"
                    )
                    possible = lossy
            elif "f" not in of or int(to.strip("bf")) < int(of.strip("bf")):
                possible = rounds
            elif to == of:
                possible = how in ("", ".rni", ".rzi") or (how == ".sat" and to != "bf16")
            elif {to, of} == {"f16", "bf16"}:
                possible = how == ".rn"
            else:
                possible = (
                    how == "" or (how == ".sat" and "bf16" not in (to, of)) or (how == ".ftz" and "f32" in floats)
                )
            if possible:
                yield Form(f"cvt{how}.{to}.{of} $d, $a", to, (of,), open_zero=how == ".sat")
                if "f" not in to and "f" not in of and how == "":  # into and out of wider registers
                    yield Form(f"cvt.{to}.{of} $d, $a", to, (of,), wide=True)


def packed_cvt_forms() -> Iterator[Form]:
    for to in ("f16x2", "bf16x2"):
        for how in (".rn", ".rz", ".rn.relu"):
            yield Form(f"cvt{how}.{to}.f32 $d, $a, $b", to, ("f32", "f32"), open_zero="relu" in how)
    yield Form("cvt.rna.tf32.f32 $d, $a", "tf32", ("f32",))
    yield Form("cvt.rn.relu.bf16.f32 $d, $a", "bf16", ("f32",), open_zero=True)


def approximate_forms() -> Iterator[Form]:
    """The ISA's bounds, section by section: "Floating Point Instructions", ex2 to tanh, and div."""
    one = ("f32",)
    for ftz in ("", ".ftz"):
        yield Form(f"ex2.approx{ftz}.f32 $d, $a", "f32", one, ulps=2)
        yield Form(f"rsqrt.approx{ftz}.f32 $d, $a", "f32", one, ulps=2)
        yield Form(f"sqrt.approx{ftz}.f32 $d, $a", "f32", one, ulps=1)
        yield Form(f"rcp.approx{ftz}.f32 $d, $a", "f32", one, ulps=1)
        yield Form(f"lg2.approx{ftz}.f32 $d, $a", "f32", one, ulps=2, absolute=2**-22)
        for op in ("div.approx", "div.full"):  # of divisors from 2^-63 to 2^64
            middling = "and.b32 $b, $b, 0xBFFFFFFF; or.b32 $b, $b, 0x20000000; "
            yield Form(f"{middling}{op}{ftz}.f32 $d, $a, $b", "f32", ("f32", "f32"), ulps=2)
    small = "max.f32 $a, $a, 0fC0490FDB; min.f32 $a, $a, 0f40490FDB; "  # from -pi to pi
    for op in ("sin", "cos"):
        yield Form(f"{small}{op}.approx.f32 $d, $a", "f32", one, absolute=2**-20.5, open_zero=True)
    yield Form("tanh.approx.f32 $d, $a", "f32", one, ulps=1 << 12)
    yield Form("ex2.approx.f16 $d, $a", "f16", ("f16",), ulps=2)
    yield Form("ex2.approx.ftz.bf16 $d, $a", "bf16", ("bf16",), ulps=1)


def carry_forms() -> Iterator[Form]:
    """Each chain ends in an instruction that shows the flag."""
    for type in ("u32", "s32", "u64", "s64"):
        two, three = (type, type), (type, type, type)
        for op in ("add", "sub"):
            yield Form(f"{op}.cc.{type} $d, $a, $b; addc.{type} $d, 5, 0", type, two)
            yield Form(f"{op}.cc.{type} $d, $a, $b; {op}c.cc.{type} $d, $c, $b; {op}c.{type} $d, $d, $a", type, three)
        for half in ("lo", "hi"):
            yield Form(f"mad.{half}.cc.{type} $d, $a, $b, $c; addc.{type} $d, $d, 0", type, three)
            yield Form(
                f"add.cc.{type} $d, $a, $b; madc.{half}.cc.{type} $d, $a, $b, $c; addc.{type} $d, $d, 0", type, three
            )


def dot_forms() -> Iterator[Form]:
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            yield Form(f"dp4a.{a}.{b} $d, $a, $b, $c", "b32", (a, b, "s32"))
            for half in ("lo", "hi"):
                yield Form(f"dp2a.{half}.{a}.{b} $d, $a, $b, $c", "b32", (a, b, "s32"))
    for mode in ("clamp", "wrap"):
        yield Form(f"bmsk.{mode}.b32 $d, $a, $b", "b32", ("shift", "shift"))
        for type in ("u32", "s32"):
            yield Form(f"szext.{mode}.{type} $d, $a, $b", type, (type, "shift"))
    base = "and.b32 $b, $b, 31; "
    yield Form(f"{base}fns.b32 $d, $a, $b, $c", "b32", ("b32", "shift", "shift"))
    yield Form(f"{base}and.b32 $c, $c, 15; sub.s32 $c, 7, $c; fns.b32 $d, $a, $b, $c", "b32", ("b32", "shift", "shift"))
    for op in ("and", "or"):
        for table in (0xE8, 0x80):
            yield Form(f"lop3.{op}.b32 _|$d, $a, $b, 7, {table}, !$c", "pred", ("b32", "b32", "pred"))
            yield Form(f"lop3.{op}.b32 $d|_, $a, $b, $c, {table}, 1", "b32", ("b32", "b32", "b32"))


def packed_compare_forms() -> Iterator[Form]:
    for type in ("f16x2", "bf16x2"):
        two = (type, type)
        for op in ("eq", "lt", "geu", "neu", "num", "nan"):
            yield Form(f"setp.{op}.{type} $d|_, $a, $b", "pred", two)
            yield Form(f"setp.{op}.{type} _|$d, $a, $b", "pred", two)
            yield Form(f"set.{op}.u32.{type} $d, $a, $b", "b32", two)
            yield Form(f"set.{op}.{type}.{type} $d, $a, $b", "b32", two)
        yield Form(f"setp.gt.and.{type} $d|_, $a, $b, !$c", "pred", (*two, "pred"))
        yield Form(f"setp.gt.xor.{type} _|$d, $a, $b, $c", "pred", (*two, "pred"))


def choosing_forms() -> Iterator[Form]:
    """slct and set of every pair of types."""
    for type in (*BITS, *INTEGERS, "f32", "f64"):
        for condition in ("s32", "f32"):
            yield Form(f"slct.{type}.{condition} $d, $a, $b, $c", type, (type, type, condition))
    yield Form("slct.ftz.u32.f32 $d, $a, $b, $c", "u32", ("u32", "u32", "f32"))
    for result in ("u16", "s16", "u32", "s32", "f16", "bf16", "f32"):
        halves = {"f16": ["f16"], "bf16": ["bf16", "f16"], "f32": []}.get(result, ["f16", "bf16"])
        for type in (*BITS, *INTEGERS, "f32", "f64", *halves):
            op = "ne" if type[0] == "b" and type != "bf16" else "lt"
            yield Form(f"set.{op}.{result}.{type} $d, $a, $b", result, (type, type))
    for type in ("f16x2", "bf16x2"):
        yield Form(f"set.lt.s32.{type} $d, $a, $b", "b32", (type, type))


def more_float_forms() -> Iterator[Form]:
    for type in ("f32", "f64"):
        for rounding in ("rn", "rz"):
            yield Form(f"mad.{rounding}.{type} $d, $a, $b, $c", type, (type, type, type))
    yield Form("rsqrt.approx.f64 $d, $a", "f64", ("f64",))
    for type, ftz in (("f16", ""), ("bf16", ".ftz")):
        yield Form(f"ex2.approx{ftz}.{type}x2 $d, $a", f"{type}x2", (f"{type}x2",))
        for packed in ("", "x2"):
            yield Form(f"tanh.approx.{type}{packed} $d, $a", f"{type}{packed}", (f"{type}{packed}",))


FAMILIES = {
    "choosing": list(choosing_forms()),
    "more floats": list(more_float_forms()),
    **{f"integer {type}": list(integer_forms(type)) for type in INTEGERS},
    "bits": list(bit_forms()),
    "fields": list(field_forms()),
    **{f"float {type}": list(float_forms(type)) for type in ("f32", "f64", *HALVES)},
    **{f"compare {t}": list(compare_forms(t)) for t in (*BITS, *INTEGERS, "f32", "f64", "f16", "bf16")},
    **{f"cvt to {t}": list(cvt_forms(t)) for t in ("u8", "s8", *INTEGERS, "f16", "bf16", "f32", "f64")},
    "carry": list(carry_forms()),
    "dot": list(dot_forms()),
    "compare packed": list(packed_compare_forms()),
    "cvt packed": list(packed_cvt_forms()),
    "approximate": list(approximate_forms()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_lane_by_lane(family: str) -> None:
    wrong = compare(FAMILIES[family])
    assert not wrong, "\n".join(wrong[:30])
