"""The instruction table against NVIDIA's assembler: both take, and both refuse, the same instructions.

Thousands of lines, one instruction each: every opcode with every type, every pair of types of cvt, registers of every
type where another is wanted. `ptxas` reports all lines that it refuses in one run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptxtrain.engine.ptxcpu.parser import parse
from ptxtrain.engine.ptxcpu.tree import PtxError

TYPES = "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 f16x2 bf16x2 b64 u64 s64 f64 pred b128".split()
HELD = {"b8": "b16", "u8": "u16", "s8": "s16", "bf16": "b16", "f16": "b16", "bf16x2": "b32", "f16x2": "b32"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
REGISTERS = "pred b16 u16 s16 f16 b32 u32 s32 f32 b64 u64 s64 f64 b128".split()

# T is each type, D a register of it, W one of twice its size.
OF_EVERY_TYPE = """
add.T D,D,D; add.rn.T D,D,D; add.rz.T D,D,D; add.ftz.T D,D,D; add.sat.T D,D,D; add.cc.T D,D,D; addc.T D,D,D; sub.T D,D,D
subc.T D,D,D; mul.T D,D,D; mul.rn.T D,D,D; mul.lo.T D,D,D; mul.hi.T D,D,D; mul.wide.T W,D,D; mul24.lo.T D,D,D
mad.lo.T D,D,D,D; mad.lo.cc.T D,D,D,D; madc.lo.T D,D,D,D; mad.rn.T D,D,D,D; mad.T D,D,D,D; mad.wide.T W,D,D,W
fma.rn.T D,D,D,D; fma.rn.ftz.T D,D,D,D; fma.rn.relu.T D,D,D,D; fma.rn.sat.T D,D,D,D; div.T D,D,D; div.rn.T D,D,D
div.approx.T D,D,D; div.full.T D,D,D; rem.T D,D,D; min.T D,D,D; max.T D,D,D; min.NaN.T D,D,D; min.xorsign.abs.T D,D,D
abs.T D,D; neg.T D,D; abs.ftz.T D,D; sad.T D,D,D,D; and.T D,D,D; not.T D,D; cnot.T D,D; shl.T D,D,%u32_1
shr.T D,D,%u32_1; shf.l.wrap.T D,D,D,%u32_1; popc.T %u32_1,D; clz.T %u32_1,D; bfind.T %u32_1,D; bfind.shiftamt.T %u32_1,D
brev.T D,D; bfe.T D,D,%u32_1,%u32_2; bfi.T D,D,D,%u32_1,%u32_2; fns.T D,D,D,D; bmsk.clamp.T D,D,D; szext.clamp.T D,D,%u32_1
prmt.T D,D,D,D; lop3.T D,D,D,D,3; selp.T D,D,D,%pred_1; slct.T.s32 D,D,D,%s32_1; slct.T.f32 D,D,D,%f32_1
setp.eq.T %pred_1,D,D; setp.lt.T %pred_1,D,D; setp.lo.T %pred_1,D,D; setp.ltu.T %pred_1,D,D; setp.eq.and.T %pred_1,D,D,!%pred_2
set.eq.u32.T %u32_1,D,D; set.eq.f32.T %f32_1,D,D; set.eq.f16.T %b16_1,D,D; testp.normal.T %pred_1,D; copysign.T D,D,D
rcp.rn.T D,D; rcp.approx.T D,D; rcp.approx.ftz.T D,D; sqrt.rn.T D,D; sqrt.approx.T D,D; rsqrt.approx.T D,D; sin.approx.T D,D
lg2.approx.T D,D; ex2.approx.T D,D; ex2.approx.ftz.T D,D; tanh.approx.T D,D; mov.T D,D; ld.global.T D,[%u64_7]
ld.global.v2.T {D,D},[%u64_7]; st.global.T [%u64_7],D; st.shared.v2.T [%u64_7],{D,D}; atom.global.add.T D,[%u64_7],D
atom.global.add.noftz.T D,[%u64_7],D; atom.global.min.T D,[%u64_7],D; atom.global.and.T D,[%u64_7],D
atom.global.inc.T D,[%u64_7],D; atom.global.exch.T D,[%u64_7],D; atom.global.cas.T D,[%u64_7],D,D; red.global.add.T [%u64_7],D
red.global.min.T [%u64_7],D; red.global.or.T [%u64_7],D; shfl.sync.idx.T D,D,0,31,-1; match.any.sync.T %b32_1,D,-1
redux.sync.add.T D,D,-1; redux.sync.and.T D,D,-1; vote.sync.any.T D,%pred_1,-1; vote.sync.ballot.T D,%pred_1,-1; activemask.T D
cvta.global.T D,D; cvta.to.global.T D,D; bar.red.popc.T D,0,%pred_1; bar.red.and.T D,0,%pred_1; ldu.global.T D,[%u64_7]
nanosleep.T D; add.f32.T %f32_1,D,%f32_1
"""

# D is a register of each type that can be declared.
WITH_EVERY_REGISTER = """
add.u16 D,D,D; add.s32 D,D,D; add.f32 D,D,D; add.f16 D,D,D; add.bf16 D,D,D; add.f16x2 D,D,D; add.u64 D,D,D; add.f64 D,D,D
and.b16 D,D,D; and.b32 D,D,D; and.pred D,D,D; mov.b32 D,D; mov.u32 D,D; mov.f32 D,D; mov.b16 D,D; mov.u16 D,D; mov.b64 D,D
mov.pred D,D; selp.b32 D,D,D,%pred_1; selp.f32 D,D,D,%pred_1; setp.eq.s32 %pred_1,D,D; setp.eq.f32 %pred_1,D,D
setp.eq.b32 %pred_1,D,D; ld.global.b8 D,[%u64_1]; ld.global.u8 D,[%u64_1]; ld.global.b16 D,[%u64_1]; ld.global.s16 D,[%u64_1]
ld.global.b32 D,[%u64_1]; ld.global.u32 D,[%u64_1]; ld.global.f32 D,[%u64_1]; ld.global.b64 D,[%u64_1]; ld.global.f64 D,[%u64_1]
st.global.b8 [%u64_1],D; st.global.u8 [%u64_1],D; st.global.b16 [%u64_1],D; st.global.s16 [%u64_1],D; st.global.b32 [%u64_1],D
st.global.u32 [%u64_1],D; st.global.f32 [%u64_1],D; st.global.f64 [%u64_1],D; st.global.b64 [%u64_1],D; cvt.s32.s32 D,%s32_1
cvt.u8.s32 D,%s32_1; cvt.s16.s32 D,%s32_1; cvt.rn.f32.s32 D,%s32_1; cvt.rn.f16.f32 D,%f32_1; cvt.rn.bf16.f32 D,%f32_1
cvt.rn.bf16x2.f32 D,%f32_1,%f32_2; cvt.rna.tf32.f32 D,%f32_1; cvt.s32.u8 %s32_1,D; cvt.s32.s16 %s32_1,D
cvt.rzi.s32.f32 %s32_1,D; cvt.f32.f16 %f32_1,D; cvt.f32.bf16 %f32_1,D; shl.b32 D,D,%u32_1; shl.b32 %u32_1,%u32_2,D
shr.s32 D,D,3; popc.b32 D,%b32_1; popc.b64 %u32_1,D; mul.wide.u32 D,%u32_1,%u32_2; mad.wide.s32 %s64_1,%s32_1,%s32_2,D
bar.sync D; shfl.sync.idx.b32 %b32_1,%b32_2,D,31,-1; mov.b32 {D,D},%b32_1; mov.b64 %b64_1,{D,D}; prmt.b32 %b32_1,D,D,D
selp.b32 %b32_1,1,0,D; atom.global.add.u32 D,[%u64_1],1; cp.async.ca.shared.global [%u32_1],[%u64_1],16,D
"""

SINGLE = """
add.f32 %f32_1,%f32_2,1; add.f32 %f32_1,%f32_2,1.0; add.f64 %f64_1,%f64_2,0f3F800000; add.s32 %s32_1,%s32_2,1.0
add.f16 %f16_1,%f16_2,1.0; add.f16 %b16_1,%b16_2,0x3c00; add.f16x2 %b32_1,%b32_2,0x3c003c00; mov.b32 %b32_1,0f3F800000
mov.b32 %b32_1,1.0; mov.u32 %b32_1,0f3F800000; mov.f32 %f32_1,1; mov.b16 %f16_1,0x3c00; mov.b64 %b64_1,1.0; mov.pred %pred_1,1
setp.eq.f32 %pred_1,%f32_1,1; selp.b32 %b32_1,1,0,!%pred_1; st.global.f32 [%u64_1],5; st.global.b32 [%u64_1],0f3F800000
st.shared.u32 [sm],%tid.x; st.shared.u32 [sm],sm; mov.u32 %u32_1,sm; mov.b32 %b32_1,sm+4; mov.u64 %u64_1,k; mov.b64 %u64_1,Q
add.u32 %u32_1,%tid.x,1; add.u64 %u64_1,sm,1; mov.u64 %u64_1,%tid.x; mov.u16 %u16_1,%tid.x; mov.u32 %u32_1,%clock64
mov.u64 %u64_1,%globaltimer; cvt.u64.u32 %u64_1,%tid.x; mov.f32 %f32_1,%tid.x; and.pred %pred_1,%pred_2,!%pred_3
not.pred %pred_1,!%pred_2; setp.eq.and.s32 _|%pred_2,%s32_1,1,!%pred_3; setp.eq.and.s32 %pred_1,%s32_1,1
setp.eq.s32 %pred_1,%s32_1,1,%pred_2; ret.uni; bar.sync 0; bar.sync %u32_1,64; bar.sync; barrier.sync.aligned 1,64
bar.red.popc.u32 %u32_1,0,32,!%pred_1; bar.arrive 0,64; bar.warp.sync %u32_1; ld.global.u32 _,[%u64_1]
ld.global.v2.u32 {_,%u32_1},[%u64_1]; ld.global.v4.u32 {%u32_1,%u32_1},[%u64_1]; ld.global.v2.u32 %u32_1,[%u64_1]
mov.b32 %b32_1,{%b16_1,%b16_2,%b16_2}; mov.b64 {%b16_1,%b16_2,%b16_3,%b16_4},%b64_1; mov.b64 %b64_1,{%b32_1,5}
mov.u64 %b64_1,{%b32_1,%b32_2}; mov.b32 {%b16_1,_},%b32_1; mov.v2.u32 {%u32_1,%u32_2},{%u32_1,%u32_2}
mov.b32 {%b16_1,%b16_2},{%b16_1,%b16_2}; lop3.b32 %b32_1,%b32_1,%b32_2,%b32_3,%b32_4; shf.l.b32 %b32_1,%b32_2,%b32_3,%b32_4
lop3.or.b32 %b32_1|%pred_1,%b32_1,%b32_2,%b32_3,0xff,%pred_2; atom.global.add.u32 _,[%u64_1],1; cvta.global.u64 %u64_1,gm
atom.global.add.v2.f32 {%f32_1,%f32_2},[%u64_1],{%f32_1,%f32_2}; cvta.u64 %u64_1,%u64_2; elect.sync _|%pred_1,-1
match.all.sync.b64 %b32_1|%pred_1,%u64_1,-1; shfl.sync.idx.b32 %f32_1|%pred_1,%f32_2,%u32_1,%u32_2,%u32_3
isspacep.global %pred_1,%u64_1; dp4a.s32.u32 %s32_1,%b32_1,%b32_2,%s32_3; membar.gl; prefetch.global.L1 [%u64_1]
cp.async.cg.shared.global [%u32_1],[%u64_1],8; cp.async.cg.shared.global.L2::128B [sm+16],[%u64_1+8],16; cp.async.wait_all
cp.async.wait_group %u32_1; cp.async.wait_group 0; ldmatrix.sync.aligned.m8n8.x1.shared.b16 %b32_1,[%u32_1]
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%b32_1,%b32_2,%b32_3,%b32_4},[%u32_1]; ld.shared.u32 %u32_1,[gm]
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%b32_1,%b32_2},[%u32_1]; ld.const.u32 %u32_1,[cm+4]; ld.u32 %u32_1,[gm]
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%b32_1,%b32_2},{%b32_1,%b32_2,%b32_3,%b32_4},{%b32_5,%b32_6},{%b32_1,%b32_2}
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 FOUR,{%b32_1,%b32_2,%b32_3,%b32_4},{%b32_5,%b32_6},FOUR
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 FOUR,{%b32_1,%b32_2},{%b32_5,%b32_6},FOUR
ld.global %u32_1,[%u64_1]; ld.relaxed.gpu.global.u32 %u32_1,[%u64_1]; ld.global.u32 %u32_1,[%f32_1]
fma.f32 %f32_1,%f32_2,%f32_3,%f32_4
fma.rn.f32 %f32_1,%f32_2,%f32_3; add.f32.rn %f32_1,%f32_2,%f32_3; mov.s32 %s32_1,(1<<3)|4; mov.u32 %u32_1,1 ? 2 : 3
"""

# Where we are stricter, or leave it to the chip: why.
KNOWN = (
    r"fma\.rm\.bf16",  # the ISA has .rn alone
    r"set\.eq\.(f16|bf16)\.",  # ptxas takes f16 here and there; the ISA's list is longer
    r"redux.*f32",  # of later chips
    r"shfl\.sync\.idx\.b32 %b32_1,%b32_2,%f32",  # a lane's number in a float register is a slip
)


def instructions() -> Iterator[str]:
    for pattern in re.split(r"[;\n]\s*", OF_EVERY_TYPE.strip()):
        for type in TYPES:
            numbers = iter(range(1, 9))
            text = re.sub(r"\bD\b", lambda _, t=type, n=numbers: f"%{HELD.get(t, t)}_{next(n)}", pattern)  # type: ignore[misc]
            yield re.sub(r"\bW\b", f"%{WIDER.get(type, type)}_0", text.replace(".T", f".{type}"))
    for pattern in re.split(r"[;\n]\s*", WITH_EVERY_REGISTER.strip()):
        for register in REGISTERS:
            numbers = iter(range(1, 9))
            yield re.sub(r"\bD\b", lambda _, r=register, n=numbers: f"%{r}_{next(n)}", pattern)  # type: ignore[misc]
    for to in TYPES[1:]:
        for of in TYPES[1:]:
            if "x2" not in to + of and "pred" not in (to, of) and "b" not in (to[0] + of[0]).replace("bf", ""):
                for how in ("", ".rn", ".rz", ".rni", ".rzi", ".sat", ".ftz", ".rn.sat", ".rzi.sat"):
                    yield f"cvt{how}.{to}.{of} %{HELD.get(to, to)}_1,%{HELD.get(of, of)}_2"


def file(lines: list[str]) -> str:
    declared = " ".join(f".reg .{type} %{type}_<9>;" for type in REGISTERS)
    head = (
        ".version 8.8\n.target sm_90a\n.address_size 64\n.global .align 16 .b8 gm[64]; .const .align 16 .b8 cm[64];\n"
        f".entry k(.param .u64 P, .param .align 16 .b8 Q[64]) {{ {declared} .shared .align 16 .b8 sm[64];\n"
    )
    return head + "".join(f"{line};\n" for line in lines) + "ret; }\n"


def ptxas(lines: list[str], folder: Path) -> dict[int, str]:
    """The lines that NVIDIA's assembler refuses, and why."""
    import nvidia.cuda_nvcc

    binary = Path(next(iter(nvidia.cuda_nvcc.__path__))) / "bin" / "ptxas"
    (folder / "all.ptx").write_text(file(lines))
    command = [binary, "-arch", "sm_90a", folder / "all.ptx", "-o", folder / "all.cubin"]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return {int(line) - 6: message for line, message in re.findall(r"line (\d+); (?:error|fatal)\s*: (.*)", out.stderr)}


