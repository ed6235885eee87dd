"""Specs: the numbers that a kernel's text is made from. Each derived number is a property here, with a test, never in a template.

A Spec is frozen, so that it names a rendered text: the same stem and Spec give the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ptxtrain.ptx.attention_spec import AttentionSpec, DkvSpec, DqSpec, ForwardSpec
from ptxtrain.ptx.decode_spec import AppendSpec, DecodeSpec
from ptxtrain.ptx.gemm_spec import GemmSpec
from ptxtrain.ptx.gemv_spec import GemvSpec
from ptxtrain.ptx.kit_spec import ITEM_SIZES, AdamSpec, LossSpec, TypedPartSpec, TypedRowSpec
from ptxtrain.ptx.matmul_spec import MatmulSpec

Dim3: TypeAlias = tuple[int, int, int]

LANES = 32  # threads of a warp
LOG2_E = 1.4426950408889634  # exp(x) = 2^(x * LOG2_E), and ex2 is the exponential that the hardware has
LN_2 = 0.6931471805599453  # ln(x) = log2(x) * LN_2

# Numbers that change every step, by their index in one f32 buffer.
LR, BIAS1, BIAS2, GRAD_SCALE, CLIP, GRAD_NORM, LOSS, SCALARS = 0, 1, 2, 3, 4, 5, 6, 8


def ceil_div(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def float_bits(value: float) -> str:
    """A number as PTX writes it without loss, rounded once to f32: `float_bits(1.0)` is `"0f3F800000"`."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One warp to a row: lane l takes columns l, l + 32, … so that a warp's accesses lie side by side."""

    warps: int = 4

    @property
    def block(self) -> Dim3:
        return (LANES, self.warps, 1)

    def grid(self, rows: int) -> Dim3:
        return (ceil_div(rows, self.warps), 1, 1)


@dataclass(frozen=True, slots=True)
class StreamSpec(RowSpec):
    """`stream`: the forward kernel's results go past the caches (st.cs), where no cache would hold them until they are read."""

    stream: bool = False

    @property
    def cache(self) -> str:
        """The cache operator of the output's stores."""
        return ".cs" if self.stream else ""


@dataclass(frozen=True, slots=True)
class NormSpec(StreamSpec):
    """`unroll` loads of each array are in flight before a lane adds them, in order.

    `dtype`, for the kit: what x, weight and out are. Without it x and weight are f32, and a flag tells what out is.
    """

    unroll: int = 4
    dtype: str = ""

    @property
    def source(self) -> str:
        """The dtype of x and weight."""
        return self.dtype or "f32"

    @property
    def item(self) -> int:
        """Bytes of a number of them."""
        return ITEM_SIZES[self.source]


@dataclass(frozen=True, slots=True)
class RopeSpec(RowSpec):
    """`half`: the dtype of two bytes, bf16 or f16, that the kernel's flag stands for."""

    half: str = "bf16"


@dataclass(frozen=True, slots=True)
class CopySpec(RowSpec):
    """A lane takes `vector` neighbouring columns; 4 of f32 are one access of 16 bytes."""

    vector: int = 1


@dataclass(frozen=True, slots=True)
class ActivationSpec(StreamSpec):
    """`wide`, for bf16 and f16: a lane takes chunks of 8 columns, 16 bytes, instead of single columns.

    `half`: the dtype of two bytes that the kernel's flag stands for.
    """

    wide: bool = False
    half: str = "bf16"

    @property
    def elements(self) -> int:
        """Of a lane at a time."""
        return 8 if self.wide else 1


