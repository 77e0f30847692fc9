"""FusedEmbedding in one process: forms of input, training against the oracle, refusals."""

import functools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.initial_rows import initial_row_oracle
from tests.oracles.rank_partition import mix64
from tests.support.ids import INT64_MIN
from tests.support.layers import train
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.files.hash_order import table_seed

SGD, Adagrad = keras.optimizers.SGD, keras.optimizers.Adagrad


def table(name="item", dim=4, optimizer=None, **kwargs):
    return fr.TableConfig(name=name, dim=dim, optimizer=optimizer or SGD(0.5), **kwargs)


def layer(*features, tables=None, **kwargs):
    return fr.FusedEmbedding(tables=tables or [table()], features=features, **kwargs)


def feature(name="f", table="item", combiner=None):
    return fr.FeatureConfig(name=name, table=table, combiner=combiner)


def initial(name, dim, seed=0):
    return lambda i: initial_row_oracle("normal", 0.0, 0.05, table_seed(seed, name) % 2**64, i, dim)


SAMPLES = [[3, 5, 3], [], [9], [5, 7]]


def unsorted(values):
    """A SparseTensor whose indices come in another order for ids than for weights."""
    sparse = tf.ragged.constant(values, row_splits_dtype=tf.int64).to_sparse()
    order = np.random.default_rng(int(sparse.dtype.is_integer)).permutation(len(sparse.values))
    return tf.SparseTensor(tf.gather(sparse.indices, order), tf.gather(sparse.values, order), sparse.dense_shape)


FORMS = {
    "ragged": lambda values: tf.ragged.constant(values, row_splits_dtype=tf.int64),
    "sparse": lambda values: tf.ragged.constant(values, row_splits_dtype=tf.int64).to_sparse(),
    "unsorted_sparse": unsorted,
    "ragged_int32_splits": lambda values: tf.ragged.constant(values, row_splits_dtype=tf.int32),
}


@pytest.mark.parametrize("form", FORMS)
def test_ragged_and_sparse_without_combiner(form):
    out = layer(feature())({"f": tf.cast(FORMS[form](SAMPLES), tf.int64)})["f"]
    assert isinstance(out, tf.RaggedTensor) and out.shape.as_list() == [4, None, 4]
    rows = initial("item", 4)
    for got, ids in zip(out, SAMPLES):
        np.testing.assert_allclose(got, np.array([rows(i) for i in ids]).reshape(-1, 4), rtol=1e-6)


def test_nested_ragged_without_combiner():
    ids = tf.ragged.constant([[[1, 2], []], [[3]]], dtype=tf.int64)
    out = layer(feature())({"f": ids})["f"]
    assert out.shape.as_list() == [2, None, None, 4]
    np.testing.assert_array_equal(out.row_lengths(axis=2).flat_values, [2, 0, 1])


