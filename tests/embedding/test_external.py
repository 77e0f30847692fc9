"""External tables hold rows of another model by (table, id). They never train, and no checkpoint holds them."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.ids import INT64_MAX, INT64_MIN
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.files.saves import read_manifest

IDS = [INT64_MIN, -1, 0, 3, 5, INT64_MAX]


def write_source(folder, *, backend="native", ids=IDS, **table):
    """Writes a checkpoint of other tables, "user" and "item" with 4 columns. Returns their rows by id."""
    options = {"dim": 4, "optimizer": keras.optimizers.Adagrad(0.5), **table}
    tables = [fr.TableConfig(name=name, **options) for name in ("user", "item")]
    emb = layer_of(*tables, backend=backend, key_encoding="hash", name=f"source_{backend}")
    inputs = {"user": tf.constant(ids, tf.int64), "item": tf.constant(ids[1:], tf.int64)}
    train(emb, inputs, lambda rows: tf.reduce_sum(rows**2))
    fr.checkpoint.save(folder, emb)
    return {name: dict(zip(*map(list, emb.export_table(name)))) for name in ("user", "item")}


def external(name, folder, table=None, dim=4, **kwargs):
    return fr.TableConfig(name=name, dim=dim, external=fr.External(str(folder), table=table), **kwargs)


def lookup(emb, name, ids):
    return np.asarray(emb({name: tf.constant(ids, tf.int64)})[name], np.float32)


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_rows_are_those_of_the_checkpoint_and_unknown_ids_get_zeros(tmp_path, backend):
    """Both backends keep tables of one id space apart, from one checkpoint and from two."""
    rows = write_source(tmp_path / "a", backend=backend)
    other = write_source(tmp_path / "b", ids=[3, 4], initializer=fr.Constant(value=2.0))
    a, b = tmp_path / "a", tmp_path / "b"
    emb = layer_of(external("user", a), external("author", a, "item"), external("b", b, "user"))
    for name, source in (("user", rows["user"]), ("author", rows["item"]), ("b", other["user"])):
        wanted = [*IDS, 4, 77]
        want = [source.get(i, np.zeros(4)) for i in wanted]
        np.testing.assert_array_equal(lookup(emb, name, wanted), np.array(want, np.float32))
        ids, exported = emb.export_table(name)
        assert ids.tolist() == sorted(source)
        np.testing.assert_array_equal(exported, [source[i] for i in sorted(source)])
    assert lookup(emb, "author", [INT64_MIN]).tolist() == [[0.0] * 4], "an id of another table of that checkpoint"


def test_tables_of_equal_dim_and_dtype_are_one_group_and_apart_from_trained_ones(tmp_path):
    write_source(tmp_path)
    own = fr.TableConfig(name="own", dim=4, optimizer=optimizers.SGD(0.1))
    emb = layer_of(external("user", tmp_path), external("author", tmp_path, "item"), own)
    assert [group.table.names for group in emb.internals.groups] == [["own"]]
    assert list(emb.optimizers) == ["own"]
    (external_table,) = [group.table for group in emb.internals.all_groups if group.config.external]
    assert external_table.names == ["author", "user"]
    assert external_table.size("author") == 5 and external_table.size("user") == 6


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_they_are_never_trained_while_everything_else_is(tmp_path, backend):
    rows = write_source(tmp_path)["user"]
    own = fr.TableConfig(name="own", dim=4, optimizer=keras.optimizers.SGD(0.5))
    emb = layer_of(external("user", tmp_path), own, backend=backend)
    ids = {"user": tf.constant([3, 77], tf.int64), "own": tf.constant([3, 77], tf.int64)}
    weight = tf.Variable(2.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            out = emb(ids)
            loss = tf.reduce_sum(out["user"]) * weight + tf.reduce_sum(out["own"])
        return tape.gradient(loss, [weight, *emb.trainable_variables])

    before = lookup(emb, "own", [3, 77])
    for _ in range(3):
        gradient = step()[0]
    np.testing.assert_allclose(gradient, np.sum(rows[3]), rtol=1e-5)
    np.testing.assert_array_equal(lookup(emb, "user", [3, 77]), [rows[3], np.zeros(4)])
    np.testing.assert_allclose(lookup(emb, "own", [3, 77]), before - 1.5, atol=1e-6)
    assert emb.export_table("user")[0].tolist() == sorted(IDS), "an unknown id gets no row"


def test_a_model_of_external_tables_only_fits(tmp_path):
    """The anchor is not trainable, so Keras takes no gradient of it."""
    write_source(tmp_path)
    keras.utils.set_random_seed(0)
    emb = layer_of(external("user", tmp_path))
    ids = keras.Input([], dtype=tf.int64)
    model = keras.Model(ids, keras.layers.Dense(1)(emb({"user": ids})["user"]))
    model.compile(keras.optimizers.Adam(0.5), "mse")
    history = model.fit(np.int64(IDS * 4), np.arange(24.0) % 6, epochs=30, batch_size=24, verbose=0).history["loss"]
    assert history[-1] < history[0] and emb.trainable_variables == []


def test_they_are_not_in_checkpoints_of_this_model(tmp_path):
    rows = write_source(tmp_path / "source")["user"]
    own = fr.TableConfig(name="own", dim=4, optimizer=optimizers.SGD(0.5), record_tombstones=True)
    emb = layer_of(external("user", tmp_path / "source"), own)
    lookup(emb, "own", [1, 2])
    saver = fr.checkpoint.Checkpointer(tmp_path / "mine", emb, full_every=2)
    for _ in range(2):
        saver.save()
    saver.wait()
    assert list(read_manifest(tmp_path / "mine")["tables"]) == ["own"]
    again = fr.FusedEmbedding.from_config(emb.get_config())
    fr.checkpoint.load(tmp_path / "mine", again)
    assert again.export_table("own")[0].tolist() == [1, 2]
    np.testing.assert_array_equal(lookup(again, "user", [5]), [rows[5]])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "mixed"])
def test_rows_of_every_storage_come_in_the_dtype_that_is_asked_for(tmp_path, stored):
    rows = write_source(tmp_path, storage=fr.Storage(dtype=stored, hot_after=2 if stored == "mixed" else 0))["item"]
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        made = layer_of(external("item", tmp_path, dtype=dtype.name), name=dtype.name)
        emb = fr.FusedEmbedding.from_config(made.get_config())
        assert emb.get_config() == made.get_config()
        out = emb({"item": tf.constant([3, 77], tf.int64)})["item"]
        assert out.dtype == dtype
        want = tf.cast(tf.constant([rows[3], np.zeros(4)], tf.float32), dtype)
        np.testing.assert_array_equal(tf.cast(out, tf.float32), tf.cast(want, tf.float32))


def test_changes_and_removals_of_a_delta_checkpoint_count(tmp_path):
    table = fr.TableConfig(name="user", dim=4, optimizer=optimizers.SGD(0.5), record_tombstones=True)
    source = layer_of(table, name="source")
    lookup(source, "user", IDS)
    saver = fr.checkpoint.Checkpointer(tmp_path, source, full_every=5)
    saver.save()
    train(source, {"user": tf.constant([3, 9], tf.int64)})
    assert source.remove("user", [5, 99]) == 1
    saver.save()
    saver.wait()
    ids, rows = layer_of(external("user", tmp_path)).export_table("user")
    np.testing.assert_array_equal(ids, source.export_table("user")[0])
    np.testing.assert_array_equal(rows, source.export_table("user")[1])
    assert 9 in ids and 5 not in ids


def test_missing_tables_are_refused_by_name(tmp_path):
    write_source(tmp_path / "source")
    for table, words in (
        (external("u", tmp_path / "nowhere"), "must hold a checkpoint, but .*nowhere.*is missing"),
        (external("u", tmp_path / "source"), r"holds no table 'u' for the external .*\['item', 'user'\]"),
        (external("user", tmp_path / "source", dim=8),
         "dim of the external table 'user' is 8, but table 'user' of checkpoint .*source has 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            layer_of(table)
    for shard in (tmp_path / "source").rglob("user.rows-0.shard"):
        shard.write_bytes(shard.read_bytes()[:-30])
    with pytest.raises(ValueError, match="user.rows-0.shard is truncated"):
        layer_of(external("user", tmp_path / "source"))
