"""Checkpoints: written by 1 to 4 real ranks, read by any other number, and refused when they are not whole."""

import json
import pathlib

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.ranks import run_ranks
from tf_fusedrec._tf_compat import keras, tf

INPUTS = {"a": [1, 2, 5, 9, 1], "b": [2, 2, 7, 11, 40]}


def _model(key_encoding="bits"):
    legacy = keras.optimizers.legacy
    emb = fr.FusedEmbedding(
        tables=[
            fr.TableConfig(name="item", dim=4, optimizer=legacy.Adam(0.1)),
            fr.TableConfig(name="tag", dim=4, optimizer=legacy.Adam(0.1), dtype="bfloat16"),
        ],
        features=[fr.FeatureConfig(name="a", table="item"), fr.FeatureConfig(name="b", table="tag")],
        key_encoding=key_encoding,
    )
    a, b = keras.Input([], dtype=tf.int64), keras.Input([], dtype=tf.int64)
    rows = emb({"a": a, "b": b})
    out = keras.layers.Dense(1, kernel_initializer="ones")(rows["a"] + tf.cast(rows["b"], tf.float32))
    return keras.Model({"a": a, "b": b}, out), emb, legacy.Adam(0.1)


def _train(model, optimizer, steps):
    """Steps on this rank's part of INPUTS. Losses are sums over all ranks: any number of ranks makes the same step."""
    rank, size = fr.collectives.rank(), fr.collectives.size()
    inputs = {name: tf.constant(ids[rank::size], tf.int64) for name, ids in INPUTS.items()}
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs) ** 2) * size
        gradients = tape.gradient(loss, model.trainable_variables)
        if size > 1:
            gradients = [fr.collectives.all_reduce_sum(g, name=f"g{i}") / size for i, g in enumerate(gradients)]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def save_after_two_steps(folder):
    """Body: two steps, then a checkpoint."""
    model, emb, optimizer = _model()
    _train(model, optimizer, 2)
    fr.checkpoint.save(folder, model, emb, optimizer, extra={"epoch": 3})


def load_and_train_two_more(folder):
    """Body: loads and goes on; returns what it found and the tables after two more steps."""
    model, emb, optimizer = _model()
    extra = fr.checkpoint.load(folder, model, emb, optimizer)
    _train(model, optimizer, 2)
    dense = [v.numpy() for v in model.weights]
    return extra, {name: emb.export_table(name) for name in ("item", "tag")}, dense


def four_steps():
    """Body: the answer without a checkpoint."""
    model, emb, optimizer = _model()
    _train(model, optimizer, 4)
    return None, {name: emb.export_table(name) for name in ("item", "tag")}, [v.numpy() for v in model.weights]


def _merged(results, table):
    ids = np.concatenate([r[1][table][0] for r in results])
    assert len(np.unique(ids)) == len(ids)
    return np.concatenate([r[1][table][1] for r in results])[np.argsort(ids)].astype(np.float32), np.sort(ids)


@pytest.mark.parametrize(("ranks", "then"), [(1, 3), (2, 1), (3, 4)])
def test_training_goes_on_as_if_nothing_had_happened(ranks, then, tmp_path):
    """Rows, slots, dense weights, Adam's counted steps: all must come back, or the next two steps differ."""
    folder = str(tmp_path / "checkpoint")
    run_ranks(save_after_two_steps, ranks, folder=folder)
    results = run_ranks(load_and_train_two_more, then, folder=folder)
    want = run_ranks(four_steps, 1)
    assert [r[0] for r in results] == [{"epoch": 3}] * then
    for table, tolerance in (("item", 1e-4), ("tag", 2**-7)):  # one float32 sum in another order; one bfloat16 step
        rows, ids = _merged(results, table)
        want_rows, want_ids = _merged(want, table)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_allclose(rows, want_rows, rtol=tolerance, atol=tolerance / 10)
    for got, dense in zip(results[0][2], want[0][2]):
        np.testing.assert_allclose(got, dense, rtol=1e-3, atol=1e-4)


