"""FeatureConfig(output_dtype) halves the feature's bytes and makes one update of the table, on one rank and on two."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.losses import negatives

DIM = 4


def make_layer(output_dtype=None, **arguments):
    table = fr.TableConfig("item", DIM, optimizer=fr.optimizers.Adam(0.1))
    features = [fr.FeatureConfig("positive", "item"), fr.FeatureConfig("negative", "item", output_dtype=output_dtype)]
    return fr.FusedEmbedding(features, [table], seed=3, **arguments)


def trained(output_dtype, batches, scale=1.0):
    """Returns the rows of the table after a step with every batch, and the outputs of the calls, by feature."""
    fr.init()
    layer = make_layer(output_dtype)
    answers = []

    @tf.function(reduce_retracing=True)
    def step(positive, negative):
        with tf.GradientTape() as tape:
            rows = layer({"positive": positive, "negative": negative})
            wide = negatives.widened(rows["negative"], tf.float32)
            # Gradients that do not depend on the rows: both layers must then train alike.
            weights = tf.range(1.0, 1.0 + DIM) * scale
            loss = tf.reduce_sum(rows["positive"] * weights) - 2 * tf.reduce_sum(wide * weights[::-1])
        tape.gradient(loss, layer.trainable_variables)
        return rows

    for positive, negative in batches:
        rows = step(tf.constant(positive, tf.int64), tf.constant(negative, tf.int64))
        answers.append({name: value.numpy() for name, value in rows.items()})
    return dict(zip(*layer.export_table("item"))), answers


BATCHES = [([1, 2, 2, 9], [2, 3, 3, 3, 7]), ([3], []), ([], [5]), ([], []), ([2, 3], [2, 9])]


def test_one_process_trains_the_sum_of_both_features_once():
    (plain, wide), (half, narrow) = (trained(dtype, BATCHES) for dtype in (None, "float16"))
    assert sorted(plain) == sorted(half)
    for item in plain:
        np.testing.assert_allclose(half[item], plain[item], rtol=1e-6)  # float32, another order of summation
    for first, second in zip(wide, narrow):
        assert (second["negative"].dtype, second["positive"].dtype) == (np.float16, np.float32)
        np.testing.assert_allclose(second["positive"], first["positive"], rtol=1e-6)
        # Half an ulp of float16, of values that may differ by the last bit of float32.
        np.testing.assert_allclose(second["negative"], first["negative"], rtol=2**-11 * 1.01, atol=2**-25)
    assert tf.as_dtype(narrow[0]["negative"].dtype) == tf.float16


def _on_rank(output_dtype, scale):
    fr.init()
    sent: dict[str, list] = {}
    honest = collectives.all_to_all

    def counted(tensor, splits, *, name, **ranks):
        received, received_splits = honest(tensor, splits, name=name, **ranks)
        sent.setdefault(name.rpartition(".")[2], []).append((name, tensor.dtype.size))
        return received, received_splits

    collectives.all_to_all = counted
    # Uneven on purpose: rank 1 has nothing in two of the steps.
    mine = BATCHES if fr.rank() == 0 else [([1, 4], [4, 8, 2]), ([], []), ([7], [3]), ([], []), ([2], [2])]
    rows, _ = trained(output_dtype, mine, scale)
    return rows, sent


def test_two_ranks_send_half_and_train_alike():
    # As in a mean over ten million positions: below the smallest float16, 6e-8, and Adam sees their signs.
    for result in zip(*(run_ranks(_on_rank, 2, output_dtype=dtype, scale=1e-8) for dtype in (None, "float16"))):
        (plain, before), (half, after) = result
        assert sorted(plain) == sorted(half)
        for item in plain:
            # bfloat16 gradients: 2**-9 of each, in steps of at most 0.1 in five updates.
            np.testing.assert_allclose(half[item], plain[item], atol=0.1 * 5 * 2**-8)
        assert {size for _, size in before["rows"]} == {4}
        # Two further all-to-alls, as FeatureConfig says: the ids of both dtypes travel together.
        assert [len(after[kind]) / len(before[kind]) for kind in ("ids", "rows", "gradients")] == [1, 2, 2]
        for kind in ("rows", "gradients"):
            assert {("float16" in name, size) for name, size in after[kind]} == {(False, 4), (True, 2)}


def test_refusals():
    with pytest.raises(ValueError, match="output_dtype must be None or one of .* got 'int8' for feature 'negative'"):
        make_layer("int8")
    with pytest.raises(TypeError, match="must get no dtype, got 'float16'. Use TableConfig"):
        make_layer(dtype="float16")


@pytest.mark.parametrize("backend", ["native", "tfra"])
def test_one_dtype_for_all_features_needs_one_lookup(backend):
    """Every table supports one dtype. Several need answers in parts, which TFRA's tables lack."""

    def layer(*dtypes):
        table = fr.TableConfig("item", DIM, optimizer=keras.optimizers.SGD(1.0), initializer=fr.Constant(1.0))
        features = [fr.FeatureConfig(f"f{i}", "item", output_dtype=dtype) for i, dtype in enumerate(dtypes)]
        return fr.FusedEmbedding(features, [table], backend=backend)

    narrow = layer("bfloat16", "bfloat16")
    with tf.GradientTape() as tape:
        rows = narrow({"f0": tf.constant([3, 5]), "f1": tf.constant([3])})
        loss = tf.reduce_sum(tf.cast(rows["f0"], tf.float32)) + tf.reduce_sum(tf.cast(rows["f1"], tf.float32))
    tape.gradient(loss, narrow.trainable_variables)
    assert {value.dtype for value in rows.values()} == {tf.bfloat16}
    ids, trained_rows = narrow.export_table("item")
    np.testing.assert_array_equal(trained_rows, np.where(ids[:, np.newaxis] == 3, -1.0, 0.0) * np.ones(DIM))
    if backend == "tfra":
        with pytest.raises(ValueError, match=r"tables \['item'\] .* got the output dtypes .*or backend='native'"):
            layer(None, "float16")
