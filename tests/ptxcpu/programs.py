"""Random kernels that end, do not race and are defined by the ISA to the last bit.

A program is a tree of statements over integer registers and f32 registers: arithmetic, guarded instructions, if and
else, loops of at most a few rounds whose count differs between lanes, `continue` and `break`, early exits before the
last barrier's scope, shared memory exchanged between threads across barriers at uniform places, shuffles and votes by
whole warps. Floats never become integers bit by bit, since the payload of a NaN is left open.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from both import HEAD

INTS, FLOATS, WIDES, PREDICATES = 8, 6, 4, 5

_INT_OPS = (
    *(
        "add.u32",
        "sub.s32",
        "mul.lo.u32",
        "mul.hi.s32",
        "mul.hi.u32",
        "min.s32",
        "max.u32",
        "and.b32",
        "or.b32",
        "xor.b32",
    ),
    *("shl.b32", "shr.u32", "shr.s32"),
)
_FLOAT_OPS = ("add.rn", "sub.rn", "mul.rn", "min", "max", "add.rn.ftz", "mul.rn.ftz", "div.rn")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass
class Program:
    """The text of a kernel as it grows."""

    rng: random.Random
    warps: bool  # whether the block is of whole warps, so that shuffles may name all lanes
    barriers: bool
    lines: list[str] = field(default_factory=list)
    labels: int = 0
    loops: list[tuple[str, str]] = field(default_factory=list)  # labels to continue at, to break to
    depth: int = 0
    may_exit: bool = False

    def emit(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def label(self, what: str) -> str:
        self.labels += 1
        return f"{what}{self.labels}"

    # Operands

    def int(self) -> str:
        roll = self.rng.random()
        if roll < 0.6:
            return f"%i{self.rng.randrange(INTS)}"
        if roll < 0.75:  # what a compiler knows the shape of over a warp's lanes
            return self.rng.choice(["%t", "%lane", "%block", "%nt", "%g", "%twice"])
        return str(
            self.rng.choice([0, 1, 2, 5, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, self.rng.getrandbits(32)])
        )

    def int_to(self) -> str:
        return f"%i{self.rng.randrange(INTS)}"

    def float(self) -> str:
        if self.rng.random() < 0.8:
            return f"%f{self.rng.randrange(FLOATS)}"
        return f"0f{self.rng.choice([0, 0x80000000, 0x3F800000, 0xBF000000, 0x7F800000, 0x00400000, 0x4B000001]):08X}"

    def predicate(self) -> str:
        return f"%p{self.rng.randrange(PREDICATES)}"

    # Statements

    def block(self, count: int, uniform: bool) -> None:
        """`count` statements; `uniform`: all threads of the block come here together."""
        for _ in range(count):
            self.statement(uniform)

    def statement(self, uniform: bool) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.42 or self.depth > 3:
            self.arithmetic()
        elif roll < 0.55:
            self.chain()
        elif roll < 0.70:
            self.branch(uniform)
        elif roll < 0.80:
            self.loop(uniform)
        elif roll < 0.86 and self.loops:
            self.emit(f"@{rng.choice(['', '!'])}{self.predicate()} bra {rng.choice(self.loops[-1])};")
        elif roll < 0.89 and self.may_exit:
            self.emit(f"@{self.predicate()} {rng.choice(['ret', 'exit'])};")
        elif roll < 0.91:
            self.gather()
        elif roll < 0.945 and uniform and self.barriers:
            self.exchange()
        elif uniform and self.warps:
            self.shuffle()
        else:
            self.arithmetic()

    def arithmetic(self) -> None:
        rng = self.rng
        guard = f"@{rng.choice(['', '!'])}{self.predicate()} " if rng.random() < 0.2 else ""
        a, b, c = self.int(), self.int(), self.int()
        x, y, z = self.float(), self.float(), self.float()
        to, fto, p = self.int_to(), f"%f{rng.randrange(FLOATS)}", self.predicate()
        wide, wide2 = f"%w{rng.randrange(WIDES)}", f"%w{rng.randrange(WIDES)}"
        reg = f"%i{rng.randrange(INTS)}"
        order = rng.choice(_COMPARISONS)
        text = rng.choice(
            [
                f"{rng.choice(_INT_OPS)} {to}, {a}, {b};",
                f"{rng.choice(_INT_OPS)} {to}, {a}, {b};",
                f"mad.lo.s32 {to}, {a}, {b}, {c};",
                f"bfe.u32 {to}, {a}, {rng.randrange(40)}, {rng.randrange(40)};",
                f"bfi.b32 {to}, {a}, {b}, {rng.randrange(32)}, {rng.randrange(33)};",
                f"prmt.b32 {to}, {a}, {b}, {rng.getrandbits(16)};",
                f"lop3.b32 {to}, {a}, {b}, {c}, {rng.getrandbits(8)};",
                f"shf.{rng.choice(['l', 'r'])}.{rng.choice(['wrap', 'clamp'])}.b32 {to}, {a}, {b}, {c};",
                f"{rng.choice(['popc', 'clz', 'brev', 'not'])}.b32 {to}, {reg};",
                f"{rng.choice(['abs', 'neg'])}.s32 {to}, {reg};",
                f"selp.b32 {to}, {a}, {b}, {p};",
                f"setp.{order}.{rng.choice(['s32', 'u32'])} {p}, {a}, {b};",
                f"setp.{order}.{rng.choice(['and', 'or', 'xor'])}.s32 {p}|{self.predicate()}, {a}, {b}, !{self.predicate()};",
                f"setp.{rng.choice([*_COMPARISONS, 'neu', 'ltu', 'geu', 'nan', 'num'])}.f32 {p}, {x}, {y};",
                f"{rng.choice(['and', 'or', 'xor'])}.pred {p}, {self.predicate()}, !{self.predicate()};",
                f"mul.wide.{rng.choice(['s32', 'u32'])} {wide}, {reg}, {b};",
                f"mad.wide.s32 {wide}, {reg}, {b}, {wide2};",
                f"{rng.choice(['add.s64', 'sub.u64', 'xor.b64', 'mul.lo.s64', 'min.s64'])} {wide}, {wide}, {wide2};",
                f"{rng.choice(['shl.b64', 'shr.u64', 'shr.s64'])} {wide}, {wide2}, {c};",
                f"cvt.u32.u64 {to}, {wide};",
                f"cvt.s64.s32 {wide}, {reg};",
                f"mov.b64 {{{to}, _}}, {wide};",
                f"cvt.{rng.choice(['s8', 'u8', 's16', 'u16'])}.u32 {to}, {reg};",
                f"{rng.choice(_FLOAT_OPS)}.f32 {fto}, {x}, {y};",
                f"{rng.choice(_FLOAT_OPS)}.f32 {fto}, {x}, {y};",
                f"fma.rn{rng.choice(['', '.ftz', '.sat'])}.f32 {fto}, {x}, {y}, {z};",
                f"fma.rn.f32 {fto}, {x}, {y}, {z};",
                f"{rng.choice(['abs', 'neg', 'sqrt.rn', 'rcp.rn'])}.f32 {fto}, %f{rng.randrange(FLOATS)};",
                f"selp.f32 {fto}, {x}, {y}, {p};",
                f"cvt.rn.f32.{rng.choice(['s32', 'u32'])} {fto}, {reg};",
                f"cvt.{rng.choice(['rni', 'rzi', 'rmi', 'rpi'])}.{rng.choice(['s32', 'u32', 's16'])}.f32 {to}, {fto};",
                f"cvt.rn.bf16.f32 %h0, {fto}; cvt.f32.bf16 {fto}, %h0;",
                f"cvt.rn.f16.f32 %h1, {fto}; cvt.f32.f16 {fto}, %h1;",
            ]
        )
        self.emit("".join(f"{guard}{part}; " for part in text.rstrip(";").split("; ")).rstrip())

    def chain(self) -> None:
        """Registers that are written once, from the thread's place and constants: compilers know more about those."""
        rng = self.rng
        known = ["%t", "%lane", "%block", "%nt", "%g", "%t"]
        for _ in range(rng.randrange(2, 6)):
            self.labels += 1
            new, wide = f"%c{self.labels}", f"%cw{self.labels}"

            def some(known: list[str] = known) -> str:
                constants = (
                    "0",
                    "1",
                    "2",
                    "3",
                    "4",
                    "7",
                    "8",
                    "16",
                    "31",
                    "32",
                    "60",
                    "-1",
                    "-4",
                    "0xFFFFFFE0",
                    "0x7FFFFFFF",
                )
                return rng.choice(known) if rng.random() < 0.65 else rng.choice(constants)

            a, b, c, reg, sign, shift = some(), some(), some(), rng.choice(known), rng.choice("us"), rng.randrange(34)
            self.emit(f".reg .b32 {new}; .reg .b64 {wide};")
            op = rng.choice(
                ["add.u32", "sub.s32", "mul.lo.u32", "and.b32", "or.b32", "xor.b32", "min.s32", "max.u32", "rem.u32"]
            )
            if op == "rem.u32":
                b = rng.choice(["%nt", "7", "32"])
            self.emit(
                rng.choice(
                    [
                        f"{op} {new}, {a}, {b};",
                        f"{op} {new}, {reg}, {b};",
                        f"mad.lo.{sign}32 {new}, {a}, {b}, {c};",
                        f"shl.b32 {new}, {a}, {b};",
                        f"shr.{sign}32 {new}, {a}, {b};",
                        f"neg.s32 {new}, {reg};",
                        f"mov.u32 {new}, {reg};",
                        f"cvt.{sign}64.{sign}32 {wide}, {reg}; shl.b64 {wide}, {wide}, {shift}; cvt.u32.u64 {new}, {wide};",
                        f"mul.wide.{sign}32 {wide}, {reg}, {b}; shr.{sign}64 {wide}, {wide}, {shift}; cvt.u32.u64 {new}, {wide};",
                        f"mad.wide.u32 {wide}, {reg}, {b}, 12; and.b64 {wide}, {wide}, 0xFFFFFFFFFF0; cvt.u32.u64 {new}, {wide};",
                        f"cvt.{sign}8.u32 {new}, {reg};",
                        f"selp.b32 {new}, {a}, {b}, {self.predicate()};",
                    ]
                )
            )
            known.append(new)
            known.append(new)
        to = self.int_to()
        self.emit(f"mad.lo.u32 {to}, {to}, 5, {known[-1]};")
        if rng.random() < 0.4:
            self.emit(f"and.b32 %s0, {known[-1]}, 60; mad.wide.u32 %at, %s0, 4, %first; ld.global.u32 {to}, [%at];")

    def condition(self) -> str:
        p = self.predicate()
        self.emit(f"setp.{self.rng.choice(_COMPARISONS)}.s32 {p}, {self.int()}, {self.int()};")
        return p

    def branch(self, uniform: bool) -> None:
        rng = self.rng
        if uniform and rng.random() < 0.3:  # the same way for all of the block
            p = self.predicate()
            self.emit(f"setp.{rng.choice(_COMPARISONS)}.u32 {p}, %block, {rng.randrange(3)};")
        else:
            p, uniform = self.condition(), False
        other, end = self.label("ELSE"), self.label("END")
        self.emit(f"@!{p} bra {other};")
        self.depth += 1
        self.block(rng.randrange(1, 4), uniform)
        self.depth -= 1
        has_else = rng.random() < 0.5
        if has_else:
            self.emit(f"bra {end};")
        self.emit(f"{other}:")
        if has_else:
            self.depth += 1
            self.block(rng.randrange(1, 4), uniform)
            self.depth -= 1
            self.emit(f"{end}:")

    def loop(self, uniform: bool) -> None:
        rng = self.rng
        start, step, end = self.label("LOOP"), self.label("NEXT"), self.label("DONE")
        counter = f"%n{self.labels}"
        self.emit(f".reg .b32 {counter}, {counter}_most; .reg .pred {counter}_p; mov.u32 {counter}, 0;")
        if uniform and rng.random() < 0.5:
            self.emit(f"mov.u32 {counter}_most, {rng.randrange(1, 4)};")
        else:
            uniform = False
            self.emit(f"and.b32 {counter}_most, %i{rng.randrange(INTS)}, 3;")
        self.emit(f"{start}: setp.ge.u32 {counter}_p, {counter}, {counter}_most; @{counter}_p bra {end};")
        self.depth += 1
        if not uniform:
            self.loops.append((step, end))
        kept = self.loops
        if uniform:
            self.loops = []
        self.block(rng.randrange(1, 4), uniform)
        self.loops = kept
        if not uniform:
            self.loops.pop()
        self.depth -= 1
        self.emit(f"{step}: add.u32 {counter}, {counter}, 1; bra {start}; {end}:")

    def gather(self) -> None:
        """Read one of the input's first 64 numbers: any, or one by the lane's number, or in a vector."""
        rng, a, to = self.rng, self.int(), self.int_to()
        index = rng.choice(
            [f"and.b32 %s0, {a}, 60", "and.b32 %s0, %t, 31", "shr.u32 %s0, %t, 3", "shl.b32 %s0, %block, 2"]
        )
        self.emit(f"{index}; mad.wide.u32 %at, %s0, 4, %first;")
        if index.endswith("60") or index.startswith("shl"):
            self.emit(f"ld.global.v2.u32 {{{to}, {rng.choice(['_', '%s0'])}}}, [%at+8];")
        else:
            self.emit(
                f"ld.global.{rng.choice(['u32', 's32', 'u8', 's16', 'nc.b32'])} {to}, [%at+{4 * rng.randrange(3)}];"
            )

    def exchange(self) -> None:
        """All threads write their slots, and after a barrier read a neighbour's; another barrier before the next write."""
        value, to, far = self.int(), self.int_to(), self.rng.choice([1, 3, 7, 31, 32])
        reg = f"%i{self.rng.randrange(INTS)}"
        if self.rng.random() < 0.5:
            value = reg
        if not value.startswith("%"):
            self.emit(f"mov.b32 {reg}, {value};")
            value = reg
        self.emit(f"st.shared.u32 [%slot], {value}; bar.sync 0;")
        self.emit(f"add.u32 %s0, %t, {far}; rem.u32 %s0, %s0, %nt; mad.lo.u32 %s0, %s0, 4, %tile;")
        self.emit(f"ld.shared.u32 {to}, [%s0]; bar.sync 0;")

    def shuffle(self) -> None:
        rng = self.rng
        reg, to, p = f"%i{rng.randrange(INTS)}", self.int_to(), self.predicate()
        mode, clamp = rng.choice([("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("down", 0x181F), ("up", 0x1800)])
        self.emit(
            rng.choice(
                [
                    f"shfl.sync.{mode}.b32 {to}|{p}, {reg}, {rng.randrange(32)}, {clamp}, -1;",
                    f"shfl.sync.{mode}.b32 {to}, {reg}, {self.int()}, {clamp}, -1;",
                    f"vote.sync.ballot.b32 {to}, {p}, -1;",
                    f"vote.sync.{rng.choice(['any', 'all', 'uni'])}.pred {p}, {self.predicate()}, -1;",
                    f"redux.sync.{rng.choice(['add', 'min', 'max'])}.s32 {to}, {reg}, -1;",
                ]
            )
        )


def generate(seed: int) -> tuple[str, int]:
    """A kernel `k(p_in, p_out, p_floats)` and its block's size. Its threads read 4 numbers each and write 10."""
    rng = random.Random(seed)
    block = rng.choice([32, 64, 96, 64, 96, 17, 40])
    program = Program(rng, warps=block % 32 == 0, barriers=rng.random() < 0.7)
    program.block(rng.randrange(6, 16), uniform=True)
    program.may_exit = True  # from here on no more barriers and no instructions of whole warps
    program.emit("mov.u32 %mark, 1;")
    program.block(rng.randrange(2, 8), uniform=False)
    setup = [f"ld.global.u32 %i{i}, [%in+{4 * i}];" for i in range(4)]
    setup += [
        "and.b32 %i4, %t, 31;",
        "mad.lo.u32 %i5, %t, 12, 7;",
        "shl.b32 %i6, %block, 3;",
        f"mov.u32 %i{INTS - 1}, %tid.x;",
    ]
    setup += [
        f"cvt.rn.f32.s32 %f{i}, %i{i}; mul.rn.f32 %f{i}, %f{i}, 0f{0x3F000000 - 0x1000000 * i:08X};"
        for i in range(FLOATS)
    ]
    setup += [f"mul.wide.s32 %w{i}, %i{i}, %i{i + 1};" for i in range(WIDES)]
    setup += [f"setp.gt.s32 %p{i}, %i{i}, {i};" for i in range(PREDICATES)]
    setup += ["mov.b16 %h0, 0; mov.b16 %h1, 0; mov.u32 %mark, 0;"]
    stores = [f"st.global.u32 [%out+{4 * i}], %i{i};" for i in range(INTS)]
    stores += [f"cvt.u32.u64 %i0, %w{i}; xor.b32 %i1, %i1, %i0;" for i in range(WIDES)]
    stores += [f"selp.b32 %i2, {1 << i}, 0, %p{i}; xor.b32 %i1, %i1, %i2;" for i in range(PREDICATES)]
    stores += ["st.global.u32 [%out+32], %i1; st.global.u32 [%out+36], %mark;"]
    stores += [f"st.global.f32 [%floats+{4 * i}], %f{i};" for i in range(FLOATS)]
    lines = "\n".join([*setup, *program.lines, *stores])
    source = f"""{HEAD}.visible .entry k(.param .u64 p_in, .param .u64 p_out, .param .u64 p_floats)
{{
.shared .align 4 .b8 tile[384];
.reg .b32 %i<{INTS}>, %s<2>, %t, %nt, %block, %g, %lane, %twice, %tile, %slot, %mark;
.reg .f32 %f<{FLOATS}>; .reg .b64 %w<{WIDES}>, %in, %out, %floats, %first, %at;
.reg .pred %p<{PREDICATES}>; .reg .b16 %h<2>;
mov.u32 %t, %tid.x; mov.u32 %nt, %ntid.x; mov.u32 %block, %ctaid.x; mad.lo.u32 %g, %block, %nt, %t;
mov.u32 %lane, %laneid; add.u32 %twice, %t, %t;
ld.param.u64 %first, [p_in]; mov.u64 %in, %first; ld.param.u64 %out, [p_out]; ld.param.u64 %floats, [p_floats];
mad.wide.u32 %in, %g, 16, %in; mad.wide.u32 %out, %g, 40, %out; mad.wide.u32 %floats, %g, {4 * FLOATS}, %floats;
mov.u32 %tile, tile; mad.lo.u32 %slot, %t, 4, %tile;
{lines}
ret;
}}
"""
    return source, block
