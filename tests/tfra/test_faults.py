"""FusedTfraEmbedding lacks the faults of upstream's layer in one process; it refuses unsuitable arguments by name."""

import numpy as np
import pytest

from tests.tfra import models
from tf_fusedrec import keras, ops, tf
from tf_fusedrec.data.fingerprint import hash_strings
from tf_fusedrec.files.hash_order import tfra_owner
from tf_fusedrec.tfra import fuse
from tf_fusedrec.tfra.dynamic_embedding import save_model
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.row_distributions import distribution_of, record_of, uniforms
from tf_fusedrec.tfra.row_lookup import partition_by
from tf_fusedrec.tfra.tfra_library import de


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_saved_models_give_the_rows_under_every_loader(tmp_path, fused):
    """B1: upstream silently returns initial rows under tf.saved_model.load and load_model."""
    inputs = [keras.Input([2], dtype=tf.int64, name=f"ids{n}") for n in range(2)]
    layers = [models.layer_of(models.OURS, f"saved_{fused}{n}") for n in range(2)]
    model = keras.Model(inputs, [layer(part) for layer, part in zip(layers, inputs)])
    for n, layer in enumerate(layers):
        layer.params.upsert(tf.range(5, dtype=tf.int64), tf.fill([5, 4], 3.0 + n))
    if fused:
        fuse(model)
    path = str(tmp_path / "model")
    save_model(model, path)
    for part in tmp_path.rglob("TFRADynamicEmbedding"):
        assert list(part.glob("*_mht_1of1_rank0_size1-keys"))
    moved = str((tmp_path / "model").rename(tmp_path / "elsewhere"))
    ids = [tf.constant([[1, 4]], tf.int64), tf.constant([[0, 9]], tf.int64)]

    def check(answers):
        np.testing.assert_array_equal(np.asarray(answers[0])[0, :, 0], np.float32([3, 3]))
        np.testing.assert_array_equal(np.asarray(answers[1])[0, :, 0], np.float32([4, 0.1]))

    check(tf.saved_model.load(moved)(ids))
    check(keras.models.load_model(moved)(ids))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], moved)
        signature = loaded.signature_def["serving_default"]
        feed = {signature.inputs[f"ids{n}"].name: part.numpy() for n, part in enumerate(ids)}
        check(session.run([signature.outputs[name].name for name in sorted(signature.outputs)], feed))


def test_default_initializer_gives_every_key_a_row_of_its_own():
    """B6: upstream's 80 new keys in 10 batches of 8 get 8 rows."""
    layer = models.layer_of(models.OURS, "drawn", initializer=None)
    step = models.training_step(models.SumOfRows([layer]), models.legacy.SGD(0.0))
    for batch in range(10):
        step([tf.range(8 * batch, 8 * batch + 8, dtype=tf.int64)[:, None]], tf.zeros([8]))
    keys, rows = layer.export()
    assert len(keys) == 80 and len(np.unique(rows, axis=0)) == 80
    # A key's row is equal at another lookup and differs in a layer of another name.
    np.testing.assert_array_equal(layer(tf.constant([5, 500], tf.int64))[0], rows[5])
    other = models.layer_of(models.OURS, "drawn_too", initializer=None)
    assert not np.isin(other(tf.constant(keys)).numpy(), rows).any()


def test_rows_of_new_keys_have_the_initializers_distribution():
    keys = tf.range(-20_000, 20_000, dtype=tf.int64)
    drawn = uniforms(keys, tf.zeros_like(keys) + 77, 5)
    kinds = keras.initializers
    cases = {  # initializer: mean, standard deviation, largest absolute value
        kinds.RandomNormal(1.0, 0.5): (1.0, 0.5, None),
        kinds.RandomUniform(-0.3, 0.1): (-0.1, 0.4 / np.sqrt(12), 0.3),
        kinds.TruncatedNormal(0.0, 0.5): (0.0, 0.5 * 0.87962566, 1.0),
        kinds.GlorotUniform(): (0.0, np.sqrt(2 / (95 + 5)), np.sqrt(6 / (95 + 5))),
        kinds.HeNormal(): (0.0, np.sqrt(2 / 95), 2 * np.sqrt(2 / 95) / 0.87962566),
    }
    for initializer, (mean, deviation, largest) in cases.items():
        rows = distribution_of(record_of(initializer, rows=95, dim=5, layer="any"))(drawn).numpy()
        # The mean of 200,000 numbers has the standard error deviation / 450; five of them are allowed.
        assert abs(rows.mean() - mean) < 5 * deviation / 450
        assert abs(rows.std() / deviation - 1) < 0.01
        assert abs(np.corrcoef(rows.T) - np.eye(5)).max() < 0.03
        if largest is not None:
            assert np.abs(rows).max() <= largest * (1 + 1e-6)
    with pytest.raises(ValueError, match="initializer of layer 'any' is Orthogonal, which defines a whole matrix"):
        record_of(kinds.Orthogonal(), rows=95, dim=5, layer="any")