def compare(lines: list[str], theirs: dict[int, str]) -> list[str]:
    differences = []
    for index, line in enumerate(lines):
        if any(re.match(pattern, line) for pattern in KNOWN):
            continue
        try:
            parse(file([line]), Path("one.ptx"))
        except PtxError as error:
            if index not in theirs:
                differences.append(f"we refuse {line}: {error}")
        else:
            if index in theirs:
                differences.append(f"ptxas refuses {line}: {theirs[index]}")
    return differences


def test_the_same_instructions_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.cuda_nvcc")
    lines = list(instructions())
    theirs = ptxas(lines, tmp_path)
    assert 1000 < len(theirs) < len(lines) - 1000
    assert not any("syntax" in message for message in theirs.values()), "a syntax error hides all that follows"
    differences = compare(lines, theirs)
    assert not differences, "\n".join(differences[:20])


def test_forms_one_by_one(tmp_path: Path) -> None:
    """What ptxas may report alone only, because the error ends its run."""
    pytest.importorskip("nvidia.cuda_nvcc")
    four = "{%f32_1,%f32_2,%f32_3,%f32_4}"
    lines = re.split(r"[;\n]\s*", SINGLE.strip().replace("FOUR", four))
    theirs = {i: message for i, line in enumerate(lines) for message in ptxas([line], tmp_path).values()}
    differences = compare(lines, theirs)
    assert not differences, "\n".join(differences)