@pytest.fixture
def saved(tmp_path):
    model, emb, optimizer = _model()
    _train(model, optimizer, 1)
    fr.checkpoint.save(tmp_path / "checkpoint", model, emb, optimizer)
    return tmp_path / "checkpoint", model, emb, optimizer


def test_read_tables_gives_all_rows(saved):
    folder, _, emb, _ = saved
    tables = fr.checkpoint.read_tables(folder)
    assert sorted(tables) == ["item", "tag"]
    for name, (ids, rows) in tables.items():
        np.testing.assert_array_equal(ids, emb.export_table(name)[0])
        np.testing.assert_array_equal(rows, emb.export_table(name)[1])


def test_hashed_keys_come_back(tmp_path):
    model, emb, optimizer = _model("hash")
    _train(model, optimizer, 2)
    fr.checkpoint.save(tmp_path / "c", model, emb)
    other, loaded, _ = _model("bits")
    fr.checkpoint.load(tmp_path / "c", other, loaded)
    for name in ("item", "tag"):
        np.testing.assert_array_equal(loaded.export_table(name)[0], emb.export_table(name)[0])
        np.testing.assert_array_equal(loaded.export_table(name)[1], emb.export_table(name)[1])


def test_a_second_save_replaces_the_first(saved):
    folder, model, emb, optimizer = saved
    fr.checkpoint.save(folder, model, emb, optimizer, extra=2)
    assert fr.checkpoint.read_manifest(folder)["extra"] == 2
    assert not list(folder.parent.glob("*.partial"))


def test_a_failed_save_leaves_the_last_one_whole(saved, monkeypatch):
    """A full disk in the middle of a save."""
    folder, model, emb, optimizer = saved
    before = json.loads((folder / "manifest.json").read_text())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        fr.checkpoint.save(folder, model, emb, optimizer)
    assert json.loads((folder / "manifest.json").read_text()) == before
    fr.checkpoint.load(folder, model, emb, optimizer)


def test_what_is_not_whole_is_refused(saved):
    folder, model, emb, optimizer = saved
    file = next((folder / "tables" / "item").glob("rows-0.npy"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])  # truncated
    with pytest.raises(ValueError, match=r"rows-0.npy is damaged \(its checksum differs\)"):
        fr.checkpoint.load(folder, model, emb, optimizer)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit
    with pytest.raises(ValueError, match="is damaged"):
        fr.checkpoint.read_tables(folder)
    file.unlink()
    with pytest.raises(ValueError, match="rows-0.npy is missing"):
        fr.checkpoint.load(folder, model, emb, optimizer)
    (folder / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        fr.checkpoint.load(folder, model, emb, optimizer)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="directory must hold a checkpoint, but .*manifest.json is missing"):
        fr.checkpoint.load(folder, model, emb, optimizer)


def test_a_missing_table_is_refused(saved):
    folder = pathlib.Path(saved[0])
    with pytest.raises(ValueError, match=r"holds no table 'user'. It holds \['item', 'tag'\]"):
        fr.checkpoint.read_shards(folder, "user")


def test_steps_belong_to_tables_not_to_the_group_they_were_in(tmp_path):
    """A model that drops the first table of a group goes on with the other table's Adam where it was."""

    def layer(*names):
        adam = keras.optimizers.legacy.Adam(0.1)
        return fr.FusedEmbedding(
            tables=[fr.TableConfig(name=n, dim=4, optimizer=adam) for n in names],
            features=[fr.FeatureConfig(name=n, table=n) for n in names],
        )

    both, second = layer("first", "second"), layer("second")
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(r) for r in both({n: tf.constant([1]) for n in ("first", "second")}).values())
        tape.gradient(loss, both.trainable_variables)
    dense = keras.Sequential([keras.layers.Dense(1)])
    fr.checkpoint.save(tmp_path / "c", dense, both)
    fr.checkpoint.load(tmp_path / "c", dense, second)
    assert int(second.optimizers["second"].iterations) == 3
    np.testing.assert_array_equal(second.export_table("second")[1], both.export_table("second")[1])
