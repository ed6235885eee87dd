"""The loader's order, its position, and the counting sort."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ptxtrain.data.errors import DataError
from ptxtrain.data.loader import Loader, Position, ValidationReader, sort_rows
from ptxtrain.data.shards import TokShard, write_shard

IN_TMP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VOCAB = 1000


def make(folder: Path, sizes: list[int]) -> list[TokShard]:
    """Shards of the given sizes in which every token tells its place: they count on from shard to shard."""
    first, made = 0, []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.tok"
        path.unlink(missing_ok=True)
        write_shard(path, np.arange(first, first + size) % VOCAB, vocab_size=VOCAB)
        made.append(TokShard(path))
        first += size
    return made


def expected_sequences(shards: list[TokShard], context: int) -> list[NDArray[np.int64]]:
    """All sequences of an epoch, T + 1 tokens each, the plain way."""
    found = []
    for shard in shards:
        ids = np.array(shard.tokens, np.int64)
        found += [ids[at : at + context + 1] for at in range(0, len(ids) - context, context)]
    return found


def take(loader: Loader | ValidationReader, count: int, context: int, first: int = 0) -> NDArray[np.int32]:
    """The next `count` sequences as [count, T + 1]; buffers start out poisoned."""
    tokens = np.full((count, context), -7, np.int32)
    targets = np.full((count, context), -7, np.int32)
    if isinstance(loader, Loader):
        loader.read(count, tokens, targets)
    else:
        loader.read(first, tokens, targets)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    return np.concatenate([tokens, targets[:, -1:]], axis=1)


layouts = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9)).filter(
    lambda layout: max(layout[0]) > layout[1]
)


@IN_TMP
@given(layout=layouts, reads=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_reads_in_order_and_wraps(tmp_path: Path, layout: tuple[list[int], int], reads: list[int]) -> None:
    sizes, context = layout
    shards = make(tmp_path, sizes)
    epoch = expected_sequences(shards, context)
    loader = Loader(shards, context, VOCAB)
    assert loader.sequences_in_epoch == len(epoch)
    got = np.concatenate([take(loader, count, context) for count in reads])
    np.testing.assert_array_equal(got, [epoch[index % len(epoch)] for index in range(sum(reads))])


@IN_TMP
@given(layout=layouts, before=st.integers(0, 30), after=st.integers(1, 30))
def test_a_loader_at_a_position_reads_what_the_other_would_have(
    tmp_path: Path, layout: tuple[list[int], int], before: int, after: int
) -> None:
    sizes, context = layout
    shards = make(tmp_path, sizes)
    whole = take(Loader(shards, context, VOCAB), before + after, context)
    first = Loader(shards, context, VOCAB)
    head = take(first, before, context)
    second = Loader([TokShard(shard.path) for shard in shards], context, VOCAB, first.position)
    assert second.position == first.position  # canonical: nothing to move on from
    np.testing.assert_array_equal(np.concatenate([head, take(second, after, context)]), whole)


def test_one_read_or_many_end_at_the_same_position(tmp_path: Path) -> None:
    shards = make(tmp_path, [30, 5, 17])
    one, many = Loader(shards, 8, VOCAB), Loader(shards, 8, VOCAB)
    take(one, 7, 8)
    for _ in range(7):
        take(many, 1, 8)
    assert one.position == many.position == Position(0, 16)


def test_only_one_shard_stays_mapped(tmp_path: Path) -> None:
    shards = make(tmp_path, [20, 20, 20])
    loader = Loader(shards, 4, VOCAB)
    take(loader, 6, 4)
    assert [shard._map is not None for shard in shards] == [False, True, False]


def test_short_shards_are_skipped_and_too_short_a_dataset_says_so(tmp_path: Path) -> None:
    shards = make(tmp_path, [8, 9, 3])
    assert Loader(shards, 8, VOCAB).position == Position(1, 0)
    with pytest.raises(DataError, match=r"no training shard .* longest has 9 tokens, a context of 9 needs 10"):
        Loader(shards, 9, VOCAB)
    with pytest.raises(DataError, match="no validation shard"):
        ValidationReader([], 9, VOCAB, 4)


@pytest.mark.parametrize("position", [Position(2, 0), Position(-1, 0), Position(0, -1), Position(0, 31)])
def test_positions_outside_the_data_are_refused(tmp_path: Path, position: Position) -> None:
    with pytest.raises(DataError, match=rf"shard {position.file}, token {position.token}, is not in the 2 shards"):
        Loader(make(tmp_path, [30, 30]), 8, VOCAB, position)


def test_too_large_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 1,000, the model has 999; .*--vocab-size 999"):
        Loader(make(tmp_path, [30]), 8, 999)


def test_an_error_leaves_the_position_and_names_the_file(tmp_path: Path) -> None:
    shards = make(tmp_path, [30, 30])
    loader = Loader(shards, 8, VOCAB)
    take(loader, 2, 8)
    data = bytearray(shards[1].path.read_bytes())
    data[130] ^= 1
    shards[1].path.write_bytes(data)
    before = loader.position
    with pytest.raises(DataError, match=r"1\.tok is damaged between byte 128"):
        take(loader, 3, 8)
    assert loader.position == before


def test_a_shard_truncated_under_a_running_loader_is_an_error(tmp_path: Path) -> None:
    shards = make(tmp_path, [3000])
    loader = Loader(shards, 8, VOCAB)
    take(loader, 1, 8)
    os.truncate(shards[0].path, 1000)
    with pytest.raises(DataError, match="while in use"):
        take(loader, 1, 8)


@IN_TMP
@given(layout=layouts, wanted=st.integers(1, 12))
def test_validation_reads_a_fixed_spread_set(tmp_path: Path, layout: tuple[list[int], int], wanted: int) -> None:
    sizes, context = layout
    shards = make(tmp_path, sizes)
    every = expected_sequences(shards, context)
    reader = ValidationReader(shards, context, VOCAB, wanted)
    assert reader.count == min(wanted, len(every))
    got = take(reader, reader.count, context)
    chosen = [index * len(every) // reader.count for index in range(reader.count)]
    assert len(set(chosen)) == reader.count
    np.testing.assert_array_equal(got, [every[index] for index in chosen])
    np.testing.assert_array_equal(take(reader, 1, context, reader.count - 1), got[-1:])


@settings(max_examples=80, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 97, 4096, 65_536, 65_537, 200_000]),
    rows=st.integers(0, 200),
    few=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_counting_sort(vocab: int, rows: int, few: bool, seed: int) -> None:
    high = min(vocab, 5) if few else vocab
    tokens = (vocab - 1 - np.random.default_rng(seed).integers(0, high, rows)).astype(np.int32)
    order, starts = np.full(rows, -1, np.int32), np.full(vocab + 1, -1, np.int32)
    sort_rows(tokens, vocab, order, starts)
    assert starts[0] == 0 and starts[-1] == rows
    plain: dict[int, list[int]] = {}
    for row, token in enumerate(tokens.tolist()):
        plain.setdefault(token, []).append(row)
    assert order.tolist() == [row for token in sorted(plain) for row in plain[token]]
    for token, found in plain.items():
        assert order[starts[token] : starts[token + 1]].tolist() == found
    assert int(np.diff(starts).sum()) == rows and (np.diff(starts) >= 0).all()
