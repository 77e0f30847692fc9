"""jagged.py equals Python lists. Every result is exact, because values only move."""

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, ragged, tokens
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged

INNER_SHAPES = [(), (3,), (2, 3)]


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("shape", INNER_SHAPES)
def test_dense_and_back(lengths, shape):
    rows = ragged(lengths, *shape)
    dense = jagged.to_dense(rows)
    assert dense.shape == (len(lengths), max(lengths, default=0), *shape)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(dense[row, :length], rows[row])
        assert not np.any(dense[row, length:])
    back = jagged.from_dense(dense, rows.row_splits)
    np.testing.assert_array_equal(back.values, rows.values)
    np.testing.assert_array_equal(back.row_splits, rows.row_splits)


def test_gradients_of_padding_are_dense_and_skip_the_padding():
    rows = ragged(ROW_LENGTHS["mixed"], 2)
    with tf.GradientTape() as tape:
        tape.watch(rows.values)
        dense = jagged.to_dense(rows)
        again = jagged.from_dense(dense * dense, rows.row_splits).values
        total = tf.reduce_sum(again * again)
    gradient = tape.gradient(total, rows.values)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_allclose(gradient, 4.0 * rows.values**3, rtol=1e-6)  # four roundings


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
def test_concat_then_split(lengths):
    other = [(5 * n + 2) % 4 for n in lengths]
    parts = [ragged(lengths, 3), ragged(other, 3, seed=1), ragged(lengths[::-1], 3, seed=2)]
    joined = jagged.concat(parts)
    assert joined.to_list() == [sum(rows, []) for rows in zip(*(part.to_list() for part in parts))]
    pieces = jagged.split(joined, [part.row_lengths() for part in parts])
    for piece, part in zip(pieces, parts):
        np.testing.assert_array_equal(piece.values, part.values)
        np.testing.assert_array_equal(piece.row_splits, part.row_splits)


def test_concat_in_a_graph_of_unknown_sizes_keeps_gradients_apart():
    spec = tf.RaggedTensorSpec([None, None, 3], tf.float32, ragged_rank=1)

    @tf.function(input_signature=[spec, spec], autograph=False)
    def gradients(first, second):
        with tf.GradientTape() as tape:
            tape.watch([first.values, second.values])
            total = tf.reduce_sum(jagged.concat([first, second]).values ** 2)
        return tape.gradient(total, [first.values, second.values])

    first, second = ragged([2, 0], 3), ragged([1, 4], 3, seed=1)
    for gradient, part in zip(gradients(first, second), (first, second)):
        np.testing.assert_array_equal(gradient, 2.0 * part.values)


