"""Ids, weights and padding equal plain TensorFlow in every form. Padding and masked ids give zeros without a lookup."""

import itertools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MIN
from tests.support.layers import train
from tf_fusedrec import keras, tf
from tf_fusedrec.files.hash_order import table_seed

DIM, RATE = 4, 0.5
# P stands for the padding id. Samples have padding only, no ids, or padding in the middle and at the end.
P = "P"
SAMPLES = [[3, P, 5, 3], [P, P], [], [9, P], [5]]
WEIGHTS = [[1.0, 7.0, 0.5, 2.0], [1.0, 1.0], [], [3.0, 5.0], [0.25]]
SQUARE = [[3, P, 5], [P, P, P], [9, 3, P]]
SQUARE_WEIGHTS = [[1.0, 7.0, 0.5], [1.0, 2.0, 1.0], [3.0, 0.5, 5.0]]


def with_padding(samples, padding_id):
    return [[padding_id if i == P else i for i in sample] for sample in samples]


def make_layer(padding_id, combiner=None, optimizer=None, table=None, **kwargs):
    return fr.FusedEmbedding(
        [fr.FeatureConfig("f", "item", combiner, padding_id=padding_id)],
        [fr.TableConfig("item", DIM, optimizer or keras.optimizers.SGD(RATE), **(table or {}))],
        **kwargs,
    )


def initial_rows(ids):
    return {i: initial_row_oracle("normal", 0.0, 0.05, table_seed(0, "item") % 2**64, i, DIM) for i in ids}


def plain_pool(rows, sample, weights, combiner):
    """Returns <float>[D] of one sample by TensorFlow's own operations, over the ids that are no padding."""
    kept = [(rows[i], w) for i, w in zip(sample, weights) if i != P]
    if not kept:
        return tf.zeros([DIM])
    total, factors = tf.add_n([row * w for row, w in kept]), [w for _, w in kept]
    norms = {"sum": 1.0, "mean": tf.add_n(factors), "sqrtn": tf.sqrt(tf.add_n([w * w for w in factors]))}
    return total / norms[combiner]


def make_form(form, values, dtype):
    if form == "dense":
        return tf.constant(values, dtype)
    ragged = tf.ragged.constant(values, dtype, ragged_rank=1, row_splits_dtype=tf.int64)
    return ragged if form == "ragged" else ragged.to_sparse()


@pytest.mark.parametrize(("padding_id", "backend"), [(-1, "native"), (-1, "tfra"), (None, "native")])
@pytest.mark.parametrize(  # Weights need a combiner.
    ("combiner", "weighted"), [(None, False), *itertools.product(["sum", "mean", "sqrtn"], [False, True])]
)
@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_rows_and_gradients_are_those_of_plain_tensorflow(form, combiner, weighted, padding_id, backend):
    samples, weights = (SQUARE, SQUARE_WEIGHTS) if form == "dense" else (SAMPLES, WEIGHTS)
    if padding_id is None:
        samples = [[3 if i == P else i for i in sample] for sample in samples]
    emb = make_layer(padding_id, combiner, backend=backend)
    ids = make_form(form, with_padding(samples, padding_id), tf.int64)
    given = [tf.Variable(sample, dtype=tf.float32) for sample in weights]
    plain = {i: tf.Variable(row, dtype=tf.float32) for i, row in initial_rows([3, 5, 9]).items()}
    with tf.GradientTape(persistent=True) as tape:
        flat = tf.concat([w.read_value() for w in given], 0)
        out = emb({"f": ids}, weights={"f": flat} if weighted else None)["f"]
        if combiner is None:
            got = out if form == "dense" else out.flat_values
            wanted = [plain[i].read_value() if i != P else tf.zeros([DIM]) for sample in samples for i in sample]
            wanted = tf.reshape(tf.stack(wanted), tf.shape(got))
        else:
            factors = given if weighted else [tf.ones_like(w) for w in given]
            wanted = tf.stack([plain_pool(plain, s, tf.unstack(f), combiner) for s, f in zip(samples, factors)])
            got = out
        losses = [tf.reduce_sum(tf.sin(7.0 * rows)) for rows in (got, wanted)]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-8)  # sums of four float32 in another order
    _, *ours = tape.gradient(losses[0], [*emb.trainable_variables, *given], unconnected_gradients="zero")
    trained = dict(zip(*emb.export_table("item")))
    assert sorted(trained) == [3, 5, 9]
    for i, row in plain.items():
        np.testing.assert_allclose(trained[i], row - RATE * tape.gradient(losses[1], row), rtol=1e-5, atol=1e-7)
    for got, wanted in zip(ours, tape.gradient(losses[1], given, unconnected_gradients="zero")):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("padding_id", "dtype"), [(-1, tf.int32), (0, tf.int64), (INT64_MIN, tf.int64)])