@dataclass(frozen=True, slots=True)
class ElementSpec:
    """One thread to `vector` neighbouring elements of a flat buffer; 4 of f32 are one access of 16 bytes."""

    threads: int = 256
    vector: int = 1

    @property
    def block(self) -> Dim3:
        return (self.threads, 1, 1)

    @property
    def pairs(self) -> int:
        """Registers of two bf16 that the elements fill; for a single one it is not used."""
        return max(1, self.vector // 2)

    def grid(self, count: int) -> Dim3:
        return (ceil_div(count, self.threads * self.vector), 1, 1)


@dataclass(frozen=True, slots=True)
class NormBackwardSpec:
    """One block to a part: `part_rows` rows of one sequence (fewer at its end), whose weight gradients are summed in order.

    Parts never cross a sequence and their size depends on nothing but T, so the sums do not depend on the micro-batch.
    """

    part_rows: int = 32
    warps: int = 8
    unroll: int = 4  # loads of each array in flight before they are added, in order
    dtype: str = ""  # as NormSpec's: of x, weight, dout and dx; without it dx is f32 and may be added to

    @property
    def source(self) -> str:
        return self.dtype or "f32"

    @property
    def item(self) -> int:
        return ITEM_SIZES[self.source]

    @property
    def block(self) -> Dim3:
        return (LANES, self.warps, 1)

    def parts_per_sequence(self, context: int) -> int:
        return ceil_div(context, self.part_rows)

    def part(self, index: int, context: int) -> tuple[int, int]:
        """The rows [first, last) of a part."""
        sequence, within = divmod(index, self.parts_per_sequence(context))
        first = sequence * context + within * self.part_rows
        return first, min(first + self.part_rows, (sequence + 1) * context)


@dataclass(frozen=True, slots=True)
class PartsSpec:
    """One thread to `vector` neighbouring elements, whose parts it adds in order; `unroll` loads are in flight before that.

    `fresh`: the sum starts at 0, not at what the output holds.
    """

    vector: int = 1
    fresh: bool = False
    threads: int = 64
    unroll: int = 16

    @property
    def block(self) -> Dim3:
        return (self.threads, 1, 1)

    def grid(self, count: int) -> Dim3:
        return (ceil_div(count, self.threads * self.vector), 1, 1)


@dataclass(frozen=True, slots=True)
class NormPartSpec:
    """One warp to a part of `steps` x 32 elements of the flat gradient."""

    steps: int = 64
    warps: int = 4

    @property
    def elements(self) -> int:
        return self.steps * LANES

    @property
    def block(self) -> Dim3:
        return (LANES, self.warps, 1)

    def parts(self, count: int) -> int:
        return ceil_div(count, self.elements)

    def grid(self, count: int) -> Dim3:
        return (ceil_div(self.parts(count), self.warps), 1, 1)


@dataclass(frozen=True, slots=True)
class DigestSpec:
    """One warp to a part of a flat buffer, whose elements are mixed with their place and added mod 2^32.

    At most `most_parts` parts, so that the last sum is short; integer sums do not depend on how they are cut. The properties
    are the digest's definition: `engine.digest` computes with the same ones.
    """

    warps: int = 4
    unroll: int = 8  # loads in flight
    least: int = 2048  # elements of a part
    most_parts: int = 1024

    @property
    def golden(self) -> int:
        """2^32 divided by the golden ratio, odd: spreads an element's place over 32 bits."""
        return 0x9E3779B9

    @property
    def salt(self) -> int:
        """What tells the buffers apart."""
        return 0x85EBCA77

    @property
    def mix(self) -> tuple[tuple[int, int], ...]:
        """x ^= x >> shift, x *= factor, in turn; then x ^= x >> last. Odd factors: a permutation of 32 bits."""
        return ((16, 0x7FEB352D), (15, 0x846CA68B))

    @property
    def last(self) -> int:
        return 16

    @property
    def mix_3(self) -> tuple[int, int]:
        """x *= factor, x ^= x >> shift makes the second half of the first."""
        return (0x31848BAB, 14)

    @property
    def group(self) -> int:
        """Elements that a warp has in flight."""
        return LANES * self.unroll

    @property
    def block(self) -> Dim3:
        return (LANES, self.warps, 1)

    @property
    def finish_block(self) -> Dim3:
        return (LANES, 1, 1)

    def part(self, count: int) -> int:
        """Elements of a part, whole groups."""
        return self.group * ceil_div(max(self.least, ceil_div(count, self.most_parts)), self.group)

    def parts(self, count: int) -> int:
        return ceil_div(count, self.part(count))

    def pairs(self, count: int) -> int:
        """Partial sums of the three buffers."""
        return 3 * self.parts(count)

    def grid(self, count: int) -> Dim3:
        return (ceil_div(self.parts(count), self.warps), 3, 1)

    @staticmethod
    def hex(value: int) -> str:
        """A number mod 2^32 as PTX writes it."""
        return f"0x{value & 0xFFFFFFFF:08X}"


@dataclass(frozen=True, slots=True)
class CrossEntropySpec:
    """One block to a row of logits; `on_chip`: the row stays in shared memory between sum and gradient."""

    threads: int = 256
    on_chip: bool = True
    chunk: int = 8  # logits of a 16-byte access

    @property
    def block(self) -> Dim3:
        return (self.threads, 1, 1)

    @property
    def warps(self) -> int:
        return self.threads // LANES

    @property
    def chunk_shift(self) -> int:
        return self.chunk.bit_length() - 1

    def shared_bytes(self, vocab: int) -> int:
        """Dynamic."""
        return 2 * vocab if self.on_chip else 0


@dataclass(frozen=True, slots=True)
class OneBlockSpec:
    """One block for the whole sum: what a fixed order over everything costs."""

    warps: int = 1

    @property
    def block(self) -> Dim3:
        return (LANES, self.warps, 1)

    @property
    def shared_bytes(self) -> int:
        """One f32 for each warp."""
        return 4 * self.warps


Spec: TypeAlias = (
    RowSpec
    | NormSpec
    | CopySpec
    | RopeSpec
    | ActivationSpec
    | ElementSpec
    | NormBackwardSpec
    | PartsSpec
    | NormPartSpec
    | DigestSpec
    | OneBlockSpec
    | CrossEntropySpec
    | MatmulSpec
    | GemmSpec
    | AttentionSpec
    | GemvSpec
    | DecodeSpec
    | AppendSpec
    | AdamSpec
    | TypedPartSpec
    | TypedRowSpec
    | LossSpec
)

# What each stem is rendered from unless its op asks for something else.
DEFAULTS: Mapping[str, Spec] = MappingProxyType(
    {
        "adamw_update": AdamSpec(),
        "add_into": ElementSpec(),
        "add_parts": PartsSpec(),
        "attention_decode": DecodeSpec(),
        "attention_dkv": DkvSpec(),
        "attention_dq": DqSpec(),
        "attention_forward": ForwardSpec(),
        "cast_to_bf16": ElementSpec(),
        "cast_to_f32": ElementSpec(),
        "cross_entropy": CrossEntropySpec(),
        "cross_entropy_backward": RowSpec(),
        "cross_entropy_forward": RowSpec(),
        "cross_entropy_rows": LossSpec(),
        "dense_attention_gradient": TypedRowSpec(),
        "dense_attention_softmax": TypedRowSpec(),
        "embedding_backward": CopySpec(),
        "embedding_forward": CopySpec(),
        "gemm": GemmSpec(),
        "gradnorm_finish": OneBlockSpec(warps=1),
        "gradnorm_partial": NormPartSpec(),
        "matmul": MatmulSpec(),
        "layernorm_backward": TypedPartSpec(),
        "layernorm_forward": TypedRowSpec(),
        "kv_append": AppendSpec(),
        "loss_sum": OneBlockSpec(warps=8),
        "norm_gemv": GemvSpec(),
        "rmsnorm_backward": NormBackwardSpec(),
        "rmsnorm_forward": NormSpec(),
        "rope": RopeSpec(),
        "state_digest_finish": DigestSpec(),
        "state_digest_partial": DigestSpec(),
        "softmax_backward": TypedRowSpec(),
        "softmax_forward": TypedRowSpec(),
        "swiglu_backward": ActivationSpec(),
        "swiglu_forward": ActivationSpec(),
    }
)
