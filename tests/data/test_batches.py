"""What follows on a data set of batches: clustered samples, and the ids of coming batches, in every kind of tensor."""

import numpy as np
import pytest

from tests.support.ids import communities
from tf_fusedrec import tf
from tf_fusedrec.data import cluster_samples, lookahead
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


BATCHES = 5


def _numbered(n):
    """Returns a batch with every form of ids; sizes differ from batch to batch."""
    lengths = tf.range(n % 3 + 1)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(lengths)) + n * 100, lengths)
    nested = tf.RaggedTensor.from_row_lengths(ragged, [tf.size(lengths)])
    sparse = ragged.to_sparse()
    return {"dense": tf.stack([n, n + 10]), "ragged": ragged, "nested": nested, "sparse": sparse,
            "matrix": tf.fill([2, 3], n)}  # fmt: skip


def _batches():
    return tf.data.Dataset.range(BATCHES).map(lambda n: (_numbered(n), n * 2))


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


def test_batches_of_no_samples_are_not_clustered():
    empty = {"ids": tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0]), "y": tf.zeros([0, 3])}
    (batch,) = cluster_samples(tf.data.Dataset.from_tensors(empty), 4, lambda b: {"item": b["ids"]})
    assert batch["ids"].nrows() == 0 and batch["y"].shape == [0, 3]


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="steps must be an int >= 1, got 0"):
        lookahead(_batches(), 0)
    with pytest.raises(ValueError, match="known rank >= 1"):
        lookahead(_batches(), 1, lambda features, label: label)
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
    def coming(features, label):
        if label > 2:
            return features["dense"]
        else:
            return -features["dense"]

    found = [ids.numpy().tolist() for _, ids in lookahead(_batches(), 1, coming)]
    assert found == [[-1, -11], [2, 12], [3, 13], [4, 14], []]

    def ids(x):
        if tf.reduce_max(x) > 5:
            return {"item": x}
        else:
            return {"item": -x}

    data = tf.data.Dataset.from_tensor_slices([[5, 6, 5, 6], [3, 2, 3, 2]]).map(lambda x: x[:, tf.newaxis])
    for clustered in cluster_samples(data, 2, ids):
        for piece in np.split(clustered.numpy(), 2):
            assert piece[0] == piece[1]


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_every_batch_comes_with_the_one_that_is_k_later(steps):
    plain = list(_batches())
    got = list(lookahead(_batches(), steps, lambda features, label: features))
    assert len(got) == BATCHES
    for n, ((features, label), coming) in enumerate(got):
        assert int(label) == 2 * n
        for name, value in features.items():
            assert _lists(value) == _lists(plain[n][0][name]), name
            later = _lists(plain[n + steps][0][name]) if n + steps < BATCHES else []
            assert _lists(coming[name]) == later, (n, name)
            assert type(coming[name]) is type(value) and coming[name].dtype == value.dtype
            assert coming[name].shape.rank == value.shape.rank


def test_cardinality_and_static_shapes_of_batches_stay():
    """Keras counts the steps of an epoch by the cardinality, and builds models from the shapes."""
    ahead = lookahead(_batches(), 3, lambda features, label: features["dense"])
    assert ahead.cardinality() == BATCHES
    assert ahead.element_spec[0] == _batches().element_spec
    assert ahead.element_spec[1].shape.as_list() == [None]
    unknown = lookahead(_batches().filter(lambda features, label: label > 2).map(lambda features, label: features), 3)
    assert unknown.cardinality() < 0 and len(list(unknown)) == 3


def test_the_input_is_read_once_and_not_further_than_needed():
    """A second pass over a shuffled input would announce other batches than the coming ones."""
    read = []

    def produce():
        for n in range(20):
            read.append(n)
            yield np.int64([n])

    source = tf.data.Dataset.from_generator(produce, output_signature=tf.TensorSpec([1], tf.int64))
    shuffled = source.shuffle(4, seed=1)
    pairs = [(batch.numpy().tolist(), coming.numpy().tolist()) for batch, coming in lookahead(shuffled, 2)]
    assert len(read) == 20
    assert [coming for _, coming in pairs[:-2]] == [batch for batch, _ in pairs[2:]]
    assert [coming for _, coming in pairs[-2:]] == [[], []]
    read.clear()
    next(iter(lookahead(source, 2)))
    assert len(read) < 10, "more than the window and what tf.data reads ahead by itself"
