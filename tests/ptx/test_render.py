"""Rendering: the first line's origin, the delimiters, and mistakes that must not pass silently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.kernels import Recorder, compiled, rendered
from ptxtrain.ptx import render, specs


@pytest.mark.parametrize("stem", render.SOURCES)
def test_first_line_says_what_it_was_rendered_from(stem: str) -> None:
    first = rendered(stem).read_text(encoding="utf-8").splitlines()[0]
    assert first == f"// rendered from ptx/{stem}.ptx with {specs.DEFAULTS[stem]}"


@pytest.mark.parametrize("stem", render.REFERENCES)
def test_first_line_of_compiled_references(stem: str) -> None:
    first = compiled(stem).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"// {stem}.cu compiled by NVRTC") and "--fmad=false" in first


@pytest.mark.parametrize("stem", render.SOURCES)
def test_nothing_of_the_template_is_left(stem: str) -> None:
    text = render.render(stem)
    assert not re.search(r"//%|\$\{|<%|%>|<#", text)
    assert f".visible .entry {stem}(" in text


def test_a_spec_names_its_text() -> None:
    a, b = rendered("rmsnorm_forward", specs.NormSpec(warps=4)), rendered("rmsnorm_forward", specs.NormSpec(warps=8))
    assert a != b and a == rendered("rmsnorm_forward", specs.NormSpec(warps=4))
    assert ".reqntid 32, 8, 1" in b.read_text(encoding="utf-8")


def test_a_number_the_spec_lacks_is_an_error() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="dtype"):
        render.render("rmsnorm_forward", specs.ElementSpec())


def test_regs_prints_a_vector_operand() -> None:
    assert render.regs("acc", 1, 2, n=4) == "{%acc_1_2_0, %acc_1_2_1, %acc_1_2_2, %acc_1_2_3}"
    assert render.regs("x", n=2) == "{%x_0, %x_1}"


def test_a_damaged_file_in_the_cache_is_written_again() -> None:
    path = rendered("add_into")
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    rendered.cache_clear()
    assert rendered("add_into") == path and path.read_bytes() == good


def test_an_override_runs_in_place_of_the_shipped_text(device: Device) -> None:
    import numpy as np

    text = render.render("add_into").replace("add.rn.f32      %a_0, %a_0, %b_0;", "sub.rn.f32      %a_0, %a_0, %b_0;")
    from ptxtrain.engine.ops import add

    results = []
    for overrides in ({}, {"add_into": text}):
        rec = Recorder(device, overrides)
        out, a, b = (device.write(np.full(4, n, np.float32)) for n in (0, 5, 3))
        add.into(rec, out, a, b, count=4)
        assert len(rec.launches) == 1
        plan = rec.plan()
        assert not rec.launches
        device.run(plan)
        results.append(device.read(out, np.float32, (4,)).tolist())
    assert results == [[8.0] * 4, [2.0] * 4]


def test_an_override_of_nothing_is_an_error(device: Device) -> None:
    with pytest.raises(KeyError, match="rmsnorm_backwards"):
        Recorder(device, {"rmsnorm_backwards": ""})


def test_imports_nothing_of_ours() -> None:
    for path in Path(render.__file__).parent.glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) (ptxtrain[\w.]*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"{name}.".startswith("ptxtrain.ptx."), f"{path.name} imports {name}"