def test_any_integer_is_padding_in_any_shape(padding_id, dtype):
    emb = make_layer(padding_id)
    rows = initial_rows([3, 5])
    rows[padding_id] = np.zeros(DIM)
    for ids in ([3, padding_id, 5], [[[3, padding_id]], [[padding_id, 5]]], [[padding_id] * 2] * 3):
        got = tf.function(lambda x: emb({"f": x})["f"])(tf.constant(ids, dtype))
        np.testing.assert_allclose(got, np.vectorize(rows.get, signature="()->(d)")(np.array(ids)), rtol=1e-6)
    for empty in (tf.zeros([0], dtype), tf.zeros([0, 3], dtype), tf.zeros([3, 0], dtype)):
        assert emb({"f": empty})["f"].shape == [*empty.shape, DIM]
        assert make_layer(padding_id, "mean")({"f": empty})["f"].shape == [empty.shape[0], DIM]
    assert emb.export_table("item")[0].tolist() == [3, 5]


def test_shapes_that_are_known_only_at_run_time():
    emb = make_layer(-1, "mean")

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def pooled(ids):
        return emb({"f": ids})["f"]

    rows = initial_rows([3, 5])
    np.testing.assert_allclose(pooled([[3, -1, 5], [-1, -1, -1]]), [(rows[3] + rows[5]) / 2, np.zeros(DIM)], rtol=1e-5)
    assert pooled(np.zeros([0, 3])).shape == [0, DIM] and pooled(np.zeros([2, 0])).numpy().tolist() == [[0.0] * DIM] * 2


def test_padding_counts_nowhere():
    table = {"limits": fr.Limits(admission_count=2, ttl=9)}
    emb = make_layer(-1, optimizer=fr.optimizers.SGD(RATE), table=table)
    plain = make_layer(None, optimizer=fr.optimizers.SGD(RATE), table=table)
    for ids in ([3, -1, -1, 5], [-1, 5, -1], [-1, -1]):
        for layer, given in ((emb, ids), (plain, [i for i in ids if i != -1])):
            train(layer, {"f": tf.constant(given, tf.int64)})
    assert emb.internals.groups[0].table.statistics == plain.internals.groups[0].table.statistics
    assert emb.internals.groups[0].table.statistics["item"] == {
        "keys": 1, "hits": 0, "inserts": 1, "evictions": 0, "refused": 2, "candidates": 1, "left_out": 0
    }  # fmt: skip


def test_padding_of_one_feature_is_an_id_of_another():
    table = [fr.TableConfig("item", DIM, fr.optimizers.SGD(RATE))]
    emb = fr.FusedEmbedding([fr.FeatureConfig("f", "item", padding_id=-1), fr.FeatureConfig("g", "item", "sum")], table)
    assert "padding_id" in emb.get_config()["features"][0]
    emb = fr.FusedEmbedding.from_config(emb.get_config())
    out = emb({"f": tf.constant([-1, 3]), "g": tf.constant([[-1, 3]])})
    rows = initial_rows([-1, 3])
    np.testing.assert_allclose(out["f"], [np.zeros(DIM), rows[3]], rtol=1e-6)
    np.testing.assert_allclose(out["g"], [rows[-1] + rows[3]], rtol=1e-5)
    assert emb.export_table("item")[0].tolist() == [-1, 3]


def test_masks_of_keras_are_padding():
    """One mask comes by the attribute of Keras' layers, one by the argument of every Keras layer."""
    ids, mask = tf.constant([[3, 5, 9], [7, 7, 7]], tf.int64), tf.constant([[True, False, True], [False] * 3])
    rows = initial_rows([3, 9])
    marked = tf.identity(ids)
    marked._keras_mask = mask
    for combiner, wanted in ((None, [[rows[3], np.zeros(DIM), rows[9]], np.zeros([3, DIM])]),
                             ("mean", [(rows[3] + rows[9]) / 2, np.zeros(DIM)])):  # fmt: skip
        for inputs, given in ((marked, {}), (ids, {"mask": {"f": mask}})):
            emb = make_layer(None, combiner)
            np.testing.assert_allclose(emb({"f": inputs}, **given)["f"], np.array(wanted), rtol=1e-5)
            assert emb.export_table("item")[0].tolist() == [3, 9]
    both = make_layer(3)({"f": ids}, mask={"f": mask})["f"]
    np.testing.assert_allclose(both[0], [np.zeros(DIM), np.zeros(DIM), rows[9]], rtol=1e-6)
    of_samples = make_layer(None)({"f": ids}, mask={"f": tf.constant([False, True])})["f"]
    assert not of_samples[0].numpy().any() and of_samples[1].numpy().all()
    ragged = tf.RaggedTensor.from_tensor(ids)
    in_form = make_layer(None)({"f": ragged}, mask={"f": tf.RaggedTensor.from_tensor(mask)})["f"]
    np.testing.assert_allclose(in_form[0], [rows[3], np.zeros(DIM), rows[9]], rtol=1e-6)
    nested = tf.ragged.constant([[[3, 9], [9]], [[5]]], tf.int64)
    for given, outer in ((ragged, tf.constant([False, True])), (nested, tf.ragged.constant([[False, True], [True]]))):
        kept = make_layer(None)({"f": given}, mask={"f": outer})["f"].flat_values
        hidden = 3 if given is ragged else 2  # ids of the first sample, or of its first list
        assert not kept[:hidden].numpy().any() and kept[hidden:].numpy().all()


