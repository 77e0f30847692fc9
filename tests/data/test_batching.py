"""Algorithm 1 of MTGRBoost against its oracle, and the properties that the oracle does not show."""

import itertools

import numpy as np
import pytest

from tests.data.shards import to_lists
from tests.oracles.batching import batch_sizes_oracle
from tf_fusedrec.data import Column
from tf_fusedrec.data.batching import batch_sizes, check_length_columns, row_tokens, token_balanced_batches
from tf_fusedrec.data.rows import Ragged, Rows, rows_in_chunks, splits_of


def _chunks(lengths, size):
    return [np.array(lengths[begin : begin + size], np.int64) for begin in range(0, len(lengths), size)]


@pytest.mark.parametrize(
    "lengths, target, expected",
    [
        ([], 5, []),
        ([3], 5, [1]),  # the tail is flushed
        ([100], 5, [1]),  # a row longer than the target makes progress
        ([2, 100, 2], 5, [1, 1, 1]),
        ([4, 3], 6, [2]),  # the whole queue is closest: the listing would wait for ever
        ([5, 2, 5], 6, [1, 2]),  # 5 and 7 are equally close: the shorter
        ([5, 5, 5, 5], 10, [2, 2]),
        ([3, 3, 5, 4, 1, 9, 2], 6, [2, 1, 2, 1, 1]),  # the docstring's example
    ],
)
def test_cases_by_hand(lengths, target, expected):
    assert batch_sizes_oracle(lengths, target) == expected
    for size in (1, 2, 100):
        assert list(batch_sizes(_chunks(lengths, size), target)) == expected


@pytest.mark.parametrize("seed", range(60))
def test_equals_oracle_whatever_the_chunks(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.geometric(0.1, rng.integers(0, 120)), rng.integers(2, 60)).tolist()
    target = int(rng.integers(1, 80))
    chunks = np.split(np.array(lengths, np.int64), np.sort(rng.integers(0, len(lengths) + 1, 5)))  # empty ones too
    sizes = list(batch_sizes(chunks, target))
    assert sizes == batch_sizes_oracle(lengths, target)
    assert sum(sizes) == len(lengths)


def test_chunks_are_asked_for_only_when_needed():
    asked = itertools.count()

    def chunks():
        for _ in range(100):
            next(asked)
            yield np.full(10, 1, np.int64)

    sizes = batch_sizes(chunks(), 20)
    assert [next(sizes), next(sizes)] == [20, 20]
    assert next(asked) == 4


def test_batches_are_balanced_in_tokens():
    lengths = np.random.default_rng(0).lognormal(3.5, 1.0, 5000).astype(np.int64) + 1
    sizes = list(batch_sizes(_chunks(lengths, 512), 4096))
    tokens = np.add.reduceat(lengths, np.concatenate([[0], np.cumsum(sizes)[:-1]]))[:-1]
    # The cut is the closest one: at most half the row that lies across the target is missing or too much.
    assert np.all(np.abs(tokens - 4096) <= lengths.max() / 2)
    assert len(set(sizes)) > 5  # and rows per batch vary instead


def test_rows_keep_their_order_and_count_extra_tokens():
    lengths = np.array([2, 0, 3, 1, 4, 0, 0, 2])
    values = np.arange(12)
    rows = Rows({"item": Ragged(values, splits_of(lengths)), "user": np.arange(8)}, 8)
    batches = list(token_balanced_batches(rows_in_chunks(rows, 3), ["item"], 1, 5))
    assert [batch.num_rows for batch in batches] == batch_sizes_oracle((lengths + 1).tolist(), 5)
    assert np.concatenate([batch.columns["user"] for batch in batches]).tolist() == list(range(8))
    assert sum([to_lists(batch.columns["item"]) for batch in batches], []) == to_lists(rows.columns["item"])


def test_a_row_without_tokens_counts_one():
    nothing = Rows({"item": Ragged(np.empty(0, np.int64), np.zeros(6, np.int64))}, 5)
    assert row_tokens(nothing, ["item"], 0).tolist() == [1] * 5


def test_refusals():
    with pytest.raises(ValueError, match="target_tokens must be >= 1, got 0"):
        list(batch_sizes([], 0))
    columns = [Column("user"), Column("item", ragged=True)]
    with pytest.raises(ValueError, match=r"length_columns names 'user', which is not a list column.*\['item'\]"):
        check_length_columns(["user"], columns)
    with pytest.raises(ValueError, match="length_columns must name at least one list column"):
        check_length_columns([], columns)
