"""The numerics id changes with what training's bits depend on, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxtrain.engine import numerics
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.identity import split_numerics
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.step import TrainStep
from ptxtrain.ptx import specs
from ptxtrain.ptx.render import REFERENCES, SOURCES


def names() -> set[str]:
    return {name for name, _ in numerics.kernel_texts()}


@pytest.mark.parametrize("way", ["f32", "bf16", "fast"])
def test_every_kernel_that_a_step_launches_is_in_it(
    way: str, checked_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelbench import SHORT, config

    seen: set[str] = set()
    ptx, reference = Recorder.ptx, Recorder.reference
    monkeypatch.setattr(
        Recorder, "ptx", lambda self, stem, *a, **k: (seen.add(f"{stem}.ptx"), ptx(self, stem, *a, **k))[1]
    )
    monkeypatch.setattr(
        Recorder, "reference", lambda self, stem, *a, **k: (seen.add(f"{stem}.cu"), reference(self, stem, *a, **k))[1]
    )
    TrainStep(config(SHORT, 4, 2, 2), checked_device, way=way)
    assert len(seen) > 8 and seen <= names(), seen - names()


def test_other_kernels_are_not() -> None:
    assert {"gemm.ptx", "softmax_forward.ptx", "attention_decode.ptx", "decode.inc", "gemm, rendered"}.isdisjoint(
        names()
    )
    assert {
        "attention.inc",
        "attention_forward.ptx",
        "matmul_spec.py",
        "common.cuh",
        "rmsnorm_forward, rendered",
    } <= names()
    assert {path.name for path in REFERENCES.values()} <= names()
    assert names() - {f"{stem}.ptx" for stem in SOURCES}


@pytest.mark.parametrize("name", ["adamw_update.ptx", "attention.inc", "matmul.cu", "common.cuh", "attention_spec.py"])
def test_an_edit_changes_it(name: str) -> None:
    def edited(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        return text + "// edited\n" if path.name == name else text

    plain = dict(numerics.kernel_texts())
    assert {key for key, text in numerics.kernel_texts(edited) if text != plain[key]} == {name}


def test_a_derived_number_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No template is touched: the text that comes of them is another."""
    plain = dict(numerics.kernel_texts())
    monkeypatch.setattr(specs.NormPartSpec, "elements", property(lambda self: 32 * 128))
    assert {key for key, text in numerics.kernel_texts() if text != plain[key]} == {"gradnorm_partial, rendered"}


def test_the_device_is_named_apart(device: Device) -> None:
    found = split_numerics(numerics.numerics_id(device))
    assert found[0] == device.numerics_id() and len(found[1]) == 16
    assert numerics.numerics_id(device) == numerics.numerics_id(device)