def test_ids_of_32_bits_are_cast_and_other_dtypes_and_sparse_ids_are_refused():
    layer = models.layer_of(models.OURS, "typed")
    assert layer(tf.constant([[1], [2]], tf.int32)).shape == [2, 1, 4]
    with pytest.raises(ValueError, match="ids of layer 'typed' must be int64, got float32"):
        layer(tf.zeros([2]))
    with pytest.raises(ValueError, match="'typed' takes dense or ragged ids, got a SparseTensor"):
        layer(tf.sparse.from_dense(tf.constant([[1, 0]], tf.int64)))


def test_another_number_of_processes_and_scaled_losses_are_refused():
    with pytest.raises(ValueError, match="mpi_size of layer 'ranks' must be 1 or the number of processes, 1, got 3"):
        models.layer_of(models.OURS, "ranks", mpi_size=3)
    layer = models.layer_of(models.OURS, "scaled")
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="'scaled' cannot train under the policy mixed_float16"):
            layer(tf.constant([1], tf.int64))
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Creator(de.CuckooHashTableCreator):
    """A KV creator that fuse does not know."""


def model_of(name, **arguments):
    return models.SumOfRows([models.layer_of(models.OURS, f"{name}{n}", **arguments) for n in range(2)])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("pa", {"partitioner": lambda keys, n: tf.cast(keys % n, tf.int32)}, "'pa0' has a partitioner of its own"),
        ("kv", {"kv_creator": Creator()}, "'kv0' has the KV creator Creator; .* Use de.CuckooHashTableCreator"),
        ("i32", {"key_dtype": tf.int32}, "'i320' has keys of int32; a group's are int64"),
    ],
)
def test_layers_that_no_group_can_hold_are_refused_and_may_stay_alone(name, arguments, message):
    model = model_of(name, **arguments)
    with pytest.raises(ValueError, match=rf"{message}.*\n?.*fuse\(model, leave=\['{name}0'\]\)"):
        fuse(model)
    assert fuse(model, leave=[f"{name}0", f"{name}1"]) == []


def test_models_that_cannot_be_fused_are_refused():
    with pytest.raises(ValueError, match="has no tf_fusedrec.tfra.FusedTfraEmbedding"):
        fuse(keras.Sequential([keras.layers.Dense(1)]))
    model = model_of("twice")
    with pytest.raises(
        ValueError, match=r"leave must name layers .* got \['nobody'\]. Its layers: \['twice0', 'twice1'"
    ):
        fuse(model, leave=["nobody"])
    fuse(model)
    with pytest.raises(ValueError, match="was fused before"):
        fuse(model)
    trained = model_of("trained")
    models.training_step(trained, models.legacy.Adagrad(0.1))([tf.zeros([1, 1], tf.int64)] * 2, tf.zeros([1]))
    with pytest.raises(ValueError, match="have optimizer slots already. Call fuse before the first"):
        fuse(trained)
    negative = model_of("negative")
    negative.embeddings[1].params.upsert(tf.constant([-3], tf.int64), tf.zeros([1, 4]))
    with pytest.raises(ValueError, match="'negative1' holds key -3"):
        fuse(negative)


def native_sgd():
    return models.legacy.SGD(0.1)


class Hops(models.SumOfRows):
    """The second layer's ids are computed from the first layer's rows."""

    def call(self, ids):
        first = self.embeddings[0](ids)
        hop = tf.cast(tf.round(first[..., 0]), tf.int64)
        return tf.reduce_sum(first, axis=[1, 2]) + tf.reduce_sum(self.embeddings[1](hop), axis=[1, 2])