def test_padding_and_masks_follow_sorted_indices():
    # Samples in order: 3 P 5 | 9, with the weights 1 7 .5 | 3. The mask hides id 5.
    order, indices = [3, 1, 2, 0], np.array([[0, 0], [0, 1], [0, 2], [1, 0]])

    def sparse(values, order=order):
        return tf.SparseTensor(indices[order], tf.gather(tf.constant(values), order), [2, 3])

    ids, mask = sparse(np.array([3, -1, 5, 9])), sparse([True, True, False, True], [0, 2, 1, 3])
    weights, rows = sparse([1.0, 7.0, 0.5, 3.0], [1, 0, 3, 2]), initial_rows([3, 9])
    for given in (weights, tf.gather([1.0, 7.0, 0.5, 3.0], order)):
        got = tf.function(make_layer(-1, "sum"))({"f": ids}, weights={"f": given}, mask={"f": mask})["f"]
        np.testing.assert_allclose(got, [rows[3], 3 * rows[9]], rtol=1e-6)
    each = make_layer(-1)({"f": ids}, mask={"f": mask})["f"]
    np.testing.assert_allclose(each.flat_values, [rows[3], np.zeros(DIM), np.zeros(DIM), rows[9]], rtol=1e-6)


@pytest.mark.skipif(
    "dev" in keras.__version__, reason="in Keras 3.16.0.dev, the mask of Keras' own Embedding is lost here, too"
)
def test_later_layers_of_keras_honour_the_mask():
    emb = fr.FusedEmbedding(
        [fr.FeatureConfig("f", "item", padding_id=-1), fr.FeatureConfig("g", "item", "sum", padding_id=-1)],
        [fr.TableConfig("item", DIM, fr.optimizers.SGD(RATE))],
    )
    inputs = {name: keras.Input([None], dtype=tf.int64, name=name) for name in "fg"}
    rows = emb(inputs)
    mean, last = keras.layers.GlobalAveragePooling1D()(rows["f"]), keras.layers.SimpleRNN(3)(rows["f"])
    attended = keras.layers.MultiHeadAttention(1, 2)(rows["f"], rows["f"])  # in Keras 3, it removes their mask
    model = keras.Model(inputs, [mean, last, attended, rows["g"]])
    short, long = [[3, 5], [9, 3]], [[3, 5, -1, -1], [9, 3, -1, -1]]
    got, wanted = (model({"f": tf.constant(ids), "g": tf.constant(ids)}, training=True) for ids in (long, short))
    got[2] = got[2][:, :2]
    for mine, theirs in zip(got, wanted):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert getattr(make_layer(None)({"f": tf.constant(short)})["f"], "_keras_mask", None) is None


def test_a_missing_id_of_a_sample_leaves_the_sample_in_the_loss():
    """Keras leaves masked outputs out of the loss, so ids [B] must bring no mask."""
    inputs = {"f": keras.Input([], dtype=tf.int64, name="f")}
    embedding = make_layer(-1, table={"initializer": fr.Constant(1.0)})
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(embedding(inputs)["f"]))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    # Predictions are 0 for padding and DIM for an id.
    loss = model.evaluate({"f": np.array([-1, 5])}, np.array([[2.0], [DIM]]), verbose=0)
    np.testing.assert_allclose(loss, (2.0**2 + 0) / 2, rtol=1e-6)