@pytest.mark.parametrize("count", [0, 1, 5, 100, "per_row"])
def test_last(count):
    lengths = ROW_LENGTHS["mixed"]
    rows = ragged(lengths, 2)
    counts = [3, 0, 2, 1, 13] if count == "per_row" else [count] * len(lengths)
    ours = jagged.last(rows, tf.constant(counts) if count == "per_row" else count)
    expected = [row[max(len(row) - n, 0) :] for row, n in zip(rows.to_list(), counts)]
    assert ours.to_list() == expected


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
def test_sequences_that_are_joined_together_equal_those_joined_alone(lengths):
    others = lengths[::-1]
    columns = [(ragged(lengths, *shape), ragged(others, *shape, seed=1)) for shape in INNER_SHAPES]
    # Equal lengths are asked for, not the same tensor.
    again = [tf.RaggedTensor.from_row_splits(part.values, tf.identity(part.row_splits)) for part in columns[1]]
    for ours, parts in zip(jagged.concat_alike([*columns, again]), [*columns, columns[1]]):
        assert ours.to_list() == [sum(rows, []) for rows in zip(*(part.to_list() for part in parts))]


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
def test_cut(lengths):
    begins = [n // 3 for n in lengths]
    counts = [(n - begin + 1) // 2 for n, begin in zip(lengths, begins)]
    parts = [ragged(lengths, *shape) for shape in INNER_SHAPES]
    found = jagged.cut(parts, *(tf.constant(n, tf.int64, [len(lengths)]) for n in (begins, counts)))
    for ours, part in zip(found, parts):
        assert ours.to_list() == [row[b : b + n] for row, b, n in zip(part.to_list(), begins, counts)]


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("shape", INNER_SHAPES)
def test_first_tokens(lengths, shape):
    rows = ragged(lengths, *shape)
    expected = [row[0] if row else np.zeros(shape).tolist() for row in rows.to_list()]
    np.testing.assert_array_equal(jagged.first_tokens(rows), np.reshape(expected, [len(lengths), *shape]))


def test_refusals():
    rows = ragged([2, 1], 3)
    with pytest.raises(ValueError, match=r"parts\[1\] must be a RaggedTensor .*EagerTensor"):
        jagged.concat([rows, rows.values])
    with pytest.raises(ValueError, match="parts must hold at least one RaggedTensor"):
        jagged.concat([])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        jagged.concat([rows, ragged([1], 3)])
    with pytest.raises(tf.errors.InvalidArgumentError):
        jagged.concat_alike([[rows, rows], [rows, ragged([2, 2], 3)]])
    with pytest.raises(ValueError, match="lengths must hold one"):
        jagged.split(rows, [])
    with pytest.raises(tf.errors.InvalidArgumentError, match="lengths must add up"):
        jagged.split(rows, [[1, 1], [1, 1]])
    with pytest.raises(ValueError, match="count must be >= 0, got -1"):
        jagged.last(rows, -1)
    with pytest.raises(ValueError, match="ragged in axis 1 only, got ragged_rank 2"):
        jagged.to_dense(tf.ragged.constant([[[1.0], []]]))


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("shape", INNER_SHAPES)
def test_interleaving(lengths, shape):
    first, second = ragged(lengths, *shape), ragged(lengths, *shape, seed=1)
    both = jagged.interleave(first, second)
    assert both.values.shape[1:] == shape
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(both[row][0::2], first[row])
        np.testing.assert_array_equal(both[row][1::2], second[row])
        assert both.row_lengths()[row] == 2 * length


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("shape", INNER_SHAPES)
def test_interleaving_of_the_history_alone(lengths, shape):
    first, second = ragged(lengths, *shape), ragged(lengths, *shape, seed=1)
    targets = [length // 3 for length in lengths]
    both = jagged.interleave(first, second, tf.constant(targets, tf.int32), interleave_targets=False)
    assert both.values.shape[1:] == shape
    for row, (length, count) in enumerate(zip(lengths, targets)):
        history = length - count
        np.testing.assert_array_equal(both[row][: 2 * history : 2], first[row][:history])
        np.testing.assert_array_equal(both[row][1 : 2 * history : 2], second[row][:history])
        np.testing.assert_array_equal(both[row][2 * history :], first[row][history:])
    whole = jagged.interleave(first, second, tf.constant(targets))
    np.testing.assert_array_equal(whole.values, jagged.interleave(first, second).values)


def test_interleaving_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match="interleave_targets=False needs num_targets, got None"):
        jagged.interleave(ragged([2, 1]), ragged([2, 1]), interleave_targets=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row has more targets than tokens"):
        jagged.interleave(ragged([2, 1]), ragged([2, 1]), tf.constant([0, 2]), interleave_targets=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="first and second must have the same row lengths"):
        jagged.interleave(ragged([2, 1]), ragged([1, 2]))


def test_gathered_rows_have_a_dense_gradient():
    table = tf.constant(tokens([4], 3))
    with tf.GradientTape() as tape:
        tape.watch(table)
        out = jagged.gather_rows(table, tf.constant([2, 0, 2]))
    gradient = tape.gradient(out, table)
    np.testing.assert_array_equal(out, table.numpy()[[2, 0, 2]])
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 2, 0])


def test_lengths_are_checked_against_the_layer():
    np.testing.assert_array_equal(jagged.checked_lengths(ragged([3, 2]), 3, "block").values, ragged([3, 2]).values)
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer 'block': a row of x is longer than max_sequence"):
        jagged.checked_lengths(ragged([3, 2]), 2, "block")
