"""Clustered batches: the same samples in another order, by the ids of every kind of tensor."""

import numpy as np
import pytest

from tests.support.ids import communities
from tf_fusedrec import tf
from tf_fusedrec.data import cluster_samples
from tf_fusedrec.data.batches import cut


def _batch(rng):
    ids, splits = communities(rng, samples=37)
    ragged = tf.RaggedTensor.from_row_splits(ids, splits)
    rest = {
        "number": tf.range(37),
        "pairs": tf.reshape(tf.range(74), [37, 2]) + 90_000,
        "nested": tf.RaggedTensor.from_row_lengths(ragged, tf.ones([37], tf.int64)),
        "sparse": ragged.to_sparse(),
    }
    return {"ids": ragged, **rest}


def _of_tables(x, y):
    return {"item": [x["ids"], x["sparse"]], "user": tf.cast(x["pairs"], tf.int32), "other": x["nested"]}


def _lists(value):
    value = tf.sparse.to_dense(value, -1) if isinstance(value, tf.SparseTensor) else value
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()


@pytest.mark.slow
def test_whole_samples_move_and_order_is_of_the_batch_alone():
    batches = [_batch(np.random.default_rng(seed)) for seed in (1, 2)]
    plain = tf.data.Dataset.from_generator(
        lambda: ((x, x["number"] * 2) for x in batches),
        output_signature=tf.nest.map_structure(tf.type_spec_from_value, (batches[0], batches[0]["number"] * 2)),
    )
    again = [cluster_samples(plain, 4, _of_tables) for _ in range(2)]
    assert tf.nest.map_structure(lambda spec: spec.dtype, again[0].element_spec) == tf.nest.map_structure(
        lambda spec: spec.dtype, plain.element_spec
    )
    for (before, _), (x, y), (other, _) in zip(plain, *again):
        order = x["number"].numpy()
        np.testing.assert_array_equal(np.sort(order), np.arange(37))
        assert (order != np.arange(37)).any()
        np.testing.assert_array_equal(y, 2 * order)
        np.testing.assert_array_equal(other["number"], order)
        for name, value in before.items():
            lists = _lists(value)
            assert _lists(x[name]) == [lists[sample] for sample in order], name
        for piece in cut(x["number"], 4):  # samples of a piece keep their order
            np.testing.assert_array_equal(piece, np.sort(piece))


def test_ids_of_different_tables_are_different_rows():
    """By `first`, samples 0 and 2 belong together. If both tables shared rows, 0 and 1 would."""
    x = {"first": [[5], [6], [5], [6]], "second": [[0, 1], [2, 3], [2, 4], [0, 9]], "third": [[6], [5], [6], [5]]}
    x = {name: tf.constant(value, tf.int64) for name, value in x.items()}
    data = tf.data.Dataset.from_tensors({**x, "number": tf.range(4)})
    (batch,) = cluster_samples(data, 2, lambda b: {"a": b["first"], "b": b["second"], "c": b["third"]})
    assert {frozenset(piece.numpy()) for piece in cut(batch["number"], 2)} == {frozenset({0, 2}), frozenset({1, 3})}


def test_batches_of_no_samples_pass():
    empty = {"ids": tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0]), "y": tf.zeros([0, 3])}
    (batch,) = cluster_samples(tf.data.Dataset.from_tensors(empty), 4, lambda b: {"item": b["ids"]})
    assert batch["ids"].nrows() == 0 and batch["y"].shape == [0, 3]


def test_refusals_are_by_name():
    data = tf.data.Dataset.from_tensors({"a": tf.range(4), "b": tf.range(6), "c": tf.zeros([4])})
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="micro_batches must be an int >= 1"):
            cluster_samples(data, wrong, lambda b: {"t": b["a"]})
    with pytest.raises(ValueError, match="ids of table 't' must be int32 or int64 .* got float32"):
        cluster_samples(data, 2, lambda b: {"t": b["c"]})
    with pytest.raises(ValueError, match="with a first dimension of samples"):
        cluster_samples(data, 2, lambda b: {"t": b["a"][0]})
    with pytest.raises(ValueError, match="dict from table names"):
        cluster_samples(data, 2, lambda b: b["a"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of samples, got 4 in feature 0 and 6"):
        list(cluster_samples(data, 2, lambda b: {"t": [b["a"], b["b"]]}))


def test_a_users_function_may_branch_on_tensors():
    def ids(x):
        if tf.reduce_max(x) > 5:
            return {"item": x}
        else:
            return {"item": -x}

    data = tf.data.Dataset.from_tensor_slices([[5, 6, 5, 6], [3, 2, 3, 2]]).map(lambda x: x[:, tf.newaxis])
    for clustered in cluster_samples(data, 2, ids):
        for piece in np.split(clustered.numpy(), 2):
            assert piece[0] == piece[1]
