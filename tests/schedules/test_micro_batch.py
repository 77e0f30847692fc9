"""Batches are cut by sample: every kind of tensor, indivisible sizes, empty batches, bad input."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.data.batches import cut, num_samples, piece_bounds, token_bounds


def make(samples):
    """Returns tensors that each encode sample s: s once, s repeated s times, s in column s % 3."""
    numbers = np.arange(samples)
    rows, lists = [[s] * (s % 4) for s in numbers], [[[s, -s]] * (s % 3) for s in numbers]
    x = {
        "dense": tf.constant(numbers),
        "wide": tf.constant(np.stack([numbers, -numbers], axis=1)),
        "ragged": tf.ragged.constant(rows, tf.int64, ragged_rank=1, row_splits_dtype=tf.int64),
        "nested": tf.ragged.constant(lists, tf.int64, ragged_rank=2, row_splits_dtype=tf.int32),
        "sparse": tf.SparseTensor(np.stack([numbers, numbers % 3], axis=1), numbers + 1, [samples, 3]),
    }
    return x, (tf.constant(numbers, tf.float32), None)


def samples_of(piece):
    x, (y, nothing) = piece
    assert nothing is None
    numbers = x["dense"].numpy().tolist()
    assert x["wide"].numpy().tolist() == [[s, -s] for s in numbers]
    assert x["ragged"].to_list() == [[s] * (s % 4) for s in numbers]
    assert x["nested"].to_list() == [[[s, -s]] * (s % 3) for s in numbers]
    dense = np.zeros([len(numbers), 3], int)
    dense[np.arange(len(numbers)), np.array(numbers, int) % 3] = np.array(numbers) + 1
    np.testing.assert_array_equal(tf.sparse.to_dense(x["sparse"]), dense)
    assert y.numpy().tolist() == numbers
    return numbers


@pytest.mark.parametrize("samples", [1, 4, 7, 8])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7])
def test_pieces_are_the_batch_in_order_and_none_is_empty(samples, pieces):
    data = make(samples)
    if samples < pieces:
        with pytest.raises(ValueError, match=f"micro_batches {pieces} is more than the {samples} samples of a batch"):
            cut(data, pieces)
        return
    numbers = [samples_of(piece) for piece in cut(data, pieces)]
    assert sum(numbers, []) == list(range(samples))
    assert all(numbers)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_have_their_share_of_the_tokens(micro_batches, seed):
    """The shares are right within one sample. A cut by samples is far off where long samples come first."""
    lengths = np.sort(np.random.default_rng(seed).zipf(1.6, 300).clip(max=90) - 1)[::-1]
    data = {
        "past": tf.RaggedTensor.from_row_lengths(tf.range(lengths.sum()), lengths),
        "number": tf.range(300),
    }
    pieces = cut(data, micro_batches)
    np.testing.assert_array_equal(np.concatenate([piece["number"] for piece in pieces]), np.arange(300))
    np.testing.assert_array_equal(np.concatenate([piece["past"].values for piece in pieces]), data["past"].values)
    tokens = np.array([len(piece["number"]) + len(piece["past"].values) for piece in pieces])
    shares = np.array({1: [1], 2: [1, 1], 3: [1, 2, 1], 8: [1, 2, 4, 4, 4, 4, 2, 1]}[micro_batches])
    assert np.abs(tokens - tokens.sum() * shares / shares.sum()).max() <= 1 + lengths.max()
    if micro_batches > 2:
        by_sample = np.diff(np.concatenate([[0], np.cumsum(lengths + 1)])[piece_bounds(300, micro_batches)])
        assert (by_sample / shares).max() > 2 * (tokens / shares).max()


def test_all_ragged_and_sparse_values_are_tokens():
    """Samples have 1 + 6 values each, in three forms. Each form alone would move the bound."""
    nested = tf.ragged.constant([[[1, 2, 3], [4, 5, 6]], [], [], [[]]], ragged_rank=2, dtype=tf.int64)
    ragged = tf.ragged.constant([[], [1] * 6, [], []], dtype=tf.float32, row_splits_dtype=tf.int32)
    sparse = tf.SparseTensor([[2, i] for i in range(3)] + [[3, i] for i in range(6)], tf.range(9), [4, 9])
    for data, sizes in (
        ((nested, ragged, sparse), [2, 2]), ((nested,), [1, 3]), ((nested, ragged), [1, 3]), ((sparse,), [3, 1])
    ):  # fmt: skip
        found = [int(num_samples(piece)) for piece in cut(data, 2)]
        assert found == sizes, data


@pytest.mark.parametrize(
    ("tokens", "bounds"),
    [
        ([1, 1, 4, 2, 2, 2], [0, 2, 4, 6]),
        ([1000, 1, 1, 1, 1, 1], [0, 1, 2, 6]),
        ([1, 1, 1, 1, 1, 1000], [0, 4, 5, 6]),
        ([1, 1, 1000, 1, 1, 1], [0, 2, 3, 6]),
        ([5, 5], [0, 0, 1, 2]),
        ([9], [0, 0, 0, 1]),
        ([], [0, 0, 0, 0]),
        ([2**40] * 8, [0, 2, 6, 8]),
        ([1, 1, 1, 1, 1000, 1, 1, 1], [0, 4, 5, 6, 8]),
    ],
)
def test_no_piece_is_empty_before_one_has_two(tokens, bounds):
    found = token_bounds(tf.constant(tokens, tf.int64), len(bounds) - 1)
    assert [int(bound) for bound in found] == bounds


def test_samples_without_values_count_alike():
    empty = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0] * 13)
    assert [int(piece.nrows()) for piece in cut(empty, 4)] == [2, 4, 4, 2]


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_small_batches_have_pieces_of_nothing(samples):
    """The size is unknown when the step is traced, as for the last batch of an epoch."""
    data = make(samples)
    specs = tf.data.Dataset.from_tensor_slices(make(3)).batch(3).element_spec
    pieces = tf.function(lambda data: cut(data, 3), input_signature=[specs])(data)
    numbers = [samples_of(piece) for piece in pieces]
    assert sum(numbers, []) == list(range(samples))


@pytest.mark.parametrize(
    ("feature", "of_each"), [(lambda: tf.ragged.constant([[1], [2, 3]] * 8), 40), (lambda: tf.zeros([16, 2]), 3)]
)
def test_a_cut_has_few_ops(feature, of_each):
    """A step runs them before its first exchange."""
    batch = {str(i): feature() for i in range(4)}
    signature = [tf.nest.map_structure(tf.type_spec_from_value, batch)]
    graph = tf.function(lambda data: cut(data, 8), input_signature=signature).get_concrete_function().graph
    ops = [op for op in graph.get_operations() if op.type not in ("Const", "Placeholder", "Identity", "NoOp")]
    assert len(ops) <= of_each * len(batch) + 20, (len(ops), sorted({op.type for op in ops}))


def test_tensors_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match=r"same number of samples, got \[3, 4\]"):
        cut((tf.zeros([3]), tf.zeros([4, 2])), 2)
    with pytest.raises(ValueError, match="is a scalar"):
        cut((tf.zeros([3]), tf.zeros([])), 2)
    with pytest.raises(ValueError, match="at least one tensor"):
        cut((None, {}), 2)
    step = tf.function(lambda a, b: cut((a, b), 2), input_signature=[tf.TensorSpec([None])] * 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="differ in their number of samples"):
        step(tf.zeros([3]), tf.zeros([4]))
