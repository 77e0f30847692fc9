"""Ids without a row get equal rows in evaluation and in exports of both kinds, by their table's rule."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.saved_model import click_model
from tf_fusedrec import keras, tf

LIMITS = np.iinfo(np.int64)
KNOWN, UNKNOWN = np.arange(10), np.array([LIMITS.min, LIMITS.max, -1, 77, 2**40])
ASKED = np.concatenate([KNOWN, UNKNOWN, UNKNOWN[::-1]])
# Tables that store new rows in fewer bits than the model's dtype, and one with admission.
TABLES = {
    "plain": {"initializer": fr.Uniform(-1.0, 1.0)},
    "other": {"initializer": fr.Uniform(0.5, 3.0)},  # drawn together with the first
    "half": {"initializer": fr.Normal(0.0, 1.0), "storage": fr.Storage(dtype="float16")},
    "mixed": {"initializer": fr.TruncatedNormal(0.3, 1.0), "storage": fr.Storage(dtype="mixed", hot_after=2)},
    "counted": {"initializer": fr.Normal(0.0, 1.0), "dtype": "bfloat16", "limits": fr.Limits(admission_count=2)},
    "constant": {"initializer": fr.Constant(0.1), "dtype": "float16", "storage": fr.Storage(dtype="float32")},
}
NAMES = [f"{name}_{rule}" for name in TABLES for rule in ("initial", "zeros")]


def make_model():
    """Returns a model, its embedding and its signatures. Every table is there with each rule, and one has no rows."""
    tables = [
        fr.TableConfig(name, 5, fr.optimizers.SGD(1.0), unknown=rule, **TABLES[kind])
        for name, (kind, rule) in ((name, name.split("_")) for name in NAMES)
    ]
    tables.append(fr.TableConfig("empty", 5, fr.optimizers.SGD(1.0), unknown="zeros"))
    embedding = fr.FusedEmbedding([fr.FeatureConfig(table.name, table.name) for table in tables], tables)
    ids = keras.Input([], dtype=tf.int64, name="ids")
    head = keras.layers.Dense(1, "sigmoid", name="click")

    def click(rows):
        return head(keras.layers.Concatenate()(list(rows.values())))

    def answer(inputs):
        rows = embedding(dict.fromkeys([*NAMES, "empty"], inputs["ids"]))
        return {**rows, "click": click({name: rows[name] for name in NAMES})}

    model = keras.Model(ids, click(embedding(dict.fromkeys(NAMES, ids))))
    model.compile("sgd", "mse")
    signature = fr.Signature(answer, {"ids": tf.TensorSpec([None], tf.int64)})
    return model, embedding, {"serving_default": signature}


@pytest.mark.slow
def test_evaluation_and_exports_agree(tmp_path):
    """test_updates.py asks servers for unknown ids after a delta."""
    model, embedding, signatures = make_model()
    for _ in range(2):
        model.fit(tf.constant(KNOWN), np.ones([len(KNOWN), 1], np.float32), batch_size=len(KNOWN), verbose=0)
    asked = tf.constant(ASKED)
    expected = embedding(dict.fromkeys(NAMES, asked), training=False)
    probabilities = model(asked, training=False)
    for ops in ("stock", "ours"):
        fr.export(model, tmp_path / ops, ops, signatures=signatures)
        got = tf.saved_model.load(str(tmp_path / ops)).signatures["serving_default"](ids=asked)
        for name in NAMES:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=f"{ops} {name}")
        assert not got["empty"].numpy().any()
        # float32 rows and weights are equal; sums of 60 products run in another order.
        np.testing.assert_allclose(got["click"], probabilities, rtol=1e-5, atol=1e-6)
    rows = {name: np.asarray(of, np.float32)[len(KNOWN) :] for name, of in expected.items()}
    begun = embedding(dict.fromkeys(NAMES, asked), training=True)
    for name, of in rows.items():
        if name.endswith("zeros"):
            assert not of.any(), name
        else:  # initial rows of training
            np.testing.assert_array_equal(np.asarray(begun[name], np.float32)[len(KNOWN) :], of, err_msg=name)
            assert of.all(), name


@pytest.mark.slow
def test_tables_of_tfra_have_the_rules():
    """One table has each rule. An export knows configs and rows, but no backend."""
    model = click_model.make_model("tfra")
    click_model.train(model, [0])
    ids = tf.constant(np.arange(100, 106))
    unknown = model.get_layer("fused_embedding")({"user": ids, "shown": ids}, training=False)
    assert unknown["shown"].numpy().all() and not unknown["user"].numpy().any()


def test_other_rules_are_refused():
    with pytest.raises(ValueError, match=r"TableConfig.unknown must be one of 'initial', 'zeros', got 'random'"):
        fr.TableConfig("t", 2, fr.optimizers.SGD(0.1), unknown="random")
    with pytest.raises(ValueError, match="is external.* its config sets \\['unknown'\\]"):
        fr.TableConfig("t", 2, external=fr.External("folder"), unknown="zeros")
