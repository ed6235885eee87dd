"""What names stand for while a function is lowered: variables, windows, special registers."""

from __future__ import annotations

from collections.abc import Callable

from ptxtrain.engine.ptxcpu.inline import function_address
from ptxtrain.engine.ptxcpu.lower.context import Context
from ptxtrain.engine.ptxcpu.lower.emitter import LANES, integer, iota, splat
from ptxtrain.engine.ptxcpu.tree import Module
from ptxtrain.engine.ptxcpu.uniformity import Shape


class Names:
    """Fills a context's `symbols` and `specials`.

    Args:
        offsets: byte offsets of variables and parameters by space: param, shared, local, global.
        shared, local: bytes of a block's static shared memory and of a lane's local memory.
    """

    def __init__(
        self, ctx: Context, module: Module, shape: Shape, offsets: dict[str, dict[str, int]], shared: int, local: int
    ) -> None:
        self.ctx, self.module, self.shape = ctx, module, shape
        self.offsets, self.shared, self.local = offsets, shared, local
        self._define_symbols()
        self._define_specials()

    def _define_symbols(self) -> None:
        ctx = self.ctx

        def fixed(space: str, offset: int) -> Callable[[], tuple[str, str]]:
            return lambda: (space, str(offset))

        def in_globals(space: str, offset: int) -> Callable[[], tuple[str, str]]:
            def make() -> tuple[str, str]:
                start = ctx.emit.op("ptrtoint ptr %globals to i64")
                return space, ctx.emit.op(f"add i64 {start}, {offset}")

            return make

        for space, places in self.offsets.items():
            for name, offset in places.items():
                ctx.symbols[name] = in_globals(space, offset) if space == "global" else fixed(space, offset)
        for name in self.module.functions:
            ctx.symbols.setdefault(name, fixed("", function_address(self.module, name)))
        ctx.symbols["%shared"] = lambda: ("", ctx.emit.op("ptrtoint ptr %shared to i64"))
        ctx.symbols["%local"] = lambda: ("", ctx.emit.op("ptrtoint ptr %local to i64"))
        ctx.symbols["%param"] = lambda: ("", ctx.emit.op("ptrtoint ptr %params to i64"))
        ctx.symbols["%shared.bytes"] = lambda: ("", ctx.emit.op("zext i32 %shared.size to i64"))
        ctx.symbols["%local.bytes"] = fixed("", self.local * LANES)

    def _define_specials(self) -> None:
        ctx, shape = self.ctx, self.shape
        emit = ctx.emit

        def scalar(text: str) -> Callable[[], str]:
            return lambda: text

        for axis in "xyz":
            ctx.specials[f"%ctaid.{axis}"] = scalar(f"%ctaid.{axis}")
            ctx.specials[f"%nctaid.{axis}"] = scalar(f"%nctaid.{axis}")
            ctx.specials[f"%ntid.{axis}"] = scalar(str(getattr(shape, axis)))
            ctx.specials[f"%tid.{axis}"] = self._tid(axis)
        ctx.specials["%tid.x.base"] = self._tid_base
        ctx.specials["%laneid"] = scalar(iota("i32", 1))
        ctx.specials["%laneid.base"] = scalar("0")
        ctx.specials["%warpid"] = scalar("%warp")
        ctx.specials["%nwarpid"] = scalar(str(shape.warps))
        ctx.specials["WARP_SZ"] = scalar("32")
        ctx.specials["%total_smem_size"] = scalar("%shared.size")
        ctx.specials["%dynamic_smem_size"] = lambda: emit.op(f"sub i32 %shared.size, {self.shared}")
        self._define_constants()
        for name, bits in (("%clock64", "i64"), ("%globaltimer", "i64"), ("%clock", "i32"), ("%globaltimer_lo", "i32")):
            ctx.specials[name] = self._clock(bits, False)
        for name in ("%clock_hi", "%globaltimer_hi"):
            ctx.specials[name] = self._clock("i32", True)
        masks: dict[str, Callable[[int], int]] = {
            "eq": lambda i: 1 << i,
            "lt": lambda i: (1 << i) - 1,
            "le": lambda i: (2 << i) - 1,
            "gt": lambda i: ~((2 << i) - 1),
            "ge": lambda i: ~((1 << i) - 1),
        }
        for name, mask in masks.items():
            words = ", ".join(f"i32 {integer(mask(i), 32)}" for i in range(LANES))
            ctx.specials[f"%lanemask_{name}"] = scalar(f"<{words}>")

    def _define_constants(self) -> None:
        """What is the same for everybody: one multiprocessor, no clusters, no counters, no environment."""
        ctx = self.ctx
        zeros = ["smid", "gridid", "cluster_ctarank", "current_graph_exec"]
        zeros += [
            f"{name}.w" for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_nctaid")
        ]
        zeros += [f"{name}{i}{more}" for i in range(8) for name, more in (("pm", ""), ("pm", "_64"))]
        zeros += [f"envreg{i}" for i in range(32)] + [f"cluster_ctaid.{axis}" for axis in "xyzw"]
        zeros += [f"reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")]
        values = {**dict.fromkeys(zeros, "0"), "nsmid": "1", "cluster_nctarank": "1", "aggr_smem_size": "%shared.size"}
        for axis in "xyz":
            values |= {f"clusterid.{axis}": f"%ctaid.{axis}", f"nclusterid.{axis}": f"%nctaid.{axis}"}
            values[f"cluster_nctaid.{axis}"] = "1"
        for name, value in values.items():
            ctx.specials[f"%{name}"] = lambda value=value: value  # type: ignore[misc]
        ctx.specials["%is_explicit_cluster"] = lambda: "false"

    def _clock(self, bits: str, upper: bool) -> Callable[[], str]:
        def make() -> str:
            value = self.ctx.emit.call("llvm.readcyclecounter", "i64")
            if upper:
                value = self.ctx.emit.op(f"lshr i64 {value}, 32")
            return value if bits == "i64" else self.ctx.emit.op(f"trunc i64 {value} to i32")

        return make

    def _tid_base(self) -> str:
        """tid.x of the warp's first lane, where it runs on by one from lane to lane."""
        emit, shape = self.ctx.emit, self.shape
        first = emit.op(f"shl i32 %warp, {LANES.bit_length() - 1}")
        return first if shape.y == shape.z == 1 else emit.op(f"urem i32 {first}, {shape.x}")

    def _tid(self, axis: str) -> Callable[[], str]:
        def make() -> str:
            emit, shape = self.ctx.emit, self.shape
            info = shape.special(f"%tid.{axis}")
            first = emit.op(f"shl i32 %warp, {LANES.bit_length() - 1}")
            divisor = {"x": 1, "y": shape.x, "z": shape.x * shape.y}[axis]
            size = getattr(shape, axis)
            if info.const is not None and info.uniform:
                return str(info.const)
            if info.uniform:
                quotient = emit.op(f"udiv i32 {first}, {divisor}")
                return emit.op(f"urem i32 {quotient}, {size}") if axis == "y" else quotient
            if info.affine:
                return self.ctx.spread("i32", self._tid_base(), 1, None)
            linear = self.ctx.spread("i32", first, 1, None)
            t = f"<{LANES} x i32>"
            if divisor != 1:
                linear = emit.op(f"udiv {t} {linear}, {splat('i32', divisor, LANES)}")
            return emit.op(f"urem {t} {linear}, {splat('i32', size, LANES)}")

        return make
