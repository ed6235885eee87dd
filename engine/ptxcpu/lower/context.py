"""What every family of instructions works with: registers as LLVM values, masks, and the affine forms of addresses.

A register is kept as an integer of its width: a scalar where the analysis found it uniform, a scalar base where it is
affine in the lane (with a vector `correction` where the form is loose, zero unless a 32-bit sum wrapped), a vector of 32
otherwise. `lanes` in the methods is 1 or 32: the shape in which an instruction computes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxtrain.engine.ptxcpu.forms import SPECIALS_OF_64_BITS
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, Emitter, integer, iota, splat, vec
from ptxtrain.engine.ptxcpu.lower.fragments import Placement, read_register, register_function, write_register
from ptxtrain.engine.ptxcpu.lower.runner import FIELDS
from ptxtrain.engine.ptxcpu.traps import status_of
from ptxtrain.engine.ptxcpu.tree import (
    TYPE_BITS,
    Guard,
    Imm,
    Instruction,
    Module,
    Negated,
    Operand,
    PtxError,
    Reg,
    Sink,
    Special,
    Symbol,
)
from ptxtrain.engine.ptxcpu.uniformity import Analysis, Info, Shape

if TYPE_CHECKING:
    from ptxtrain.engine.ptxcpu.lower.checks import Checks
    from ptxtrain.engine.ptxcpu.lower.steps import Kept
    from ptxtrain.engine.ptxcpu.lower.tiles import Queue
    from ptxtrain.engine.ptxcpu.roots import Root

# Opcodes whose results are not formulas of bits.
ARITHMETIC = frozenset("add sub mul mad fma div sqrt ld shfl mma ldmatrix".split())
ALL_LANES = splat("i1", "true", LANES)
FLOATS = {"f16": "half", "f32": "float", "f64": "double"}


def llvm_type(ptx_type: str) -> str:
    """The LLVM scalar of a PTX type; 16-bit brain floats are kept as integers."""
    if ptx_type == "pred":
        return "i1"
    return FLOATS.get(ptx_type, f"i{TYPE_BITS[ptx_type]}")


def float_literal(bits: int, width: int) -> str:
    """The IR text of a float with these bits, as a hexadecimal constant."""
    if width == 64:
        return f"0x{bits:016X}"
    if width == 16:
        return f"0xH{bits:04X}"
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF and fraction:
        # The text holds a double; a NaN's payload moves up with its sign.
        wide = (bits >> 31 << 63) | 0x7FF << 52 | fraction << 29
        return f"0x{wide:016X}"
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass(slots=True)
class Storage:
    """Where a register lives: `slot` holds the value or the affine base, `correction` a loose form's vector.

    With a `layout` it is register `index` of the matrix tile at `slot` (see `fragments`).
    """

    slot: str
    correction: str | None = None
    layout: str | None = None
    index: int = 0


class Context:
    """The state of lowering one function."""

    def __init__(self, module: Module, analysis: Analysis, shape: Shape) -> None:
        self.module, self.analysis, self.shape = module, analysis, shape
        self.emit = Emitter()
        self.storage: dict[str, Storage] = {}
        self.specials: dict[str, Callable[[], str]] = {}
        self.symbols: dict[str, Callable[[], tuple[str, str]]] = {}  # name -> (space, i64 address or offset)
        self.live: str | None = None  # the slot of the live mask, None while every lane of every warp is live
        self.masked = False  # inside a region
        self.guard_mask: str | None = None  # the lanes that a varying guard lets through
        self.straight: str | None = None  # the slot of the flag that no loose form has needed its correction
        self.is_alone = False  # the block is one warp, whose barriers have nobody to wait for
        self.has_barrier = False  # some instruction suspends the warp
        self.has_reduction = False  # bar.red
        self.spins = False  # some loop waits for others and lets them run
        self.alive: Callable[[], str | None] = lambda: None  # the lanes that have not left, as an i32 (None: all)
        self.helpers: dict[str, str] = {}  # definitions of functions that the kernel calls
        self.fragments: dict[str, Placement] = {}  # registers of matrix operands
        self.products = "fma"  # how products of brain floats are done: see `jit.bf16_products`
        self.written: dict[str, int] = {}  # how often a register has been written so far, in the order of lowering
        self.arrays: dict[
            tuple[str, str, int, int], str
        ] = {}  # address arrays already in memory: see `memory.lane_array`
        self.fragment_slots: dict[int, str] = {}  # their memory, and how many registers each has
        self.fragment_sizes: dict[int, int] = {}
        self.alive_fragments: Callable[[], frozenset[int]] = frozenset  # that are read before they are written
        self.queue: Queue
        self.partner: dict[int, Instruction] = {}  # id of a product -> the one that is done with it
        self.done_before: set[int] = set()  # ids of products that were done with their partner
        self.roots: dict[str, Root] = {}  # registers that are kept as a root and a scalar: see `steps`
        self.kept: dict[int, Kept] = {}  # roots by the id of their instruction
        self.moved: dict[str, str] = {}  # the slots of the scalars
        self.opcode = ""  # of the instruction that is being lowered
        self.uses_zero = False  # whether `_blended` needs its zero
        self.uses_tiles = False  # whether the kernel needs matrix tiles set up
        self.local_bytes = 0  # of one lane's local memory
        self.checks: Checks | None = None  # the checked mode's

    # Errors

    def refuse(self, ins: Instruction, why: str) -> PtxError:
        """The error for what this compiler does not know."""
        return PtxError(why, self.module.path, ins.span, ins.text)

    def fail(self, message: str) -> None:
        """End the warp here, and the launch with a message; `module` must know the message when it loads cached code."""
        emit = self.emit
        status = emit.op(f"getelementptr i8, ptr %cta, i64 {FIELDS['status']}")
        emit.do(f"store i32 {status_of(message)}, ptr {status}")
        emit.jump("finish")

    # Masks

    def lane_mask(self) -> str | None:
        """The lanes that the current instruction acts on, as `<32 x i1>`; None: all."""
        if self.guard_mask is not None:
            return self.guard_mask
        return self.live_mask()

    def live_mask(self) -> str | None:
        """The lanes that are here; None: all, known when compiling."""
        return None if self.live is None else self.emit.op(f"load <32 x i1>, ptr {self.live}")

    def mask_value(self) -> str:
        """`lane_mask` as an operand, a constant where it is full."""
        return self.lane_mask() or ALL_LANES

    def mask_bits(self, mask: str) -> str:
        """A mask as an i32 with lane l at bit l."""
        return self.emit.op(f"bitcast <32 x i1> {mask} to i32")

    def negated(self, mask: str, lanes: int = LANES) -> str:
        return self.emit.op(f"xor {vec('i1', lanes)} {mask}, {splat('i1', 'true', lanes)}")

    def predicate(self, guard: Guard, lanes: int) -> str:
        """A guard's predicate, its negation applied."""
        value = self.get(guard.reg, "i1", lanes)
        return self.negated(value, lanes) if guard.negated else value

    # Registers

    def store_of(self, reg: Reg) -> Storage:
        found = self.storage.get(reg.name)
        if found is None:
            info = self.analysis.of(reg)
            scalar = f"i{TYPE_BITS[reg.type]}"
            if info.stride is None:
                found = Storage(self.emit.alloca(vec(scalar, LANES), "r"))
            else:
                correction = self.emit.alloca(vec(scalar, LANES), "c") if info.affine and info.loose else None
                found = Storage(self.emit.alloca(scalar, "s"), correction)
            # A register that nothing has written reads as zero; LLVM would take any branch on an undefined value.
            of_slot = vec(scalar, LANES) if info.stride is None else scalar
            self.emit.allocas.append(f"  store {of_slot} zeroinitializer, ptr {found.slot}")
            if found.correction is not None:
                self.emit.allocas.append(f"  store {vec(scalar, LANES)} zeroinitializer, ptr {found.correction}")
            self.storage[reg.name] = found
        return found

    def lanes_of(self, *operands: Operand) -> int:
        """1 where all operands are uniform, else 32."""
        return 1 if all(self.analysis.of(o).uniform for o in operands) else LANES

    def get(self, operand: Operand, type_: str, lanes: int) -> str:
        """An operand as `lanes` values of an LLVM scalar type; a wider register gives its low bits."""
        emit = self.emit
        match operand:
            case Imm():
                return self._immediate(operand, type_, lanes)
            case Negated(reg):
                return self.negated(self.get(reg, "i1", lanes), lanes)
            case Reg():
                width = TYPE_BITS[operand.type]
                value = self._read(operand, lanes)
            case Special(name):
                value, width = self._special(name, lanes)
            case Symbol(name, offset):
                width = 64
                value = self.symbol_address(name, offset)
                if lanes != 1:
                    value = emit.broadcast("i64", value)
            case _:
                raise AssertionError(f"not a value: {operand}")
        return self.convert(value, width, type_, lanes)

    def convert(self, value: str, width: int, type_: str, lanes: int) -> str:
        """Integer bits of `width` as `type_`: cut, zero-extended, or seen as a float."""
        emit = self.emit
        bits = _bits(type_)
        if width > bits:
            value = emit.op(f"trunc {vec(f'i{width}', lanes)} {value} to {vec(f'i{bits}', lanes)}")
        elif width < bits:
            value = emit.op(f"zext {vec(f'i{width}', lanes)} {value} to {vec(f'i{bits}', lanes)}")
        if type_.startswith("i"):
            return value
        return emit.op(f"bitcast {vec(f'i{bits}', lanes)} {value} to {vec(type_, lanes)}")

    def _immediate(self, imm: Imm, type_: str, lanes: int) -> str:
        if type_.startswith("i"):
            bits = int(type_[1:])
            if bits == 1:
                return splat("i1", "true" if imm.value & 1 else "false", lanes)
            return splat(type_, integer(imm.value, bits), lanes)
        bits = imm.value
        if imm.kind == "f64" and type_ == "float":
            (number,) = struct.unpack("<d", struct.pack("<Q", bits))
            bits = struct.unpack("<I", struct.pack("<f", number))[0]
        elif imm.kind == "f32" and type_ == "double":
            (number,) = struct.unpack("<f", struct.pack("<I", bits))
            bits = struct.unpack("<Q", struct.pack("<d", number))[0]
        elif imm.kind == "int":
            bits &= (1 << _bits(type_)) - 1
        return splat(type_, float_literal(bits, _bits(type_)), lanes)

    def _read(self, reg: Reg, lanes: int) -> str:
        emit = self.emit
        info, store = self.analysis.of(reg), self.store_of(reg)
        scalar = f"i{TYPE_BITS[reg.type]}"
        if info.stride is None:
            assert lanes == LANES, f"{reg.name} is varying"
            return self._load_lanes(store, scalar)
        base = emit.op(f"load {scalar}, ptr {store.slot}")
        if info.uniform:
            return base if lanes == 1 else emit.broadcast(scalar, base)
        assert lanes == LANES, f"{reg.name} is affine"
        return self.spread(scalar, base, info.stride, self.correction(reg))

    def _load_lanes(self, store: Storage, scalar: str) -> str:
        """The vector of a varying register."""
        if store.layout is not None:
            return read_register(self.emit, store.slot, store.layout, store.index)
        return self.emit.op(f"load {vec(scalar, LANES)}, ptr {store.slot}")

    def spread(self, scalar: str, base: str, stride: int, correction: str | None) -> str:
        """The vector `base + stride * lane + correction`."""
        emit = self.emit
        t = vec(scalar, LANES)
        value = emit.op(f"add {t} {emit.broadcast(scalar, base)}, {iota(scalar, stride)}")
        return emit.op(f"add {t} {value}, {correction}") if correction else value

    def correction(self, reg: Reg) -> str | None:
        """A loose affine register's correction."""
        slot = self.store_of(reg).correction
        return self.emit.op(f"load {vec(f'i{TYPE_BITS[reg.type]}', LANES)}, ptr {slot}") if slot else None

    def base(self, operand: Operand, type_: str) -> str:
        """The base of an affine operand, or the value of a uniform one."""
        if isinstance(operand, Reg) and self.analysis.of(operand).affine:
            width = TYPE_BITS[operand.type]
            value = self.emit.op(f"load i{width}, ptr {self.store_of(operand).slot}")
            return self.convert(value, width, type_, 1)
        if isinstance(operand, Special) and self.analysis.of(operand).affine:
            return self.convert(self.specials[operand.name + ".base"](), 32, type_, 1)
        return self.get(operand, type_, 1)

    def set(self, target: Reg | Sink, value: str, type_: str, lanes: int) -> None:
        """Write a result: as wide as the register, in every lane if it is a scalar, and only in the lanes that act."""
        if isinstance(target, Sink):
            return
        emit = self.emit
        info, store = self.analysis.of(target), self.store_of(target)
        self.note_write(target)
        bits, width = _bits(type_), TYPE_BITS[target.type]
        if not type_.startswith("i"):
            value = emit.op(f"bitcast {vec(type_, lanes)} {value} to {vec(f'i{bits}', lanes)}")
        value = self.convert(value, bits, f"i{width}", lanes)
        scalar = f"i{width}"
        if info.stride is not None:
            assert lanes == 1, f"{target.name} is uniform"
            emit.do(f"store {scalar} {value}, ptr {store.slot}")
            return
        t = vec(scalar, LANES)
        if lanes == 1:
            value = emit.broadcast(scalar, value)
        if (self.masked or self.guard_mask is not None) and self.analysis.needs_blend(target):
            mask = self.lane_mask()
            if mask is not None:
                value = self._blended(scalar, mask, value, self._load_lanes(store, scalar))
        if store.layout is not None and store.layout[0] != "A":
            name, text = register_function(store.layout, store.index, write=True)
            self.helpers.setdefault(name, text)
            emit.do(f"call void @{name}(ptr {store.slot}, <32 x i32> {value})")
        elif store.layout is not None:
            write_register(emit, store.slot, store.layout, store.index, value)
        else:
            emit.do(f"store {t} {value}, ptr {store.slot}")

    def _blended(self, scalar: str, mask: str, value: str, old: str) -> str:
        """`value` in the lanes of `mask`, `old` in the others.

        LLVM 22 merges a choice between a formula of bits and one of its own operands into one masked `vpternlog`, and with
        one operand in memory gives it a wrong truth table. So where `value` may be such a formula, zero is added to `old`: a
        zero from memory, of which LLVM knows nothing.
        """
        emit = self.emit
        if self.opcode not in ARITHMETIC and scalar in ("i32", "i64"):
            self.uses_zero = True
            zero = "%opaque.zero" if scalar == "i64" else emit.op("trunc i64 %opaque.zero to i32")
            old = emit.op(f"add {vec(scalar, LANES)} {old}, {emit.broadcast(scalar, zero)}")
        return emit.select(scalar, LANES, mask, value, old)

    def note_write(self, target: Reg) -> None:
        """What was kept of a register's value elsewhere no longer holds."""
        self.written[target.name] = self.written.get(target.name, 0) + 1

    def set_affine(self, target: Reg, base: str, correction: str | None) -> None:
        """Write an affine register."""
        self.note_write(target)
        scalar = f"i{TYPE_BITS[target.type]}"
        store = self.store_of(target)
        self.emit.do(f"store {scalar} {base}, ptr {store.slot}")
        if store.correction:
            self.emit.do(f"store {vec(scalar, LANES)} {correction or 'zeroinitializer'}, ptr {store.correction}")

    def _special(self, name: str, lanes: int) -> tuple[str, int]:
        maker = self.specials.get(name)
        if maker is None:
            raise KeyError(name)
        value = maker()
        width = 64 if name in SPECIALS_OF_64_BITS else 1 if name == "%is_explicit_cluster" else 32
        if self.analysis.of(Special(name)).uniform and lanes != 1:
            value = self.emit.broadcast(f"i{width}", value)
        return value, width

    def symbol_address(self, name: str, offset: int) -> str:
        """A variable's address in its own window, as an i64."""
        _, value = self.symbols[name]()
        return self.emit.op(f"add i64 {value}, {offset}") if offset else value

    # Affine forms

    def info(self, operand: Operand) -> Info:
        return self.analysis.of(operand)

    def note_wrap(self, in_range: str) -> None:
        """Record that a loose form needs its correction unless `in_range`."""
        emit = self.emit
        if self.straight is None:
            self.straight = emit.alloca("i1", "straight")
        old = emit.op(f"load i1, ptr {self.straight}")
        both = emit.op(f"and i1 {old}, {in_range}")
        emit.do(f"store i1 {both}, ptr {self.straight}")


def _bits(type_: str) -> int:
    return {"half": 16, "float": 32, "double": 64}.get(type_) or int(type_[1:])
