"""Exports with rows in bfloat16 or int8: errors within their bounds, deltas, unknown ids, and refusals."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.served_rows import decoded, encoded

KNOWN, NEW, GONE, UNKNOWN = np.arange(8), np.arange(8, 12), np.arange(2), np.array([-1, 2**62])
ASKED = np.concatenate([KNOWN, NEW, UNKNOWN])
FORMS = (("stock", "int8"), ("ours", "bfloat16"), ("ours", "int8"), ("stock", "bfloat16"))
TABLES = {
    "wide": {"initializer": fr.Uniform(-1.0, 1.0)},
    "half": {"initializer": fr.Normal(0.0, 1.0), "storage": fr.Storage(dtype="float16")},
    "short": {"dtype": "bfloat16", "unknown": "zeros"},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports version 1, and version 2 as deltas. Returns the folder, the true rows, and what fr.export takes."""
    folder = tmp_path_factory.mktemp("rows")
    embedding = fr.FusedEmbedding(
        [fr.FeatureConfig(name, name) for name in TABLES],
        [fr.TableConfig(name, 5, fr.optimizers.SGD(0.1), **of) for name, of in TABLES.items()],
    )
    ids = keras.Input([], dtype=tf.int64, name="ids")
    model = keras.Model(ids, keras.layers.Dense(1)(embedding({"wide": ids})["wide"]))
    rows = fr.Signature(
        lambda inputs: embedding(dict.fromkeys(TABLES, inputs["ids"]), training=False),
        {"ids": tf.TensorSpec([None], tf.int64)},
    )
    told = {"signatures": {"serving_default": rows}}
    embedding(dict.fromkeys(TABLES, tf.constant(KNOWN)), training=True)
    truth = {}
    for version, forms in (1, FORMS), (2, FORMS[:3]):
        truth[version] = embedding(dict.fromkeys(TABLES, tf.constant(ASKED)), training=False)
        for ops, form in forms:
            base = folder / f"{ops}-{form}-1" if version == 2 else None
            fr.export(model, folder / f"{ops}-{form}-{version}", ops, row_dtype=form, base=base, **told)
        for name in TABLES:
            values = np.random.default_rng(0).normal(size=(8, 5)) * np.array([[0], [1e-3], *[[1]] * 6])
            fr.checkpoint.warm_start(model, name, np.arange(4, 12), values.astype(np.float32))
        for group in embedding.internals.groups:
            for name in group.table.names:
                group.table.remove(name, GONE)
    return folder, truth, (model, told)


def ask(loaded):
    return loaded.signatures["serving_default"](ids=tf.constant(ASKED))


def check(got, truth, form):
    for name in TABLES:
        rows, wanted = (np.asarray(of[name], np.float32) for of in (got, truth))
        if form == "bfloat16":
            np.testing.assert_allclose(rows, wanted, rtol=2**-8, atol=0)
            continue
        # Half the scale; then float32 rounds the product, and the dtype of the model the row.
        bound = np.abs(wanted).max(axis=1, keepdims=True) * (0.5 / 127 + 2**-22)
        bound = bound + (2**-8 * np.abs(rows) if name == "short" else 0)
        assert (np.abs(rows - wanted) <= bound).all(), name
        if name != "short":
            assert (rows[-2:] == wanted[-2:]).all() and rows[-2:].all()  # Initial rows are not rounded to int8.
            assert (rows[2:8] != wanted[2:8]).any()  # Rows of the table are.


@pytest.mark.slow
@pytest.mark.parametrize(("ops", "form"), FORMS[:3])
def test_rows_and_deltas(exports, ops, form, tmp_path):
    folder, truth, _ = exports
    base, delta = folder / f"{ops}-{form}-1", folder / f"{ops}-{form}-2"
    served = tf.saved_model.load(str(base))
    assert served.signatures["serving_default"].structured_outputs["short"].dtype == tf.bfloat16
    check(ask(served), truth[1], form)
    told = served.signatures["apply_delta"](path=tf.constant(str(delta)))
    check(ask(served), truth[2], form)
    fr.apply_delta(base, delta, tmp_path / "applied")
    applied = tf.saved_model.load(str(tmp_path / "applied"))
    for name, rows in ask(applied).items():
        np.testing.assert_array_equal(rows, ask(served)[name])
    assert applied.signatures["version"]()["version"] == told["version"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_both_kinds_of_operations_give_equal_rows(exports, form):
    """Initial rows, too, although one kind draws them in the hash table."""
    stock, ours = (ask(tf.saved_model.load(str(exports[0] / f"{ops}-{form}-1"))) for ops in ("stock", "ours"))
    for name in TABLES:
        np.testing.assert_array_equal(stock[name], ours[name])


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_a_row_takes_a_byte_per_number_and_a_scale(exports, ops):
    for _, rows in applying.read_tables(exports[0] / f"{ops}-int8-1").values():
        assert rows.shape[1] == 5 + 4


def test_int8_of_extreme_rows():
    tiny, largest = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    rows = np.array([[0, 0], [tiny, -tiny], [100 * tiny, 3 * tiny], [largest, -largest], [1, -127]], np.float32)
    got = decoded(tf.constant(encoded("t", np.arange(len(rows)), rows, "int8"))).numpy()
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    # TensorFlow takes a scale below the smallest normal number as zero.
    bound = np.where(scales < np.finfo(np.float32).tiny, 127 * np.finfo(np.float32).tiny, scales * (0.5 + 2**-15))
    assert np.isfinite(got).all() and (np.abs(got.astype(np.float64) - rows) <= bound).all()
    assert encoded("t", np.zeros(0, np.int64), np.zeros([0, 3], np.float32), "int8").shape == (0, 7)


@pytest.mark.parametrize(("dtype", "number"), [("int8", np.nan), ("float32", -np.inf), ("bfloat16", 3.4e38)])
def test_rows_that_are_not_finite_are_refused_by_id(dtype, number):
    rows = np.array([[1.0, 2.0], [0.0, number]], np.float32)
    name = "float32" if dtype == "int8" else dtype
    with pytest.raises(
        ValueError, match=f"table 't' has 1 rows that are not finite in {name}, the first of id 9. Load"
    ):
        encoded("t", np.array([8, 9]), rows, dtype)


@pytest.mark.slow
def test_refusals(exports, tmp_path):
    folder, _, (model, told) = exports
    with pytest.raises(ValueError, match="row_dtype must be one of .*got 'int4'. Use"):
        fr.export(model, tmp_path / "e", row_dtype="int4", **told)
    with pytest.raises(ValueError, match="same format, ops, tables and rows"):
        fr.export(model, tmp_path / "e", base=folder / "stock-int8-1", **told)
    assert not list(tmp_path.iterdir())
