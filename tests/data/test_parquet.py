"""ParquetFolder gives every row exactly once over the ranks, repeatably by seed, in bounded memory."""

import threading
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.shards import COLUMNS, expected_rows, read_lists, to_lists, user_table, write_folder
from tf_fusedrec.data import Column, ParquetFolder, reading
from tf_fusedrec.data.columns import BadInput
from tf_fusedrec.data.rows import rows_from_arrow


def _ranks(path, ranks, **options):
    return [ParquetFolder(path, COLUMNS, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "files, group_size",
    [([40, 23], 8), ([30], 100), ([2], 1), ([1], 1), ([0], 1), ([3, 0, 50], 50)],
    ids=["many_groups", "one_group", "two_rows", "one_row", "no_rows", "uneven_groups"],
)
def test_ranks_share_every_row_exactly_once_in_the_order_of_one_rank(tmp_path, files, group_size, ranks, seed):
    path = write_folder(tmp_path / "d", files, group_size)
    alone = ParquetFolder(path, COLUMNS, shuffle_seed=seed, shuffle_rows=7)
    assert alone.num_rows == sum(files)
    for epoch in (0, 1):
        parts = [read_lists(folder, epoch) for folder in _ranks(path, ranks, shuffle_seed=seed, shuffle_rows=7)]
        whole = sum(parts, [])
        assert sorted(whole) == expected_rows(sum(files)) and whole == read_lists(alone, epoch)
        assert seed is not None or whole == sorted(whole)  # file order
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_order_is_a_function_of_seed_epoch_rank_and_ranks(tmp_path):
    path = write_folder(tmp_path / "d", [60, 40], 10)

    def order(epoch, **options):
        return [row[0] for row in read_lists(ParquetFolder(path, COLUMNS, shuffle_rows=25, **options), epoch)]

    base = order(0, shuffle_seed=1)
    assert base == order(0, shuffle_seed=1)
    assert base != order(1, shuffle_seed=1)
    assert base != order(0, shuffle_seed=2)
    assert base != sorted(base)
    # Groups and rows in the buffer are shuffled: the first 25 rows come from several stretches of the file.
    assert len({user // 10 for user in base[:25]}) >= 3
    half = {"shuffle_seed": 1, "ranks": 2}
    assert order(0, rank=0, **half) == order(0, rank=0, **half)


def test_rows_of_one_group_are_mixed_anew_in_every_epoch_and_block(tmp_path):
    path = write_folder(tmp_path / "d", [40], 40)  # one row group, so that its rows alone can differ in order
    folder = ParquetFolder(path, COLUMNS, shuffle_seed=0, shuffle_rows=20)
    users = [[row[0] for row in read_lists(folder, epoch)] for epoch in (0, 1)]
    orders = [[user - 20 * block for user in of[20 * block : 20 * block + 20]] for of in users for block in (0, 1)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_a_window_on_an_arrow_array_is_read_as_its_own_rows():
    batch = user_table(9).to_batches()[0].slice(2, 5)
    rows = rows_from_arrow(batch, COLUMNS, "here", BadInput("error"), 0, {})
    assert list(zip(*(to_lists(rows.columns[column.name]) for column in COLUMNS))) == expected_rows(9)[2:7]
    assert len(rows.ragged("item_id").values) == sum(len(row[1]) for row in expected_rows(9)[2:7])


def test_long_rows_are_cut_to_their_end(tmp_path):
    path = write_folder(tmp_path / "d", [9], 4)
    columns = [Column("item_id", ragged=True, keep_last=2), Column("rating", "float32", ragged=True, keep_last=2)]
    assert read_lists(ParquetFolder(path, columns)) == [(row[1][-2:], row[2][-2:]) for row in expected_rows(9)]


def test_large_lists_and_hidden_files(tmp_path):
    tmp_path = write_folder(tmp_path / "d", [3], 2)
    (tmp_path / "_SUCCESS.parquet").write_text("not a shard", encoding="utf-8")
    large = pa.table({"item_id": pa.array([[1], [2, 3]], pa.large_list(pa.int64()))})
    pq.write_table(large, tmp_path / "part-9.parquet")
    folder = ParquetFolder(tmp_path, [Column("item_id", ragged=True)])
    assert read_lists(folder) == [((),), ((10,),), ((20, 21),), ((1,),), ((2, 3),)]


def test_row_groups_larger_than_a_read_and_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "READ_ROWS", 4)
    path = write_folder(tmp_path / "d", [50], 50)
    assert read_lists(ParquetFolder(path, COLUMNS)) == expected_rows(50)
    parts = [read_lists(folder) for folder in _ranks(path, 3, shuffle_seed=3, shuffle_rows=10)]
    assert sorted(sum(parts, [])) == expected_rows(50)


def test_a_row_group_that_lies_across_blocks_is_decoded_once(tmp_path, monkeypatch):
    path = write_folder(tmp_path / "d", [60], 15)
    folder = ParquetFolder(path, COLUMNS, shuffle_seed=3, shuffle_rows=20)
    read = []
    original = reading.GroupReader.read
    monkeypatch.setattr(
        reading.GroupReader, "read", lambda self, *span, **how: read.append(span) or original(self, *span, **how)
    )
    assert sorted(read_lists(folder)) == expected_rows(60)
    assert sorted(read) == [(group, 0, 15) for group in range(4)]


def test_jobs_run_ahead_while_the_caller_works_and_keep_their_order():
    started = [threading.Event() for _ in range(8)]
    results = reading.read_ahead([lambda n=n: (started[n].set(), n)[1] for n in range(8)], 3)
    assert next(results) == 0
    assert all(event.wait(5) for event in started[:4])
    assert not started[7].is_set()
    assert list(results) == list(range(1, 8))


def test_a_reader_that_is_left_ends_its_threads(tmp_path):
    before = threading.active_count()
    chunks = ParquetFolder(write_folder(tmp_path / "d", [50], 5), COLUMNS, shuffle_rows=5).read()
    next(chunks)
    chunks.close()
    assert threading.active_count() == before


def _peak_bytes(tmp_path, files, seed):
    """Returns the peak (Arrow, NumPy) bytes while it reads `files` files of 3.3 MB, in row groups of 0.4 MB."""
    rng = np.random.default_rng(0)
    rows, length = 2048, 200
    path = tmp_path / str(files)
    path.mkdir()
    for number in range(files):
        values = pa.array(rng.integers(-(2**62), 2**62, rows * length))  # random, so that nothing compresses
        items = pa.FixedSizeListArray.from_arrays(values, length).cast(pa.list_(pa.int64()))
        pq.write_table(pa.table({"item_id": items}), path / f"{number}.parquet", row_group_size=256)
    del values, items
    folder = ParquetFolder(path, [Column("item_id", ragged=True)], shuffle_seed=seed, shuffle_rows=512)
    before, arrow_peak = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for chunk in folder.read():
            arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - before)
            del chunk
        return arrow_peak, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", [None, 0])
def test_memory_does_not_grow_with_the_data(tmp_path, seed):
    arrow, numpy = _peak_bytes(tmp_path, 8, seed)
    # The files have 26 MB, a block 0.8 MB, a row group 0.4 MB. Two blocks, two further copies of one, and three row
    # groups in Arrow and in NumPy make 6 MB. The peak does not depend on the number of files.
    assert arrow + numpy < 9e6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 2, "ranks": 2}, r"rank must lie in 0..ranks - 1 = 1, got 2"),
        ({"shuffle_seed": -1}, "shuffle_seed must be >= 0, or None for file order, got -1"),
        ({"shuffle_rows": 0}, "shuffle_rows must be >= 1, got 0"),
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"bad_rows": "ignore"}, r"bad_rows must be one of \('error', 'skip'\), got 'ignore'"),
    ],
)
def test_arguments_are_checked(tmp_path, options, message):
    path = write_folder(tmp_path / "d", [2], 2)
    with pytest.raises(ValueError, match=message):
        ParquetFolder(path, COLUMNS, **options)