@pytest.mark.parametrize("backend", ["native", "tfra"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_training_with_shared_tables_equals_plain_tensorflow(rule, graph, backend):
    """Two features share a table, and a third has its own. Gradients depend on the rows, so a wrong row shows."""
    optimizer = {"sgd": SGD, "adagrad": Adagrad}[rule](0.5)
    tables = [table("item", optimizer=optimizer), table("user", optimizer=optimizer)]
    emb = layer(
        feature("a"), feature("b", combiner="mean"), feature("u", "user", "sum"), tables=tables, backend=backend
    )
    assert len(emb.internals.groups) == 1
    inputs = {
        "a": tf.constant([3, 5, 3]),
        "b": tf.ragged.constant([[5, 9], [], [3, 3, 1]], dtype=tf.int64),
        "u": tf.ragged.constant([[1], [1, 2], [7]], dtype=tf.int64),
    }

    def loss_of(a, b, u):
        return tf.reduce_sum(a**2) + tf.reduce_sum(b**3) + tf.reduce_sum(u * 0.5)

    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(**emb(inputs))
        tape.gradient(loss, emb.trainable_variables)
        return loss

    plain = {name: tf.constant([initial(name, 4)(i) for i in range(10)]) for name in ("item", "user")}
    squares = dict.fromkeys(plain, 0.1)
    run = tf.function(step) if graph else step
    for _ in range(4):
        with tf.GradientTape() as tape:
            tape.watch(plain)
            sums = [tf.reduce_sum(tf.gather(plain[name], inputs[f]), 1) for name, f in (("item", "b"), ("user", "u"))]
            loss = loss_of(tf.gather(plain["item"], inputs["a"]), sums[0] / [[2.0], [1.0], [3.0]], sums[1])
        np.testing.assert_allclose(run(), loss, rtol=1e-4, atol=1e-7)
        for name, gradient in tape.gradient(loss, plain).items():
            gradient = tf.convert_to_tensor(gradient)
            squares[name] += gradient**2
            plain[name] -= 0.5 * gradient / (tf.sqrt(squares[name]) if rule == "adagrad" else 1.0)
    for name, looked_up in (("item", [1, 3, 5, 9]), ("user", [1, 2, 7])):
        ids, rows = emb.export_table(name)
        assert ids.tolist() == looked_up
        # float32 rows after four steps; Adagrad divides by roots near 0.3, which multiplies the rounding of gradients.
        np.testing.assert_allclose(rows, tf.gather(plain[name], looked_up), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "tfra"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_tables_train(dtype, backend):
    emb = layer(
        feature(combiner="sum"), backend=backend, tables=[table(dtype=dtype, initializer=fr.Constant(value=1.0))]
    )
    out = train(emb, {"f": tf.constant([[1, 1], [1, 2]])})["f"]
    assert out.dtype == dtype
    assert emb.export_table("item")[1].dtype == dtype, "stored in 16 bits"
    np.testing.assert_array_equal(emb.export_table("item")[1].astype(np.float32), [[-0.5] * 4, [0.5] * 4])


# Ways to train one step of two towers that share a table. Each calls towers(x, calls) of a layer and its batch.
def _in_tape(emb, towers, batches, calls, wrap=lambda f: f, wrap_forward=lambda f: f):
    forward = wrap_forward(lambda x: tf.reduce_mean(towers(emb, x, calls)))

    @wrap
    def step(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        tape.gradient(loss, emb.trainable_variables)

    for x in batches:
        step(x)


def _in_fit(emb, towers, batches, calls, functional=False, **options):
    class Towers(fr.schedules.PipelinedModel):
        def __init__(self):
            super().__init__(**options)
            self.emb = emb

        def call(self, x):
            return towers(self.emb, x, calls)

    model = Towers
    if functional:
        inputs = {"a": keras.Input([2], dtype=tf.int64), "b": keras.Input([], dtype=tf.int64)}
        outputs = towers(emb, inputs, calls)
        model = functools.partial(fr.schedules.PipelinedModel, inputs, outputs, **options)
    model = model()
    model.compile("sgd", loss=lambda y, score: tf.reduce_mean(score))
    data = tf.data.Dataset.from_tensor_slices({name: tf.concat([x[name] for x in batches], 0) for name in "ab"})
    model.fit(data.map(lambda x: (x, 0.0)).batch(len(batches[0]["b"])), verbose=0)


WAYS = {
    "eager": _in_tape,
    "traced": functools.partial(_in_tape, wrap=tf.function),
    "forward_traced": functools.partial(_in_tape, wrap_forward=tf.function),
    "subclass": _in_fit,
    "functional": functools.partial(_in_fit, functional=True),
    **{
        type(schedule).__name__: functools.partial(_in_fit, functional=True, schedule=schedule)
        for schedule in (fr.schedules.FrozenWindow(2), fr.schedules.DualBuffer(), fr.schedules.SemiAsync())
    },
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way[0].isupper() else []) for way in WAYS]
)
def test_calls_of_one_step_train_as_one_call(way):
    tables = [table("first", optimizer=fr.optimizers.Adagrad(0.5)), table("second", optimizer=fr.optimizers.Adam(0.1))]
    features = [feature(f"{x}_{t.name}", t.name, "mean" if x == "a" else None) for t in tables for x in "ab"]

    def towers(emb, x, calls):
        halves = [{f"{half}_{t.name}": x[half] for t in tables} for half in "ab"]
        rows = emb({**halves[0], **halves[1]}) if calls == 1 else {**emb(halves[0]), **emb(halves[1])}
        return keras.layers.Lambda(
            lambda rows: tf.reduce_sum(sum(tf.sin(a) * b for a, b in zip(rows[::2], rows[1::2])), 1)
        )([rows[f"{half}_{t.name}"] for t in tables for half in "ab"])

    random = np.random.default_rng(3)
    batches = [{"a": random.integers(0, 9, [4, 2]), "b": random.integers(0, 9, [4])} for _ in range(3)]
    layers = {calls: layer(*features, tables=tables) for calls in (1, 2)}
    for calls, emb in layers.items():
        WAYS[way](emb, towers, batches, calls)
    for groups in zip(*(emb.internals.groups for emb in layers.values())):
        (ids, one), (ids_of_calls, calls) = (group.table.snapshot(group.table.names[0]) for group in groups)
        assert [int(group.table.optimizer.iterations) for group in groups] == [len(batches)] * 2
        np.testing.assert_array_equal(ids_of_calls, ids)
        for field in one.dtype.names[4:]:
            # A row's gradients of one call are added before those of the other: another order of few summands.
            np.testing.assert_allclose(calls[field], one[field], rtol=1e-5, atol=1e-7, err_msg=field)


@pytest.mark.parametrize("way", ["traced", "SemiAsync"])
def test_one_table_of_a_layer_is_frozen(way):
    tables = [table(name, optimizer=fr.optimizers.Adam(0.1), trainable=name != "frozen") for name in ("frozen", "item")]
    features = [feature("a", "frozen", "mean"), feature("b", "item")]
    emb = layer(*features, tables=tables)
    assert [group.table.names for group in emb.internals.groups] == [["frozen"], ["item"]]
    frozen = emb.internals.groups[0].table
    frozen.restore("frozen", "rows", np.arange(4), frozen.new_records("frozen", 4))
    batches = [{"a": np.array([[1, 2], [3, 9]]), "b": np.array([1, 9])}] * 2

    def towers(emb, x, calls):
        rows = emb(x)
        return keras.layers.Lambda(lambda rows: tf.reduce_sum((1.0 + rows[0]) * rows[1], 1))([rows["a"], rows["b"]])

    WAYS[way](emb, towers, batches, 1)
    ids, rows = emb.export_table("frozen")
    np.testing.assert_array_equal(ids, np.arange(4))
    np.testing.assert_array_equal(rows, np.zeros([4, 4]))
    assert np.abs(emb.export_table("item")[1] - [initial("item", 4)(i) for i in (1, 9)]).min() > 0.05
    assert "trainable=False" in emb.describe()
    assert not layer(feature(), tables=[table(trainable=False)]).trainable_variables


class TwoLayers(keras.Model):
    """Towers with layers of their own, which compute side by side, as tensorflow_recommenders has them."""

    def __init__(self, *layers):
        super().__init__()
        self.towers = [keras.Sequential([layer]) for layer in layers]

    def train_step(self, x, training=(True, True)):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(emb(x, training=t)["f"]) for emb, t in zip(self.towers, training))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


class StudentAndTeacher(TwoLayers):
    def train_step(self, x):
        return super().train_step(x, (True, False))


@pytest.mark.parametrize("eagerly", [False, True])
def test_two_layers_of_one_model_train_no_table_of_one_name(eagerly):
    data = tf.data.Dataset.from_tensors({"f": tf.constant([1, 2])})
    layers = [layer(feature(), name=name) for name in "qc"]
    for kind in (StudentAndTeacher, TwoLayers):
        model = kind(*layers)
        model.compile("sgd", run_eagerly=eagerly)
        if kind is StudentAndTeacher:
            keras.models.clone_model(model.towers[1])
            model.fit(data, verbose=0)
            continue
        with pytest.raises(ValueError, match="layers 'q' and 'c' of model .* both train a table 'item'.* Use one"):
            model.fit(data, verbose=0)
    with tf.GradientTape() as tape:  # layers of two models
        loss = sum(tf.reduce_sum(layer(feature())({"f": tf.constant([1])})["f"]) for _ in range(2))
    tape.gradient(loss, [])


def test_a_tower_that_the_loss_leaves_out_is_not_trained():
    emb = layer(feature(), tables=[table(initializer=fr.Constant(1.0))])
    with tf.GradientTape(persistent=True) as tape:
        used, unused = (emb({"f": tf.constant([i, 2])})["f"] for i in (1, 3))
        losses = tf.reduce_sum(used), tf.reduce_sum(unused)
    tape.gradient(losses[0], emb.trainable_variables)
    np.testing.assert_array_equal(emb.export_table("item")[1][:, 0], [0.5, 0.5, 1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="was trained twice from lookups of the same step"):
        tape.gradient(losses[1], emb.trainable_variables)


def test_calls_of_one_step_keep_rows_that_may_leave():
    tables = [table(limits=fr.Limits(max_rows_per_rank=4, eviction="lru"), initializer=fr.Constant(1.0))]
    emb = layer(feature(), tables=tables)

    def step(*calls):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(emb({"f": tf.constant(ids)})["f"]) for ids in calls)
        tape.gradient(loss, emb.trainable_variables)

    step([7, 8])
    step([1], [2], [2, 3, 4])
    ids, rows = emb.export_table("item")
    assert ids.tolist() == [1, 2, 3, 4] and rows[:, 0].tolist() == [0.5, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (lambda call: tf.cond(tf.size([1]) > 0, call, lambda: tf.zeros([1, 4])), "inside a tf.cond or tf.while_loop"),
        (lambda call: tf.function(call)(), "was trained twice .* make all calls of a step outside"),
    ],
)
def test_a_call_that_no_step_can_share_is_refused(inside, words):
    emb = layer(feature())

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(emb({"f": ids})["f"] + inside(lambda: emb({"f": ids})["f"]))
        tape.gradient(loss, emb.trainable_variables)

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=words):
        step(tf.constant([1]))


