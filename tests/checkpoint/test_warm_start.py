"""Rows from NumPy and Parquet: each rank keeps its own, slots start as in new rows, and unsuitable rows are refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tf_fusedrec as fr
from tests.checkpoint.oracle import OWNERS
from tests.checkpoint.tables import DictTable, embedding_of
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives

IDS = np.array([5, -3, 2**62, 0, 7])
ROWS = np.arange(20, dtype=np.float64).reshape(5, 4) / 8


def layer(backend="native", **config):
    table = fr.TableConfig("item", 4, keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.25), **config)
    options = {"key_encoding": "hash"} if backend == "tfra" else {}
    return fr.FusedEmbedding(tables=[table], features=[fr.FeatureConfig("f", "item")], backend=backend, **options)


def step(emb, ids):
    with tf.GradientTape() as tape:
        rows = emb({"f": tf.constant(ids)})["f"]
        loss = tf.reduce_sum(rows)
    tape.gradient(loss, emb.trainable_variables)
    return rows.numpy()


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_rows_are_looked_up_and_trained_from_fresh_slots(backend):
    emb = layer(backend)
    assert fr.checkpoint.warm_start(emb, "item", IDS, ROWS) == 5
    np.testing.assert_array_equal(step(emb, IDS), ROWS.astype(np.float32))
    ids, rows = emb.export_table("item")
    order = np.argsort(IDS)
    np.testing.assert_array_equal(ids, IDS[order])
    # Adagrad: accumulator 0.25 + 1, step 0.5 / sqrt(1.25); an epsilon of 1e-7 and one rounding of float32 are allowed.
    np.testing.assert_allclose(rows, ROWS[order] - 0.5 / np.sqrt(1.25), rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_rows_of_other_ids_stay_and_rows_of_these_are_replaced_with_their_slots(backend):
    emb = layer(backend)
    for _ in range(2):
        step(emb, [5, 100])
    before = emb.export_table("item")[1][1]
    fr.checkpoint.warm_start(emb, "item", IDS, ROWS)
    ids, rows = emb.export_table("item")
    np.testing.assert_array_equal(rows[ids == 100][0], before)
    step(emb, [5])
    np.testing.assert_allclose(emb.export_table("item")[1][ids == 5][0], ROWS[0] - 0.5 / np.sqrt(1.25), rtol=1e-6)


@pytest.mark.parametrize(("backend", "config"), [("native", "storage"), ("tfra", "dtype")])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_rows_are_rounded_to_the_type_of_the_table(kind, backend, config):
    emb = layer(backend, **{config: fr.Storage(kind) if config == "storage" else kind})
    rows = np.full([5, 4], 1 / 3)
    fr.checkpoint.warm_start(emb, "item", IDS, rows)
    want = tf.cast(tf.constant(1 / 3, tf.float32), kind)
    np.testing.assert_array_equal(emb.export_table("item")[1].astype(np.float32), np.full([5, 4], np.float32(want)))


@pytest.mark.parametrize("owner", ["hash_range", "tfra"])
def test_each_rank_keeps_its_own_rows(owner, monkeypatch):
    ids = np.arange(-50, 50)
    rows = np.repeat(ids[:, np.newaxis], 4, axis=1).astype(np.float32)
    monkeypatch.setattr(collectives, "size", lambda: 3)
    taken = 0
    for rank in range(3):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        table = DictTable("item", owner=owner)
        taken += fr.checkpoint.warm_start(embedding_of(table), "item", ids, rows)
        held = table.rows["rows"]["item"]
        assert sorted(held) == [i for i in ids.tolist() if OWNERS[owner](i, 3) == rank]
        assert all((record["row"] == i).all() for i, record in held.items())
    assert taken == 100


def test_deltas_have_them_and_eviction_counts_from_now(tmp_path):
    emb = layer(record_tombstones=True, limits=fr.Limits(max_rows_per_rank=6, eviction="lru"))
    for ids in ([100, 101], [100, 101], [100]):
        step(emb, ids)
    job = fr.checkpoint.Checkpointer(tmp_path / "c", emb, full_every=2)
    job.save()
    fr.checkpoint.warm_start(emb, "item", IDS[:3], ROWS[:3])
    job.save()
    job.wait()
    other = layer(record_tombstones=True, limits=fr.Limits(max_rows_per_rank=6, eviction="lru"))
    fr.checkpoint.load(tmp_path / "c", other)
    assert other.export_table("item")[0].tolist() == [-3, 5, 100, 101, 2**62]
    step(emb, [100, 1, 2])  # one row too many: row 101 was used longest ago
    assert 101 not in emb.export_table("item")[0] and set(IDS[:3]) <= set(emb.export_table("item")[0])


def parquet(path, ids, rows, kind, **names):
    table = pa.table({names.get("id", "id"): pa.array(ids), names.get("row", "row"): pa.array(rows, kind)})
    pq.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 4), pa.large_list(pa.float32())])
def test_parquet_files_are_read_by_row_group(kind, tmp_path):
    table = DictTable("item")
    path = parquet(tmp_path / "rows.parquet", IDS, ROWS.tolist(), kind)
    assert fr.checkpoint.warm_start(embedding_of(table), "item", path) == 5
    assert table.calls == [("restore", "item", "rows", n) for n in (2, 2, 1)]
    held = table.rows["rows"]["item"]
    np.testing.assert_array_equal([held[i]["row"] for i in IDS.tolist()], ROWS.astype(np.float32))


def test_parquet_columns_may_have_other_names_that_are_named_and_tables_must_be_there(tmp_path):
    path = parquet(tmp_path / "r.parquet", IDS, ROWS.tolist(), pa.list_(pa.float32()), id="key", row="value")
    table = DictTable("item")
    for words, arguments in (
        (r"r.parquet has no column 'id'; it has \['key', 'value'\]", ("item", path)),
        ("rows must be None with the file .*r.parquet, got an array", ("item", path, ROWS)),
        (r"'double' has no table 'user'. It has \['item'\]", ("user", IDS, ROWS)),
    ):
        with pytest.raises(ValueError, match=words):
            fr.checkpoint.warm_start(embedding_of(table), *arguments)
    fr.checkpoint.warm_start(embedding_of(table), "item", path, id_column="key", row_column="value")
    assert table.size("item") == 5


FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("ids", "rows", "kind", "words"),  # kind: of the column of a Parquet file; None: arrays
    [
        (IDS, ROWS[:, :3], None, r"rows of table 'item' are float64 \[5, 3\], want floats \[5, 4\]"),
        (IDS, ROWS[:4], None, r"rows of table 'item' are float64 \[4, 4\], want floats \[5, 4\]"),
        (IDS, ROWS.astype(int), None, r"rows of table 'item' are int64 .*, want floats \[5, 4\]"),
        (IDS.astype(float), ROWS, None, r"ids of table 'item' are float64 \[5\], want integers \[n\]"),
        (IDS[:, np.newaxis], ROWS, None, r"ids of table 'item' are int64 \[5, 1\], want integers \[n\]"),
        (IDS * 0, ROWS, None, "ids of table 'item' have 4 repeats, but must be distinct"),
        (IDS, np.where(ROWS == 1.0, np.nan, ROWS), None, f"the row of id {2**62} of table 'item' is not finite"),
        (IDS, [[1.0] * 4] * 3 + [[1.0] * 3, [1.0] * 4], FLOATS, r"have \[3, 4\] numbers, want 4"),
        (IDS, [[1.0] * 3] * 5, pa.list_(pa.float32(), 3), r"have \[3\] numbers, want 4"),
        (IDS, [1.0] * 5, pa.float32(), "are float, want lists of floats"),
        (IDS, [[1] * 4] * 5, pa.list_(pa.int32()), "are list<.*: int32>, want lists of floats"),
        (IDS, [[1.0] * 4] * 4 + [None], FLOATS, "has null values among its ids or rows"),
        (IDS, [[1.0] * 4] * 4 + [[1.0, None, 1.0, 1.0]], FLOATS, "has null values among its ids or rows"),
    ],
)
def test_unsuitable_rows_are_refused(ids, rows, kind, words, tmp_path):
    table = DictTable("item")
    with pytest.raises(ValueError, match=words):
        if kind is None:
            fr.checkpoint.warm_start(embedding_of(table), "item", ids, rows)
        else:
            path = parquet(tmp_path / "rows.parquet", ids, rows, kind)
            fr.checkpoint.warm_start(embedding_of(table), "item", path)
    assert kind is not None or table.size("item") == 0
