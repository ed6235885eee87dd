"""The checked mode as a device: its name, its choice, its variable."""

from __future__ import annotations

import pytest

from ptxtrain.engine.device.choice import open_device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import PtxtrainError


def test_the_device_says_that_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PTXTRAIN_CHECKED", raising=False)
    device, choice = open_device("cpu", checked=True)
    assert device.name.endswith("1 thread, checked") and str(choice) == "cpu: asked for, checked"
    for value, shown in (
        ("1", "checked"),
        ("reverse", "checked, reverse order"),
        ("random:9", "checked, random:9 order"),
    ):
        monkeypatch.setenv("PTXTRAIN_CHECKED", value)
        device, choice = open_device("auto", threads=2)
        assert device.name.endswith(f"1 thread, {shown}") and choice.reason == "the checked mode runs there"
    monkeypatch.setenv("PTXTRAIN_CHECKED", "0")
    assert "checked" not in CpuDevice().name
    monkeypatch.setenv("PTXTRAIN_CHECKED", "yes")
    with pytest.raises(
        PtxtrainError, match=r"\$PTXTRAIN_CHECKED is 'yes'; it takes 0, 1, reverse, random or random:SEED"
    ):
        open_device("cpu")


def test_checked_runs_are_on_the_cpu() -> None:
    with pytest.raises(PtxtrainError, match="the checked mode runs on the CPU device alone"):
        open_device("cuda", checked=True)