@pytest.mark.parametrize(
    ("inputs", "weights", "words"),
    [
        ({"g": [1]}, None, r"inputs of 'fused_embedding' hold unknown features \['g'\]. Known features: \['f', 'p'\]"),
        ({}, None, "must be a dict from feature names"),
        ({"f": [1.5]}, None, "Ids of feature 'f' must be int32 or int64, got float32"),
        ({"f": ["a"]}, None, "Ids of feature 'f' must be int32 or int64, got string"),
        pytest.param(
            {"f": object()}, None, "feature 'f' must be a Tensor, RaggedTensor or SparseTensor, got object",
            marks=pytest.mark.legacy,
        ),
        ({"f": np.array(3)}, None, "Ids of feature 'f' must have a known rank of at least 1"),
        ({"f": [1]}, {"f": [1.0]}, "Feature 'f' got weights, but its combiner is None"),
        ({"p": [1]}, {"p": [1]}, "Weights of feature 'p' must be floats, got int"),
        ({"p": [1]}, {"q": [1.0]}, r"weights of 'fused_embedding' hold unknown features \['q'\]"),
        ({"p": [[[1]]]}, None, r"with combiner 'sum' must have shape \[B\] or \[B, L\]"),
    ],
)  # fmt: skip
def test_bad_inputs_are_refused_by_name(inputs, weights, words):
    def arrays(named):  # Keras 3 takes no lists
        return {name: np.array(value) if isinstance(value, list) else value for name, value in (named or {}).items()}

    with pytest.raises(ValueError, match=words):
        layer(feature("f"), feature("p", combiner="sum"), name="fused_embedding")(
            arrays(inputs), weights=arrays(weights) or None
        )