def hops(name, first_id):
    """Returns Hops whose first layer leads from this id <int64>[1] to id 7 of the second."""
    model = Hops([models.layer_of(models.OURS, f"{name}{n}") for n in range(2)])
    model.embeddings[0].params.upsert(first_id, tf.fill([1, 4], 7.0))
    model.embeddings[1].params.upsert(tf.constant([7], tf.int64), tf.fill([1, 4], 5.0))
    return model


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("none", {}, {"optimizer": lambda: None}, "needs the model's optimizer, .* Call it after model.compile"),
        ("clip", {}, {"optimizer": lambda: models.legacy.SGD(0.1, clipnorm=1.0)}, "no counterpart of SGD.clipnorm"),
        ("rule", {}, {"optimizer": lambda: models.legacy.Nadam(0.1)}, "no counterpart of optimizer .*Nadam"),
        ("new", {}, {"optimizer": lambda: keras.optimizers.Adagrad(0.1)}, "Use keras.optimizers.legacy.Adagrad"),
        ("norm", {"max_norm": 0.1}, {}, "'norm0' has max_norm"),
        ("draw", {"initializer": lambda shape, dtype=None: tf.ones(shape)}, {}, "'draw0' has the initializer"),
        ("wide", {"value_dtype": tf.float64}, {}, "'wide0' cannot have a native table: TableConfig.dtype"),
        (
            "limit",
            {"restrict_policy": de.FrequencyRestrictPolicy},
            {},
            "'limit0' has a restrict policy, .*max_rows_per_rank=",
        ),
        ("spare", {}, {"max_rows_per_rank": {"spare0": 9}}, r"max_rows_per_rank names \['spare0'\]"),
    ],
)
def test_native_tables_refuse_what_they_lack(name, arguments, options, message):
    options = {"optimizer": native_sgd, **options}
    optimizer = options.pop("optimizer")()  # the new ones use TensorFlow
    with pytest.raises(ValueError, match=message):
        fuse(model_of(name, **arguments), tables="native", optimizer=optimizer, **options)


def test_native_tables_follow_the_optimizer_that_the_model_was_compiled_with():
    """Its rate and step number count. Lookups without a gradient insert no rows; later ids and old rows train."""
    hashed = hash_strings(["ann"])
    model = hops("native", hashed)
    optimizer = de.DynamicEmbeddingOptimizer(native_sgd())
    model.compile(optimizer, "mse")
    (embedding,) = fuse(model, tables="native")
    data = tf.data.Dataset.from_tensors((hashed[:, tf.newaxis], tf.constant([0.0])))
    for rate, steps in ((0.0, 1), (0.125, 2)):
        optimizer.learning_rate = rate
        model.fit(data, verbose=0)
        assert int(embedding.optimizers["native0"].iterations) == int(optimizer.iterations) == steps
        np.testing.assert_allclose(model.embeddings[1].export()[1], [[5.0 - rate * 2 * 48] * 4])
    for call in (model.predict, model.evaluate, lambda pairs, **_: tf.function(model)(next(iter(pairs))[0])):
        call(data.map(lambda ids, label: (ids + 1, label)), verbose=0)
    assert [len(layer.export()[0]) for layer in model.embeddings] == [1, 1]
    with pytest.raises(AttributeError, match="'native0' has no 'params' .* the FusedEmbedding that fuse"):
        _ = model.embeddings[0].params
    model.compile(de.DynamicEmbeddingOptimizer(native_sgd()), "mse")
    with pytest.raises(ValueError, match="compiled with another SGD than its native tables were made for"):
        model.fit(data, verbose=0)


def test_restrict_policies_of_native_tables_evict_at_max_rows():
    for policy, rest in ((de.FrequencyRestrictPolicy, [1, 3]), (de.TimestampRestrictPolicy, [2, 3])):
        layer = models.layer_of(models.OURS, f"few{rest[0]}", restrict_policy=policy)
        model, optimizer = models.SumOfRows([layer]), native_sgd()
        fuse(model, tables="native", optimizer=optimizer, max_rows_per_rank={layer.name: 2})
        step = models.training_step(model, optimizer)
        for ids in ([1], [1], [2], [3]):
            step([tf.constant([ids], tf.int64)], tf.zeros([1]))
        assert layer.export()[0].tolist() == rest


def test_ids_that_a_group_has_no_room_for_are_refused():
    model = model_of("room")
    fuse(model)
    for bad in (-1, 1 << 61):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"\['room0', 'room1'\] must lie in \[0, 2\^61\). For 64-bit hashes",
        ):
            model([tf.constant([[bad]], tf.int64), tf.constant([[1]], tf.int64)])


