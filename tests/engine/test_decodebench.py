"""The decode bench measures what it says, here with a small model and a small memory."""

from __future__ import annotations

import modelbench as bench
import pytest

from ptxtrain.engine import decodebench


def test_every_figure_is_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios and rates follow from the times; the bound is the bf16 matrices at the read rate."""
    monkeypatch.setattr(decodebench, "READ_BYTES", 1 << 21)
    monkeypatch.setattr(decodebench, "PART_BYTES", 1 << 20)
    model = bench.fit(bench.LONG, "fast")
    found = decodebench.measure(model, 2, rounds=1)
    assert min(found.step, found.step_of_four, found.prefill, found.bandwidth) > 0
    layer = 40 * (4 + 2 * 2) * 32 + 4 * 32 * 40 + 40 * 2 * 56 + 56 * 40
    assert found.weight_bytes == 2 * (72 * 40 + 2 * layer)
    assert found.ratios == {
        "decode_vs_bandwidth": pytest.approx(found.weight_bytes / found.bandwidth / found.step),
        "prefill_vs_decode": pytest.approx(found.step * 70 / found.prefill),
    }
    assert found.rates["decode_tokens_of_4"] == pytest.approx(4 / found.step_of_four)
    assert set(found.rates) == {"decode_tokens", "decode_tokens_of_4", "prefill_tokens", "memory_read"}