ragged, sparse, ROWS = FORMS["ragged"], FORMS["sparse"], [[3, 5], [9]]
# The weights and masks have as many values as the ids.
OTHER_ROWS = {
    "ragged": lambda: (ragged(ROWS), ragged([[1.0], [2.0, 3.0]])),
    "ragged and no sample": lambda: (
        tf.ragged.constant([[], []], tf.int64),
        tf.RaggedTensor.from_row_splits(tf.zeros([0]), [0]),
    ),
    "ragged and dense": lambda: (ragged(ROWS), tf.constant([[1.0, 2.0, 3.0]])),
    "ragged and sparse": lambda: (ragged(ROWS), sparse([[1.0], [2.0, 3.0]])),
    "sparse": lambda: (unsorted(ROWS), unsorted([[1.0], [2.0, 3.0]])),
    "sparse and other columns": lambda: (sparse(ROWS), tf.SparseTensor([[0, 0], [0, 2], [1, 0]], [1.0] * 3, [2, 3])),
    "sparse and more samples": lambda: (sparse(ROWS), tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [1.0] * 3, [3, 2])),
    "sparse and ragged": lambda: (sparse(ROWS), ragged([[1.0], [2.0, 3.0]])),
    "dense": lambda: (tf.constant([[3, 5, 9]]), tf.constant([[1.0], [2.0], [3.0]])),
    "dense and fewer columns": lambda: (tf.constant([[3, 5]]), tf.constant([[1.0]])),
    "dense [B]": lambda: (tf.constant([3, 5, 9]), tf.constant([[1.0, 2.0, 3.0]])),
    "dense [B] and ragged": lambda: (tf.constant([3, 5, 9]), ragged([[1.0, 2.0], [3.0], []])),
    "dense and ragged": lambda: (tf.constant([[3, 5], [9, 7]]), ragged([[1.0], [2.0, 3.0, 4.0]])),
}