@pytest.mark.slow
def test_64_bit_hashes_keep_the_bits_that_a_group_has_room_for(caplog, tmp_path):
    """The model trains as the same layers alone, which need no cut. Saves write no warning about the group."""
    hashes = np.append(hash_strings(["ann", "bob", "cem", ""]), 2**63 - 25)[:, np.newaxis]
    ended = {}
    for fused in (False, True):
        model = models.SumOfRows([models.layer_of(models.OURS, f"hash{fused}{n}") for n in range(2)])
        for layer in model.embeddings:
            layer.params.upsert(tf.constant(hashes[:, 0]), tf.reshape(tf.range(20.0), [5, 4]))
        if fused:
            fuse(model, hashed_ids=True)
        step = models.training_step(model, models.legacy.SGD(0.125))
        losses = [float(step([tf.constant(hashes), tf.constant(hashes[::-1])], tf.ones([5]))) for _ in range(3)]
        order = np.argsort(hashes[:, 0] & (1 << 61) - 1 if fused else hashes[:, 0])
        ids, rows = model.embeddings[0].export()
        assert ids.tolist() == (hashes[order, 0] & (1 << 61) - 1 if fused else hashes[order, 0]).tolist()
        ended[fused] = losses, rows[np.argsort(order)]
    np.testing.assert_allclose(ended[True][0], ended[False][0], rtol=1e-6)
    np.testing.assert_allclose(ended[True][1], ended[False][1], rtol=1e-6)
    for name in ("params", "shadow", "optimizer_vars"):
        with pytest.raises(
            AttributeError,
            match=rf"no '{name}' since fuse\(\): .*'fused_2_layers.*layer.export.* layer.owner.{name} for",
        ):
            getattr(model.embeddings[0], name)
    assert model.embeddings[0].owner.params.size() == 10
    model.save(tmp_path / "saved")
    assert "Skipping full serialization" not in caplog.text
    inputs = [tf.constant(hashes), tf.constant(hashes[::-1])]
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path / "saved"))(inputs), model(inputs))


def test_later_ids_travel_alone_and_calls_in_other_graphs_are_refused():
    model = hops("hop", tf.constant([1], tf.int64))
    fuse(model)
    step = models.training_step(model, models.legacy.SGD(0.125))
    assert float(step(tf.constant([[1]], tf.int64), tf.constant([0.0]))) == (4 * 7.0 + 4 * 5.0) ** 2
    np.testing.assert_allclose(model.embeddings[1].export()[1], [[5.0 - 0.125 * 2 * 48] * 4])

    class Inner(models.SumOfRows):
        def call(self, ids):
            return tf.cond(tf.size(ids[0]) > 3, lambda: self.embeddings[0](ids[0])[:, 0, 0], lambda: tf.zeros([1]))

    inner = Inner([models.layer_of(models.OURS, f"inner{n}") for n in range(2)])
    fuse(inner)
    with pytest.raises(ValueError, match="'inner0' is called inside a tf.function, a tf.cond or a loop"):
        tf.function(inner)([tf.zeros([1, 1], tf.int64)] * 2)


def test_a_layer_alone_has_upstreams_names_and_config():
    # The names differ, because TFRA's creator may refuse a name that the process has used before.
    ours, theirs = (
        models.layer_of(models.OURS, "ours", mpi_size=1),
        models.layer_of(models.UPSTREAM, "theirs", mpi_size=1),
    )
    assert isinstance(ours, models.UPSTREAM)
    assert (ours.params.name, theirs.params.name) == ("ours-parameter", "theirs-parameter")
    assert [v.name for v in ours.weights] == [v.name.replace("theirs", "ours") for v in theirs.weights]
    assert set(theirs.get_config()) <= set(ours.get_config())
    assert isinstance(ours, FusedTfraEmbedding) and ours.layers == ["ours"]


def test_a_partition_function_makes_the_message_of_the_op():
    ids, splits = tf.constant([7, -4, 3, 12, 3, 8], tf.int64), tf.constant([0, 3, 3, 6], tf.int64)
    partition = partition_by(lambda keys, n: tfra_owner(keys.numpy(), n), key_dtype=tf.int64, layer_name="layer")
    for ranks in (1, 2, 3):
        theirs = ops.rank_partition(ids, splits, num_ranks=ranks, owner="tfra")
        ours = partition(ids, splits, num_ranks=ranks)
        for field, value, wanted in zip(ours._fields, ours, theirs):
            np.testing.assert_array_equal(value, wanted[: len(value)], field)


def test_keys_have_the_type_of_the_layer_and_a_rank_that_is_none_is_refused():
    def beyond(keys, ranks):
        assert keys.dtype == tf.int32
        return keys + ranks

    partition = partition_by(beyond, key_dtype=tf.int32, layer_name="layer")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"partitioner of layer 'layer' must give ranks in \[0, 2"):
        partition(tf.constant([0, 1], tf.int64), tf.constant([0, 2], tf.int64), num_ranks=2)
