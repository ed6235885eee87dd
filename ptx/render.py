"""Renders the kernels' templates to PTX text.

PTX has no macros, so the files are Jinja2 templates whose delimiters leave them readable as PTX: a line that starts with
`//%` is a statement, `${…}` prints a value, `<% … %>` is a block. A template only selects, repeats and prints; the numbers
come from its Spec. The first line of a rendered text says what it was rendered from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ptxtrain.ptx import specs

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
SOURCES: Mapping[str, Path] = MappingProxyType({path.stem: path for path in sorted(FOLDER.glob("*.ptx"))})
REFERENCES: Mapping[str, Path] = MappingProxyType(
    {path.stem: path for path in sorted((FOLDER / "reference").glob("*.cu"))}
)


@functools.cache
def environment() -> Environment:
    """The Jinja2 environment, with what templates may call: `regs`, `vec`, `f32`, and the constants of `specs`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(FOLDER, encoding="utf-8"),
        line_statement_prefix="//%",
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    env.globals.update(
        regs=regs,
        vec=vec,
        f32=specs.float_bits,
        LANES=specs.LANES,
        LOG2_E=specs.LOG2_E,
        LN_2=specs.LN_2,
        LR=specs.LR,
        BIAS1=specs.BIAS1,
        BIAS2=specs.BIAS2,
        GRAD_SCALE=specs.GRAD_SCALE,
        CLIP=specs.CLIP,
        GRAD_NORM=specs.GRAD_NORM,
        # A butterfly over the lanes of a warp: after the steps every lane holds the same total.
        BUTTERFLY=tuple(specs.LANES >> step for step in range(1, specs.LANES.bit_length())),
    )
    return env


def regs(name: str, *coordinates: int, n: int) -> str:
    """A vector operand: `regs("acc", 1, 2, n=4)` is `{%acc_1_2_0, %acc_1_2_1, %acc_1_2_2, %acc_1_2_3}`;
    of one register: `%acc_1_2_0`."""
    stem = "_".join((name, *map(str, coordinates)))
    if n == 1:
        return f"%{stem}_0"
    return "{" + ", ".join(f"%{stem}_{i}" for i in range(n)) + "}"


def vec(type_: str, count: int) -> str:
    """The type of an access to `count` neighbours: `vec("f32", 4)` is `v4.f32`, `vec("f32", 1)` is `f32`."""
    return type_ if count == 1 else f"v{count}.{type_}"


def render(stem: str, spec: object | None = None) -> str:
    """The PTX text of `ptx/STEM.ptx` for a Spec (by default the stem's own).

    Raises:
        KeyError: no template of that name.
        jinja2.TemplateError: the template does not fit its Spec.
    """
    path = SOURCES[stem]
    spec = specs.DEFAULTS[stem] if spec is None else spec
    text = environment().get_template(path.name).render(spec=spec)
    return f"// rendered from ptx/{path.name} with {spec}\n{text}"


def reference_source(stem: str) -> str:
    """The CUDA C text of `ptx/reference/STEM.cu`, with what it includes from its own folder in place."""
    text = REFERENCES[stem].read_text(encoding="utf-8")
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda found: _header(found[1]), text, flags=re.MULTILINE)


def _header(name: str) -> str:
    return (FOLDER / "reference" / name).read_text(encoding="utf-8").rstrip("\n")
