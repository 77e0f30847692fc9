"""fr.export of a functional model, with either kind of operations: the SavedModel answers as the model does."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model
from tests.support.graphs import saved_operations
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf

# The same float32 numbers; pooled rows are summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model():
    model = click_model.make_model()
    click_model.train(model)
    return model


@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_it_answers_as_the_model(model, ops, tmp_path):
    fr.export(model, tmp_path / "served", ops)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    for seed in (0, 1, 2):
        inputs = click_model.batch(seed)
        expected, answer = model(inputs, training=False), loaded.signatures["serving_default"]
        got = answer(**click_model.served(inputs))
        assert set(got) == {"click", "like"}
        for name in got:
            np.testing.assert_allclose(got[name], expected[name], **CLOSE)
    nothing = {name: value[:0] for name, value in click_model.served(click_model.batch(0)).items()}
    nothing |= {"history_row_splits": tf.zeros([1], tf.int64), "liked_dense_shape": tf.constant([0, 3], tf.int64)}
    assert answer(**nothing)["click"].shape == (0, 1)


def test_the_model_trains_on_as_before(model, tmp_path):
    before = model(click_model.batch(1))["click"]
    fr.export(model, tmp_path / "served")
    np.testing.assert_array_equal(model(click_model.batch(1))["click"], before)
    click_model.train(model, [1])
    assert (model(click_model.batch(1))["click"] != before).numpy().any()


def test_stock_needs_no_operation_but_those_of_tensorflow(model, tmp_path):
    fr.export(model, tmp_path / "stock")
    fr.export(model, tmp_path / "ours", "ours")
    known = {"Horovod", "Fusedrec>", "TFRA>"}
    assert not {op for op in saved_operations(tmp_path / "stock") if any(op.startswith(name) for name in known)}
    assert {op for op in saved_operations(tmp_path / "ours") if "Fusedrec>" in op} >= {"Fusedrec>TableFind"}


@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_unknown_ids_have_rows_of_zeros(ops, tmp_path):
    inputs = {"x": keras.Input([], dtype=tf.int64, name="x")}
    embedding = fr.FusedEmbedding(
        [fr.TableConfig("t", 3, fr.optimizers.SGD(0.1), fr.Constant(2.0))], [fr.FeatureConfig("x", "t")]
    )
    model = keras.Model(inputs, embedding(inputs)["x"])
    fr.export(model, tmp_path / "empty", ops)
    model(({"x": tf.constant([5, click_model.LIMITS.min])}), training=True)
    fr.export(model, tmp_path / "served", ops)
    asked = tf.constant([5, 6, click_model.LIMITS.min, click_model.LIMITS.max, 5])
    for folder, expected in (("empty", [0, 0, 0, 0, 0]), ("served", [2, 0, 2, 0, 2])):
        loaded = tf.saved_model.load(str(tmp_path / folder))
        (rows,) = loaded.signatures["serving_default"](x=asked).values()
        np.testing.assert_array_equal(rows, np.repeat(np.float32(expected)[:, np.newaxis], 3, axis=1))


def test_signatures_of_ones_own(model, tmp_path):
    def first_click(inputs):
        given = {**click_model.batch(0), "user": inputs["users"]}
        return {"first": model(given, training=False)["click"][0]}

    own = {"first_click": fr.Signature(first_click, {"users": tf.TensorSpec([6], tf.int64)})}
    fr.export(model, tmp_path / "served", signatures=own)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    users = click_model.batch(0)["user"]
    got = loaded.signatures["first_click"](users=users)["first"]
    np.testing.assert_allclose(got, model(click_model.batch(0))["click"][0], **CLOSE)


def test_what_is_refused(model, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match=r"path '.*here' exists. Remedy: another folder"):
        fr.export(model, tmp_path / "here")
    with pytest.raises(ValueError, match=r"ops must be one of \('stock', 'ours'\), got 'theirs'"):
        fr.export(model, tmp_path / "served", "theirs")
    with pytest.raises(ValueError, match="no functional Keras model. Remedy: export"):
        fr.export(keras.Sequential([keras.layers.Dense(1)]), tmp_path / "served")
    unborn = keras.Sequential([keras.layers.Dense(1)], name="unborn")
    own = {"s": fr.Signature(lambda inputs: {"y": unborn(inputs["x"])}, {"x": tf.TensorSpec([None, 2])})}
    with pytest.raises(ValueError, match="did not exist before the export"):
        fr.export(unborn, tmp_path / "served", signatures=own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def exported(folder):
    """Body of the ranks: trains on batches of each rank and exports; answers what the models say."""
    answers, rank = {}, fr.collectives.rank()
    for backend in ("native", "tfra"):
        model = click_model.make_model(backend)
        fr.collectives.broadcast_variables(model.variables)
        click_model.train(model, [2 * step + rank for step in range(3)])
        fr.export(model, f"{folder}/{backend}")
        outputs = model(click_model.batch(3), training=False)
        answers[backend] = {name: output.numpy() for name, output in outputs.items()}
    try:
        fr.export(model, f"{folder}/tfra")
    except (ValueError, RuntimeError) as error:
        return answers, str(error)


def test_rows_of_all_ranks(tmp_path):
    for answers, refusal in run_ranks(exported, 3, folder=str(tmp_path)):
        assert "exists. Remedy" in refusal  # on every rank, though rank 0 alone writes
        for backend, expected in answers.items():
            loaded = tf.saved_model.load(str(tmp_path / backend))
            got = loaded.signatures["serving_default"](**click_model.served(click_model.batch(3)))
            for name, value in expected.items():
                np.testing.assert_allclose(got[name], value, **CLOSE)
