"""Delta exports: base + delta equals the full export in rows and outputs, for both kinds of operations."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model import applying

ROWS, DIM = 9000, 32


def make_model():
    """Returns a model with a full table and a growing one, and the ids of the full one."""
    tables = [
        fr.TableConfig("a.item", DIM, fr.optimizers.SGD(10.0), fr.Uniform(-0.1, 0.1)),  # '.' is escaped in checkpoints
        fr.TableConfig("b", 4, fr.optimizers.SGD(10.0), dtype="bfloat16"),
    ]
    embedding = fr.FusedEmbedding(tables, [fr.FeatureConfig("x", "a.item"), fr.FeatureConfig("y", "b")])
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in "xy"}
    rows = embedding(inputs)
    hidden = tf.concat([rows["x"], tf.cast(rows["y"], tf.float32)], 1)
    model = fr.schedules.PipelinedModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    random = np.random.default_rng(0)
    ids = random.choice(1 << 60, ROWS, replace=False) - (1 << 59)
    fr.checkpoint.warm_start(model, "a.item", ids, random.normal(size=(ROWS, DIM)).astype(np.float32))
    return model, embedding, ids


def changes(delta):
    return {path.name: np.load(path) for path in (delta / "changes").iterdir()}


def ask(folder, questions):
    loaded = tf.saved_model.load(str(folder))
    (answer,) = loaded.signatures["serving_default"](**{k: tf.constant(v) for k, v in questions.items()}).values()
    return answer.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_base_and_delta_are_the_full_export(ops, tmp_path):
    model, embedding, ids = make_model()
    fr.export(model, tmp_path / "1", ops)
    fr.export(model, tmp_path / "nothing", ops, base=tmp_path / "1")
    assert all(len(array) == 0 for array in changes(tmp_path / "nothing").values())

    x = {"x": ids[:3000], "y": np.arange(3000)}
    model.fit(tf.data.Dataset.from_tensors((x, np.ones([3000, 1], np.float32))), verbose=0)
    for lookup in embedding.lookups:
        if "a.item" in lookup.table.names:
            lookup.table.remove("a.item", ids[5000:6000])
    fr.export(model, tmp_path / "2", ops)
    fr.export(model, tmp_path / "delta", ops, base=tmp_path / "1")
    fr.apply_delta(tmp_path / "1", tmp_path / "delta", tmp_path / "3")

    written = changes(tmp_path / "delta")
    np.testing.assert_array_equal(written["a.item.ids.npy"], np.sort(ids[:3000]))
    np.testing.assert_array_equal(written["a.item.removed.npy"], np.sort(ids[5000:6000]))
    np.testing.assert_array_equal(written["b.ids.npy"], np.arange(3000))
    full, applied = applying.read_tables(tmp_path / "2"), applying.read_tables(tmp_path / "3")
    for table in ("a.item", "b"):
        np.testing.assert_array_equal(applied[table][0], full[table][0])
        np.testing.assert_array_equal(applied[table][1], full[table][1])
        np.testing.assert_array_equal(applied[table][0], embedding.export_table(table)[0])
    # Known ids, removed ids, and an unknown one.
    questions = {"x": np.concatenate([ids[:10], ids[5000:5010], [3]]), "y": np.arange(21)}
    answer = ask(tmp_path / "3", questions)
    np.testing.assert_array_equal(answer, ask(tmp_path / "2", questions))
    expected = model({name: tf.constant(values) for name, values in questions.items()}, training=False)
    np.testing.assert_allclose(answer, expected, atol=1e-6)  # the same float32 numbers, perhaps in another order

    with pytest.raises(ValueError, match="does not start from base '.*2': the base has {'version': .*Remedy"):
        fr.apply_delta(tmp_path / "2", tmp_path / "delta", tmp_path / "4")
    assert not (tmp_path / "4").exists()
