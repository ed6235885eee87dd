"""The shipped kernels as `ptxtrain kernels` shows and checks them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ptxtrain.cli.kernels import command
from ptxtrain.engine import kernelbook, kit
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.ptx.render import REFERENCES, SOURCES


def test_every_kernel_is_listed_with_what_it_computes() -> None:
    listed = kernelbook.kernels()
    assert {k.stem for k in listed} == set(SOURCES) | {f"{stem}.cu" for stem in REFERENCES}
    assert all(k.summary for k in listed)


def test_every_function_of_the_kit_is_listed_with_its_formula() -> None:
    listed = dict(kernelbook.functions())
    assert set(listed) == {name for name in kit.__all__ if name not in ("ContractError", "on")}
    assert "softmax_forward" in listed and "exp(x - max)" in listed["softmax_forward"]
    result = CliRunner().invoke(command, ["list"])
    assert result.exit_code == 0 and all(f"{name} " in result.output for name in (*listed, "softmax_backward"))


@pytest.mark.parametrize(("form", "mark"), [("ptx", ".visible .entry add_into"), ("llvm", "define"), ("asm", "retq")])
def test_a_kernel_is_shown_in_every_form(form: str, mark: str) -> None:
    if form == "asm":
        mark = "ret"
    assert mark in kernelbook.show("add_into", form)


def test_a_misspelt_kernel_names_the_closest() -> None:
    with pytest.raises(PtxtrainError, match="did you mean add_into"):
        kernelbook.show("add_int", "ptx")


def test_checking_one_kernel_assembles_it_and_runs_the_steps() -> None:
    lines = list(kernelbook.check(["swiglu_forward", "layernorm_backward", "softmax_backward"]))
    assert all(line.passed for line in lines), lines
    assert "only assembled" not in lines[-1].text, "the kit's kernels run as well as the trainer's"
    assert [line.text for line in lines][-6:] == [
        *(f"a checked training step, way {way}: nothing found" for way in ("f32", "bf16", "fast")),
        *(f"a checked run of the kit in {dtype}: nothing found" for dtype in ("f16", "bf16", "f32")),
    ]


def test_a_finding_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel that writes one element past its row the check of a step must fail and name it."""
    from ptxtrain.engine import kernels as texts

    real = texts.rendered("add_into").read_text()
    broken = real.replace("st.global.f32 [%p_out], ", "st.global.f32 [%p_out + 4], ")
    assert broken != real
    original = texts.rendered
    path = texts.rendered("add_into").parent / "add_into-broken.ptx"
    path.write_text(broken)
    monkeypatch.setattr(texts, "rendered", lambda stem, spec=None: path if stem == "add_into" else original(stem, spec))
    lines = list(kernelbook.check(["swiglu_forward"]))
    assert any(not line.passed and "add_into" in line.text for line in lines), lines
