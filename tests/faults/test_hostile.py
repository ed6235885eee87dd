"""Headers and manifests made to hurt, with digests that agree: refused in under a second and 64 MB."""

from __future__ import annotations

import hashlib
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from figures import FULL, HEADER_MEMORY, HEADER_SECONDS, HEADERS, Figures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statebench import NUMBERS, TABLE, Bench, same, snapshot

from ptxtrain.engine.checkpoint import load
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.sealed import Damaged, seal, unseal
from ptxtrain.engine.tensorfile import Layout

DATA = bytes(4 * NUMBERS)
GOOD = {"__metadata__": {"format": "pt"}, **Layout(TABLE).entries}


WORST = {"count": 0.0, "seconds": 0.0, "megabytes": 0.0}  # of the test that runs


@pytest.fixture(autouse=True)
def _counted(figures: Figures) -> Iterator[None]:
    WORST.update(dict.fromkeys(WORST, 0.0))
    yield
    figures.add(HEADERS, WORST["count"])
    figures.add(HEADER_SECONDS, WORST["seconds"])
    figures.add(HEADER_MEMORY, WORST["megabytes"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return saved_once(tmp_path_factory.mktemp("hostile"))


def saved_once(folder: Path) -> Bench:
    bench = Bench(folder)
    assert bench.save(1)
    (folder / "pristine.json").write_bytes((bench.path / "ckpt" / "step-00000001" / "MANIFEST.json").read_bytes())
    return bench


def plant(bench: Bench, content: bytes, change: Callable[[dict[str, Any]], None] = lambda values: None) -> None:
    """Makes `content` the weights file, with a manifest that vouches for it."""
    step = bench.path / "ckpt" / "step-00000001"
    values = json.loads((bench.folder / "pristine.json").read_bytes())
    values.pop("digest")
    values["files"]["model.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(values)
    (step / "model.safetensors").write_bytes(content)
    (step / "MANIFEST.json").write_bytes(seal(values))


def refused(bench: Bench) -> str:
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(PtxtrainError) as caught:
            load(bench.path, TABLE)
        seconds, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    WORST["count"] += 1
    WORST["seconds"], WORST["megabytes"] = max(WORST["seconds"], seconds), max(WORST["megabytes"], peak / 1e6)
    assert seconds < 1 and peak < 64e6, (seconds, peak)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def file_of(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def changed(name: str, **values: Any) -> bytes:
    return text({**GOOD, name: {**GOOD[name], **values}})


TWICE = text(GOOD)[:-1] + b', "final_norm": ' + text(GOOD["final_norm"]) + b"}"
HUGE = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(200_000)}


@pytest.mark.parametrize(
    "content",
    [
        file_of(text(GOOD), length=2**63),
        file_of(text(GOOD), length=2**64 - 1),
        file_of(text(GOOD), length=2**40),
        file_of(text(GOOD), length=len(text(GOOD)) - 1),
        file_of(text(GOOD), length=0),
        file_of(text(GOOD), DATA + b"\0"),
        file_of(text(GOOD), DATA[:-1]),
        b"",
        b"\0" * 7,
        file_of(b""),
        file_of(b"[]"),
        file_of(b"null"),
        file_of(b"\xff\xfe{}"),
        file_of(b"[" * 60_000),
        file_of(b'{"a":' * 10_000),
        file_of(b"9" * 60_000),
        file_of(TWICE),
        file_of(text(HUGE)),
        file_of(text({"__metadata__": {"a": 1}, **Layout(TABLE).entries})),
        file_of(text({**GOOD, "more": {"dtype": "F32", "shape": [0], "data_offsets": [144, 144]}})),
        file_of(text({k: v for k, v in GOOD.items() if k != "final_norm"})),
        file_of(changed("final_norm", dtype="F16")),
        file_of(changed("final_norm", dtype="I32")),
        file_of(changed("final_norm", shape=[2, 2])),
        file_of(changed("final_norm", shape=[-4])),
        file_of(changed("final_norm", shape=[4.0])),
        file_of(changed("final_norm", shape=[float("nan")])),
        file_of(changed("final_norm", shape=[2**63])),
        file_of(changed("final_norm", data_offsets=[-16, 0])),
        file_of(changed("final_norm", data_offsets=[0, 16])),  # overlaps the embedding
        file_of(changed("final_norm", data_offsets=[128, 148])),
        file_of(changed("final_norm", data_offsets=[2**63, 2**63 + 16])),
        file_of(changed("final_norm", more=1)),
        file_of(changed("layers.0.qkv", shape=[3, 4])),
        file_of(text({**GOOD, "final_norm": None})),
    ],
)
def test_hostile_weights_file(bench: Bench, content: bytes) -> None:
    plant(bench, content)
    message = refused(bench)
    assert "model.safetensors" in message or "tensor" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("step", 2),
        ("step", True),
        ("step", 1.0),
        ("step", -1),
        ("position", [0]),
        ("position", [0, -1]),
        ("position", [0, 2**64]),
        ("position", "00"),
        ("best_val", "low"),
        ("elapsed", None),
        ("best_saved", [1]),
        ("state", []),
        ("run_id", 3),
        ("run_id", "0" * 32),
        ("state_digest", "0" * 16),
        ("files", {}),
        ("files", {"../../outside": {"bytes": 1, "sha256": ""}}),
        ("files", []),
    ],
)
def test_hostile_manifest(bench: Bench, key: str, value: Any) -> None:
    plant(bench, file_of(text(GOOD)), lambda values: values.__setitem__(key, value))
    refused(bench)


def test_files_of_claimed_sizes_are_not_believed(bench: Bench) -> None:
    """A sparse file of a tebibyte, vouched for: refused by its size, not read."""
    plant(bench, b"", lambda values: values["files"]["model.safetensors"].__setitem__("bytes", 1 << 40))
    with open(bench.path / "ckpt" / "step-00000001" / "model.safetensors", "wb") as file:
        file.truncate(1 << 40)
    assert "this model's has" in refused(bench)
    with open(bench.path / "ckpt" / "step-00000001" / "MANIFEST.json", "wb") as file:
        file.truncate(1 << 40)
    assert "at most" in refused(bench)


def test_another_order_spaces_and_metadata_are_fine(tmp_path: Path) -> None:
    """Not ours to the byte, but safetensors of the same tensors: what matters is checked, nothing else."""
    bench = saved_once(tmp_path)
    entries = dict(reversed(Layout(TABLE).entries.items()))
    header = json.dumps({**entries, "__metadata__": {"by": "another"}}, indent=2).encode()
    plant(bench, file_of(header, snapshot(1).params.tobytes()))
    assert same(bench.load(), snapshot(1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", ""]), "shape": st.lists(st.integers(), max_size=3)},
    optional={"data_offsets": st.lists(st.integers(), max_size=3)},
)
HEADER = st.dictionaries(st.sampled_from(["__metadata__", *Layout(TABLE).entries]), ENTRY | JSON, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | HEADER.map(text) | JSON.map(text), st.integers(0, 2**64 - 1) | st.none())
def test_any_header_is_refused(bench: Bench, header: bytes, length: int | None) -> None:
    plant(bench, file_of(header, length=length))
    refused(bench)


NASTY = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, float("nan"), float("-inf"), True, None, "", "F32", "x" * 500)
NASTY += ([], {}, [[]], [0, 4], [2**62, 2**62], [[[[[[[[]]]]]]]], {"a": {"a": {}}})


def fuzzed(rng: random.Random) -> bytes:
    """A weights file whose header is a good one with some of it changed: never one that could be loaded."""
    values = {name: {key: value for key, value in entry.items()} for name, entry in GOOD.items()}
    name = rng.choice(list(GOOD))
    kind = rng.randrange(8)
    if kind == 0:
        return file_of(rng.randbytes(rng.randrange(400)), length=rng.choice((None, rng.getrandbits(64))))
    if kind == 1:  # flipped bytes; one that leaves the meaning the same (a space's place) is not among them
        data = bytearray(text(GOOD))
        at = rng.choice([i for i, byte in enumerate(data) if chr(byte).isalnum()])
        data[at] = rng.choice(b"!#/;~\x7f\xff")
        return file_of(bytes(data))
    if kind == 2:
        return file_of(text(GOOD), length=rng.choice((rng.getrandbits(64), rng.randrange(len(text(GOOD))))))
    if kind == 3:
        del values[rng.choice([key for key in GOOD if key != "__metadata__"])]
    elif kind == 4:
        values[f"t{rng.random()}"] = rng.choice(NASTY)
    elif kind == 5 or name == "__metadata__":
        values["final_norm"] = rng.choice(NASTY)
    elif kind == 6:
        key = rng.choice(list(values[name]))
        values[name][key] = rng.choice([nasty for nasty in NASTY if nasty != values[name][key]])
    else:
        offsets = values[name]["data_offsets"]
        at = rng.randrange(2)
        values[name]["data_offsets"] = [
            *offsets[:at],
            offsets[at] + rng.choice((-4, 4, 1, -1, 2**40)),
            *offsets[at + 1 :],
        ]
    return file_of(text(values))


def fuzz(bench: Bench, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        plant(bench, fuzzed(rng))
        refused(bench)


def test_fuzzed_headers(bench: Bench) -> None:
    """Good headers with something changed, each with a manifest that vouches for it."""
    fuzz(bench, 3000 if FULL else 300, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_a_hundred_thousand_fuzzed_headers(bench: Bench, seed: int) -> None:
    """The same, 100,000 times in all."""
    fuzz(bench, 12_500, seed)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(text))
def test_no_bytes_but_sealed_ones_unseal(data: bytes) -> None:
    with pytest.raises(Damaged):
        unseal(data, "x")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key != "digest"),
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5) | st.none(),
    ),
    st.integers(0),
)
def test_what_is_sealed_comes_back_and_every_flipped_bit_is_seen(values: dict[str, Any], bit: int) -> None:
    data = seal(values)
    assert unseal(data, "x") == values
    at = bit % (8 * len(data))
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << at % 8
    with pytest.raises(Damaged):
        unseal(bytes(flipped), "x")