def masked_model(embedding, schedule):
    """Returns a model whose ids have padding and the mask of Marked."""
    ids = keras.Input([4], dtype=tf.int64, name="ids")
    masked = Marked()(ids)
    row = keras.layers.GlobalAveragePooling1D()(embedding({"f": masked})["f"])
    model = fr.schedules.PipelinedModel(ids, keras.layers.Dense(1, kernel_initializer="ones")(row), schedule=schedule)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Marked(keras.layers.Layer):
    """Masks id 7."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, inputs):
        return tf.identity(inputs)

    def compute_mask(self, inputs, mask=None):
        return inputs != 7


class Subclassed(fr.schedules.PipelinedModel):
    """Equals masked_model, with the mask as an argument."""

    def __init__(self, embedding, schedule):
        super().__init__(schedule=schedule)
        self.embedding, self.dense = embedding, keras.layers.Dense(1, kernel_initializer="ones")
        self.mean = keras.layers.GlobalAveragePooling1D()
        self.compile(keras.optimizers.SGD(0.1), "mse")

    def call(self, inputs, training=None):
        rows = self.embedding({"f": inputs}, mask={"f": tf.not_equal(inputs, 7)}, training=training)["f"]
        return self.dense(self.mean(rows))


@pytest.mark.slow
def test_schedules_look_ahead_at_the_same_ids():
    ids, labels = np.random.default_rng(0).integers(-1, 12, [32, 4]), np.linspace(0, 1, 32)
    ahead, ended = fr.schedules.DualBuffer(), []
    for make, schedule in ((masked_model, "sync"), (masked_model, ahead), (Subclassed, ahead)):
        emb = make_layer(-1, optimizer=fr.optimizers.Adagrad(0.5))
        make(emb, schedule).fit(tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8), verbose=0)
        ended.append(emb.export_table("item"))
    assert ended[0][0].tolist() == [*range(7), *range(8, 12)]
    for other in ended[1:]:
        for got, wanted in zip(other, ended[0]):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["stock", "ours"])
def test_exports_answer_as_the_model(ops, tmp_path):
    emb = fr.FusedEmbedding(
        [fr.FeatureConfig(n, "item", c, padding_id=-1) for n, c in (("f", None), ("g", "mean"), ("h", "sqrtn"))],
        [fr.TableConfig("item", DIM, fr.optimizers.SGD(RATE))],
    )
    inputs = {name: keras.Input([3], dtype=tf.int64, name=name) for name in "fg"}
    inputs["h"] = keras.Input([None], dtype=tf.int64, name="h", ragged=True)
    rows = emb(inputs)
    model = keras.Model(
        inputs, {"each": keras.layers.GlobalAveragePooling1D()(rows["f"]), "mean": rows["g"], "root": rows["h"]}
    )
    ids = tf.constant([[3, -1, 5], [-1, -1, -1]], tf.int64)
    batch = {"f": ids, "g": ids, "h": tf.RaggedTensor.from_tensor(ids)}
    wanted = model(batch, training=True)
    fr.export(model, tmp_path / "served", ops)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    h = batch["h"]
    got = loaded.signatures["serving_default"](f=ids, g=ids, h=h.values, h_row_splits=h.row_splits)
    for name, expected in wanted.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "mask", "words"),
    [
        ([1], [1], "mask of feature 'f' must be bool, got int64"),
        ([1], [[True]], r"mask of feature 'f' must have the shape of its ids or of their first .*, got \(1, 1\) for"),
        (
            [[1, 2, 3], [4, 5, 6]],
            [[True] * 2] * 3,
            r"mask of feature 'f' must have the shape of its ids or .*, got \(3, 2\)",
        ),
        ([1], object(), "mask of feature 'f' must be a Tensor, RaggedTensor or SparseTensor, got object"),
    ],
)
def test_bad_masks_are_refused_by_name(inputs, mask, words):
    with pytest.raises(ValueError, match=words):
        make_layer(None)({"f": np.array(inputs)}, mask={"f": np.array(mask) if isinstance(mask, list) else mask})


def test_bad_padding_is_refused():
    with pytest.raises(ValueError, match="Ids of feature 'f' must be int32 or int64, got string"):
        make_layer(-1)({"f": tf.constant(["a"])})
    for wrong in (True, 1.0, "a", 2**63):
        with pytest.raises(ValueError, match="padding_id must be None or an int64, got .* for feature 'f'"):
            fr.FeatureConfig("f", "item", padding_id=wrong)
    with pytest.raises(ValueError, match=r"mask of .* hold unknown features \['q'\]"):
        make_layer(None)({"f": np.array([1])}, mask={"q": np.array([True])})
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="mask of feature 'f' must be one per id"):
        ragged = tf.ragged.constant([[1, 2]], tf.int64)
        make_layer(None)({"f": ragged}, mask={"f": tf.ragged.constant([[True]])})
    lie = tf.RaggedTensor.from_row_splits(tf.constant([1, -1], tf.int64), tf.constant([0, 1], tf.int64), validate=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits of feature 'f' must run from 0 to"):
        make_layer(-1, "sum")({"f": lie})
