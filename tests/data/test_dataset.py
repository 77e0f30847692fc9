"""TokenBatches has static types, exact steps and empty batches."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data import shards
from tests.data.shards import COLUMNS, expected_rows, read_lists, write_folder
from tests.oracles.batching import batch_sizes_oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data import Column, ParquetFolder, StochasticLength, TokenBatches
from tf_fusedrec.data.plan import Cost

OPTIONS = {"length_columns": ["item_id"], "extra_tokens": 1, "target_tokens_per_rank": 12}


def _rows(batches):
    """Returns batches of tensors as a list of rows, in the form of expected_rows."""
    rows = []
    for batch in batches:
        lists = [batch["user_id"].numpy().tolist(), batch["item_id"].to_list(), batch["rating"].to_list()]
        rows += [(user, tuple(items), tuple(ratings)) for user, items, ratings in zip(*lists)]
    return rows


def _ranks(path, ranks, batches=OPTIONS, **options):
    """Returns the TokenBatches of every rank."""
    folders = [ParquetFolder(path, COLUMNS, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    return [TokenBatches(folder, **batches) for folder in folders]


def test_element_spec_is_static(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [9], 4), COLUMNS)
    assert TokenBatches(folder, **OPTIONS).dataset().element_spec == {
        "user_id": tf.TensorSpec([None], tf.int64),
        "item_id": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1, row_splits_dtype=tf.int64),
        "rating": tf.RaggedTensorSpec([None, None], tf.float32, ragged_rank=1, row_splits_dtype=tf.int64),
    }


def test_holds_the_rows_of_each_epoch_in_order_in_batches_of_algorithm_1(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [40], 8), COLUMNS, shuffle_seed=2, shuffle_rows=16)
    batches = TokenBatches(folder, epochs=5, **OPTIONS)
    got = list(batches.dataset(3, 2))
    assert len(got) == 2 * batches.steps_per_epoch == int(batches.dataset(3, 2).cardinality())
    assert _rows(got) == read_lists(folder, 3) + read_lists(folder, 4)
    sizes = [batch_sizes_oracle([len(row[1]) + 1 for row in read_lists(folder, epoch)], 12) for epoch in range(5)]
    assert batches.steps_per_epoch == max(map(len, sizes))
    found = [int(batch["user_id"].shape[0]) for batch in got]
    padded = [of + [0] * (batches.steps_per_epoch - len(of)) for of in sizes[3:]]
    assert found == padded[0] + padded[1]


@pytest.mark.parametrize("scope", ["rank", "global"])
def test_every_rank_has_the_same_steps_and_empty_batches_at_the_end(tmp_path, scope):
    path = write_folder(tmp_path / "d", [7], 100)
    ranks = _ranks(path, 8, {**OPTIONS, "target_tokens_per_rank": 4, "epochs": 2, "scope": scope})
    steps = {batches.steps_per_epoch for batches in ranks}
    assert len(steps) == 1
    every = [list(batches.dataset(epochs=2)) for batches in ranks]
    assert {len(batches) for batches in every} == {2 * steps.pop()}
    half = len(every[0]) // 2
    assert sorted(sum((_rows(batches[:half]) for batches in every), [])) == expected_rows(7)
    empty = [batch for batches in every for batch in batches if not batch["user_id"].shape[0]]
    assert empty
    assert empty[0]["item_id"].row_splits.numpy().tolist() == [0]
    assert empty[0]["rating"].flat_values.dtype == tf.float32


def test_a_scalar_column_may_tell_the_tokens(tmp_path):
    lengths = [3, 1, 2, 4, 1, 0, 5]
    table = pa.table({"item_id": [list(range(n)) for n in lengths], "length": pa.array(lengths, pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    folder = ParquetFolder(tmp_path, [Column("item_id", ragged=True), Column("length")])
    by_list, by_scalar = (
        TokenBatches(folder, length_columns=[name], target_tokens_per_rank=6) for name in ("item_id", "length")
    )
    assert folder.tokens(["length"]).tolist() == folder.tokens(["item_id"]).tolist() == [3, 1, 2, 4, 1, 1, 5]
    for first, second in zip(by_list.dataset(), by_scalar.dataset()):
        assert first["item_id"].to_list() == second["item_id"].to_list()


def test_costs_balance_other_batches_than_tokens(tmp_path):
    lengths = [40, 10, 10, 10, 10] * 4
    pq.write_table(pa.table({"item_id": [list(range(n)) for n in lengths]}), tmp_path / "a.parquet")
    loads = {}
    for cost in (Cost(), Cost(1.0, 1.0)):
        every = []
        for rank in range(2):
            folder = ParquetFolder(tmp_path, [Column("item_id", ragged=True)], rank=rank, ranks=2)
            batches = TokenBatches(
                folder, length_columns=["item_id"], target_tokens_per_rank=80, scope="global", cost=cost
            )
            every.append([batch["item_id"].row_lengths().numpy() for batch in batches.dataset()])
        loads[cost] = [[(of.sum(), (of + of**2).sum()) for of in step] for step in zip(*every)]
    for (tokens, _), (others, _) in loads[Cost()]:
        assert tokens == others == 80  # two long rows have 80 tokens, and so have eight short ones
    for (_, cost), (_, other) in loads[Cost(1.0, 1.0)]:
        assert cost == other


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_tokens_per_rank": 0}, "target_tokens_per_rank must be >= 1, got 0"),
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"scope": "all"}, r"scope must be one of \('rank', 'global'\), got 'all'"),
        ({"extra_tokens": -1}, "extra_tokens must be >= 0, got -1"),
        ({"length_columns": ["no"]}, r"length_columns names 'no', which is neither a list column .*\['item_id', "),
        ({"length_columns": []}, "length_columns must name at least one list column"),
    ],
)
def test_arguments_are_checked(tmp_path, change, message):
    folder = ParquetFolder(write_folder(tmp_path / "d", [4], 4), COLUMNS)
    with pytest.raises(ValueError, match=message):
        TokenBatches(folder, **{**OPTIONS, **change})


def test_stochastic_length_cuts_long_rows_with_the_published_probability(tmp_path):
    """N = 16, alpha = 1.5: n = 8. A row of 10 stays whole with probability 16^1.5 / 10^2 = .64, one of 16 with .25."""
    random = np.random.default_rng(1)
    lengths = random.choice([3, 8, 10, 16], 4000)
    items = [[1000 * user + at for at in range(n)] for user, n in enumerate(lengths)]
    table = pa.table({"user": np.arange(4000), "item": items, "time": items, "other": items})
    (tmp_path / "d").mkdir()
    pq.write_table(table, tmp_path / "d/part-0.parquet", row_group_size=500)
    user, item, other = shards.columns("user item* other*")
    columns = [user, item, Column("time", ragged=True, aligned_with="item"), other]
    rule, options = StochasticLength("item", 1.5, 16), {"length_columns": ["item"], "target_tokens_per_rank": 500}

    def epoch(number, ranks=1):
        found = {}
        for rank in range(ranks):
            folder = ParquetFolder(tmp_path / "d", columns, rank=rank, ranks=ranks, shuffle_seed=3)
            for batch in TokenBatches(folder, stochastic_length=rule, epochs=2, **options).dataset(number):
                assert batch["time"].to_list() == batch["item"].to_list()
                found.update(
                    zip(batch["user"].numpy().tolist(), zip(batch["item"].to_list(), batch["other"].to_list()))
                )
        return found

    first = epoch(0)
    assert first == epoch(0) and sorted(first) == list(range(4000)) == sorted(epoch(1, 2))
    again = epoch(1)
    for n, whole in ((3, 1.0), (8, 1.0), (10, 0.64), (16, 0.25)):
        users = np.flatnonzero(lengths == n)
        of = [first[user][0] for user in users.tolist()]
        assert {len(row) for row in of} == ({n} if whole == 1 else {8, n})
        share = np.mean([len(row) == n for row in of])
        assert abs(share - whole) <= 4 * np.sqrt(whole * (1 - whole) / len(users))  # four standard deviations
        cut = [row for row in of if len(row) < n]
        assert all(row == sorted(set(row)) for row in of)
        if cut:  # every place of the row is as likely
            places = np.bincount(np.concatenate(cut) % 1000, minlength=n) / len(cut)
            assert np.abs(places - 8 / n).max() <= 5 * np.sqrt(8 / n * (1 - 8 / n) / len(cut))
            assert any(first[user][0] != again[user][0] for user in users.tolist())
    assert all(first[user][1] == items[user] for user in range(4000))
    with pytest.raises(ValueError, match="alpha must be > 1 and <= 2, got 1.0"):
        StochasticLength("item", 1.0, 16)
    with pytest.raises(ValueError, match=r"one of the list columns \['item', 'time', 'other'\], got 'user'"):
        TokenBatches(
            ParquetFolder(tmp_path / "d", columns), stochastic_length=StochasticLength("user", 1.5, 4), **options
        )