@pytest.mark.parametrize(("kind", "graph"), [("weights", True), ("mask", False)])
@pytest.mark.parametrize("made", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_weights_and_masks_of_other_rows_are_refused(made, kind, graph):
    ids, weights = made()
    emb = layer(feature("p", combiner="sum"))
    given = weights if kind == "weights" else tf.cast(weights, tf.bool)

    def call(ids, given):
        return emb({"p": ids}, **{kind: {"p": given}})

    words = "one per id, in the rows of its ids. Use|must have the shape of its ids or of their first dimensions"
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=words):
        (tf.function(call, reduce_retracing=True) if graph else call)(ids, given)


def test_rows_may_have_another_form_than_the_ids():
    emb = layer(feature("p", combiner="sum"))
    one, rows = initial("item", 4), {}
    for name, ids, weights in (
        ("flat", sparse(ROWS), tf.constant([1.0, 2.0, 3.0])),
        ("sparse", ragged(ROWS), unsorted([[1.0, 2.0], [3.0]])),
        ("ragged", unsorted(ROWS), FORMS["ragged_int32_splits"]([[1.0, 2.0], [3.0]])),
        ("dense", tf.constant([[3, 5], [9, 7]]), tf.constant([[1.0, 2.0], [3.0, 0.0]])),
    ):
        rows[name] = emb({"p": ids}, weights={"p": weights})["p"]
        np.testing.assert_allclose(rows[name], [one(3) + 2 * one(5), 3 * one(9)], rtol=1e-5, atol=1e-8)
    # Column 1 stands before column 0 here, and so does its weight.
    backwards = tf.SparseTensor([[0, 1], [0, 0]], tf.constant([5, 3], tf.int64), [1, 2])
    got = emb({"p": backwards}, weights={"p": tf.constant([2.0, 1.0])})["p"]
    np.testing.assert_allclose(got, rows["flat"][:1], rtol=1e-6)
    got = emb({"p": tf.constant([3, 9])}, weights={"p": tf.constant([[1.0], [3.0]])})["p"]
    np.testing.assert_allclose(got, [one(3), 3 * one(9)], rtol=1e-6)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([[0, 0], [2, 0]], "Indices of the SparseTensor of feature .* must be inside its dense_shape"),
        ([[0, -1], [1, 0]], "Indices of the SparseTensor of feature .* must be inside its dense_shape"),
        ([[1, 1], [1, 1]], "Indices of the SparseTensor of feature .* must occur once each, got an index twice"),
    ],
)
def test_indices_that_name_no_place_are_refused(indices, words):
    emb = layer(feature("p", combiner="sum"))
    for call in (emb, tf.function(emb)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            call({"p": tf.SparseTensor(indices, tf.constant([3, 5], tf.int64), [2, 2])})


def test_ids_and_key_encodings():
    """With two tables in one TFRA group, 'bits' refuses an id below 0 by its table, and 'hash' takes every int64."""
    tables = [table("item"), table("user")]
    features = [feature("f"), feature("u", "user")]
    inputs = {"f": tf.constant([1]), "u": tf.constant([INT64_MIN, -1], tf.int64)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="id -9223372036854775808 of table 'user' does not fit"):
        layer(*features, tables=tables, backend="tfra")(inputs)
    hashed = layer(*features, tables=tables, key_encoding="hash", backend="tfra")
    train(hashed, inputs)
    assert hashed.export_table("user")[0].tolist() == [INT64_MIN, -1]
    assert hashed.export_table("item")[0].tolist() == [1]
    alone = layer(feature(), backend="tfra")  # a group of one needs no bits for the table: any id
    assert alone({"f": tf.constant([INT64_MIN, -1], tf.int64)})["f"].shape == [2, 4]


def test_unknown_tables_and_key_encodings_are_refused():
    with pytest.raises(ValueError, match="has no table 'nope'. Known tables"):
        layer(feature(), key_encoding="hash", backend="tfra").export_table("nope")
    with pytest.raises(ValueError, match="key_encoding must be one of"):
        layer(feature(), key_encoding="md5", backend="tfra")


def test_hash_keys_are_those_of_the_c_plus_plus_mix():
    from tf_fusedrec.tfra.table import NameHash  # needs tf_keras

    ids, names = [0, 1, -1, INT64_MIN, 12345], ["item", "user"]
    for s, name in enumerate(names):
        got = NameHash(names).encode(tf.constant(ids, tf.int64), tf.fill([5], tf.constant(s, tf.int64)))
        assert [int(k) % 2**64 for k in got] == [mix64(i ^ table_seed(0, name)) for i in ids]
