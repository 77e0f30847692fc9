"""lookahead gives every batch once, with the ids of the batch k later, and with no ids at the end."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.data import lookahead

BATCHES = 5


def _batch(n):
    """Returns a batch with every form of ids; sizes differ from batch to batch."""
    lengths = tf.range(n % 3 + 1)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(lengths)) + n * 100, lengths)
    nested = tf.RaggedTensor.from_row_lengths(ragged, [tf.size(lengths)])
    sparse = ragged.to_sparse()
    return {"dense": tf.stack([n, n + 10]), "ragged": ragged, "nested": nested, "sparse": sparse,
            "matrix": tf.fill([2, 3], n)}  # fmt: skip


def _batches():
    return tf.data.Dataset.range(BATCHES).map(lambda n: (_batch(n), n * 2))


def _flat(value):
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return tf.sparse.to_dense(value).numpy().tolist() if isinstance(value, tf.SparseTensor) else value.numpy().tolist()


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_every_batch_comes_with_the_one_that_is_k_later(steps):
    plain = list(_batches())
    got = list(lookahead(_batches(), steps, lambda features, label: features))
    assert len(got) == BATCHES
    for n, ((features, label), coming) in enumerate(got):
        assert int(label) == 2 * n
        for name, value in features.items():
            assert _flat(value) == _flat(plain[n][0][name]), name
            later = _flat(plain[n + steps][0][name]) if n + steps < BATCHES else []
            assert _flat(coming[name]) == later, (n, name)
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


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="steps must be an int >= 1, got 0"):
        lookahead(_batches(), 0)
    with pytest.raises(ValueError, match="known rank >= 1"):
        lookahead(_batches(), 1, lambda features, label: label)


def test_a_users_function_may_branch_on_tensors():
    def ids(features, label):
        if label > 2:
            return features["dense"]
        else:
            return -features["dense"]

    coming = [ids.numpy().tolist() for _, ids in lookahead(_batches(), 1, ids)]
    assert coming == [[-1, -11], [2, 12], [3, 13], [4, 14], []]
