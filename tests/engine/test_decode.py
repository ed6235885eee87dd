"""Token by token over the cache: the same as reading the whole text again, and the same bits however texts are put together."""

from __future__ import annotations

from dataclasses import replace

import modelbench as bench
import numpy as np
import numpy.typing as npt
import pytest

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.decode import MOST_ROWS, Decoder
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.generate import load_weights
from ptxtrain.engine.inference import Inference
from ptxtrain.engine.kvcache import cache_bytes
from ptxtrain.engine.ops.checks import ITEM_SIZES
from ptxtrain.engine.ways import resolve

F32 = npt.NDArray[np.float32]


class Pair:
    """A decoder, and the model that reads whole texts, over the same weights."""

    def __init__(self, device: Device, model: ModelConfig, way: str, sequences: int = 1) -> None:
        self.model = model
        weights = load_weights(model, device, bench.weights(model), way)
        self.decoder = Decoder(model, device, weights, way=way, sequences=sequences)
        self.whole = Inference(model, device, weights, way=way)

    def again(self, text: list[int]) -> F32:
        """The logits behind a text, all of it read again."""
        return self.whole.logits(np.array([text], np.int32))


def text_of(model: ModelConfig, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.vocab_size, length).tolist()


def test_greedy_text_is_that_of_reading_everything_again(device: Device) -> None:
    """In f32 throughout: the same tokens to the end of the context, and logits within the rounding of sums."""
    pair = Pair(device, bench.LONG, "f32")
    text = text_of(bench.LONG, 3)
    logits = pair.decoder.read(text)
    while len(text) < bench.LONG.context:
        again = pair.again(text)
        assert np.abs(logits - again).max() <= 2e-5 * np.abs(again).max(), len(text)
        assert logits.argmax() == again.argmax()
        text.append(int(logits.argmax()))
        logits = pair.decoder.step([text[-1]])[0]


def test_in_bf16_the_difference_is_that_of_two_orders_of_sums(device: Device) -> None:
    """Logits differ from those of the whole text by no more than twice what naive and fast kernels differ by, and the token is
    the same wherever the two likeliest are further apart than that."""
    model = bench.fit(bench.LONG, "fast")
    naive, fast = (Pair(device, model, way) for way in ("bf16", "fast"))
    text = text_of(model, 60)
    fast.decoder.read(text[:5])
    here, between = [], []
    for length in range(6, 60):
        logits, again = fast.decoder.step([text[length - 1]])[0], fast.again(text[:length])
        here.append(np.abs(logits - again).max())
        between.append(np.abs(naive.again(text[:length]) - again).max())
        first, second = np.sort(again)[:-3:-1]
        if first - second > 2 * here[-1]:
            assert logits.argmax() == again.argmax()
    assert np.mean(here) <= 2 * np.mean(between) and np.max(here) <= 3 * np.max(between)


@pytest.mark.parametrize("way", ["f32", "fast"])
def test_the_first_logits_are_those_of_the_whole_text(device: Device, way: str) -> None:
    """`read` is the other path itself: the same bits, at lengths in several windows."""
    model = bench.fit(bench.LONG, way)
    pair = Pair(device, model, way)
    for length in (1, 16, 17, 70):
        text = text_of(model, length)
        assert pair.decoder.read(text).tobytes() == pair.again(text).tobytes()
        assert pair.decoder.length() == length


@pytest.mark.parametrize("way", ["f32", "fast"])
def test_a_text_has_the_same_bits_beside_others_and_again(device: Device, way: str) -> None:
    """Four texts that part, one alone, and one after another text has used the cache: one text, one result."""
    model = bench.fit(bench.LONG, way)
    together, alone = Pair(device, model, way, MOST_ROWS).decoder, Pair(device, model, way).decoder
    prompt = text_of(model, 7)
    paths = [text_of(model, 40, seed) for seed in range(MOST_ROWS)]
    together.read(prompt)
    rows = np.stack([together.step([path[i] for path in paths]) for i in range(40)])
    for n in (2, 0):
        alone.read(prompt)
        for i in range(40):
            assert alone.step([paths[n][i]])[0].tobytes() == rows[i, n].tobytes(), (n, i)


def test_texts_can_start_anew_one_by_one(device: Device) -> None:
    """A text that is read again has its own length and leaves its neighbour alone."""
    model = bench.fit(bench.LONG, "fast")
    two, one = Pair(device, model, "fast", 2).decoder, Pair(device, model, "fast").decoder
    first, second = text_of(model, 9, 1), text_of(model, 30, 2)
    two.read(first)
    two.read(second, (1,))
    assert (two.length(0), two.length(1)) == (9, 30)
    rows = two.step([5, 6])
    one.read(first)
    assert one.step([5])[0].tobytes() == rows[0].tobytes()
    one.read(second)
    assert one.step([6])[0].tobytes() == rows[1].tobytes()


def test_threads_do_not_show() -> None:
    """One thread and three: the same bits."""
    from ptxtrain.engine.device.cpu import CpuDevice

    found = []
    for threads in (1, 3):
        device = CpuDevice(threads)
        decoder = Pair(device, bench.fit(bench.LONG, "fast"), "fast").decoder
        decoder.read([1, 2, 3])
        found.append(decoder.step([4]).tobytes())
        device.close()
    assert found[0] == found[1]


def test_checked_mode_finds_nothing(checked_device: Device) -> None:
    """A prompt, two steps and a text started anew, with the bits of the unchecked device."""
    from ptxtrain.engine.device.cpu import CpuDevice

    model = bench.fit(bench.SHORT, "fast")
    results = []
    for device in (checked_device, CpuDevice(checked=False)):
        decoder = Pair(device, model, "fast", 2).decoder
        parts = [decoder.read([1, 2, 3]), decoder.step([4, 5]), decoder.step([6, 7])]
        parts += [decoder.read([9], (1,)), decoder.step([1, 2])]
        results.append(b"".join(p.tobytes() for p in parts))
    assert results[0] == results[1]


def test_the_cache_takes_what_it_says(device: Device) -> None:
    """Keys and values of every layer, sequence and place."""
    cfg = replace(bench.LONG, layers=3)
    for way in ("f32", "bf16"):
        dtype = resolve(cfg, way).dtype
        numbers = 2 * 3 * MOST_ROWS * cfg.kv_heads * cfg.context * cfg.head_dim
        assert cache_bytes(cfg, MOST_ROWS, dtype) == numbers * ITEM_SIZES[dtype]
