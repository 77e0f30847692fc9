"""jagged.py equals Python lists, and visible_keys counts of masks that are built pair by pair. Results are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.cases import ROW_LENGTHS, ragged, splits_of, tokens
from tests.oracles.visible_pairs import visible_pairs
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged

INNER_SHAPES = [(), (3,), (2, 3)]
every_length = pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
every_shape = pytest.mark.parametrize("shape", INNER_SHAPES)


def joined(*parts):
    """Returns the rows of several RaggedTensors, each the rows of all parts in a row."""
    return [sum(rows, []) for rows in zip(*(part.to_list() for part in parts))]


@every_length
@every_shape
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


@every_length
@every_shape
def test_parts_of_rows(lengths, shape):
    rows, parts = (
        ragged(lengths, *shape),
        [ragged(of, *shape, seed=seed) for seed, of in enumerate([lengths[::-1]] * 2)],
    )
    whole = jagged.concat([rows, *parts])
    assert whole.to_list() == joined(rows, *parts)
    for piece, part in zip(jagged.split(whole, [part.row_lengths() for part in (rows, *parts)]), (rows, *parts)):
        np.testing.assert_array_equal(piece.values, part.values)
        np.testing.assert_array_equal(piece.row_splits, part.row_splits)
    for count in (0, 1, 5, 100):
        assert jagged.last(rows, count).to_list() == [row[max(len(row) - count, 0) :] for row in rows.to_list()]
    counts = [n // 2 for n in lengths]
    last = jagged.last(rows, tf.constant(counts, tf.int64))
    assert last.to_list() == [row[len(row) - n :] for row, n in zip(rows.to_list(), counts)]
    first = [row[0] if row else np.zeros(shape).tolist() for row in rows.to_list()]
    np.testing.assert_array_equal(jagged.first_tokens(rows), np.reshape(first, [len(lengths), *shape]))


@every_length
def test_sequences_that_are_joined_or_cut_together_equal_those_alone(lengths):
    columns = [(ragged(lengths, *shape), ragged(lengths[::-1], *shape, seed=1)) for shape in INNER_SHAPES]
    # Equal lengths are asked for, not the same tensor.
    again = [tf.RaggedTensor.from_row_splits(part.values, tf.identity(part.row_splits)) for part in columns[1]]
    for ours, parts in zip(jagged.concat_alike([*columns, again]), [*columns, columns[1]]):
        assert ours.to_list() == joined(*parts)
    begins = [n // 3 for n in lengths]
    counts = [(n - begin + 1) // 2 for n, begin in zip(lengths, begins)]
    pieces = jagged.cut([part for part, _ in columns], *(tf.constant(n, tf.int64, [len(n)]) for n in (begins, counts)))
    for ours, (part, _) in zip(pieces, columns):
        assert ours.to_list() == [row[b : b + n] for row, b, n in zip(part.to_list(), begins, counts)]


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


@every_length
@every_shape
def test_interleaving_whole_rows_and_the_history_alone(lengths, shape):
    first, second = ragged(lengths, *shape), ragged(lengths, *shape, seed=1)
    targets = [length // 3 for length in lengths]
    both = jagged.interleave(first, second, tf.constant(targets, tf.int32), interleave_targets=False)
    whole = jagged.interleave(first, second)
    np.testing.assert_array_equal(jagged.interleave(first, second, tf.constant(targets)).values, whole.values)
    pairs = [[[one for pair in zip(*rows) for one in pair], rows[0]] for rows in zip(first.to_list(), second.to_list())]
    assert whole.to_list() == [interleaved for interleaved, _ in pairs]
    assert both.to_list() == [
        interleaved[: 2 * (n - count)] + row[n - count :]
        for (interleaved, row), n, count in zip(pairs, lengths, targets)
    ]
    assert both.values.shape[1:] == whole.values.shape[1:] == shape


def test_gathered_rows_have_a_dense_gradient():
    table = tf.constant(tokens([4], 3))
    with tf.GradientTape() as tape:
        tape.watch(table)
        out = jagged.gather_rows(table, tf.constant([2, 0, 2]))
    np.testing.assert_array_equal(out, table.numpy()[[2, 0, 2]])
    np.testing.assert_array_equal(tape.gradient(out, table)[:, 0], [1, 0, 2, 0])


INVALID = tf.errors.InvalidArgumentError
REFUSALS = [
    (lambda rows: jagged.concat([rows, rows.values]), ValueError, r"parts\[1\] must be a RaggedTensor .*EagerTensor"),
    (lambda rows: jagged.concat([]), ValueError, "parts must hold at least one RaggedTensor"),
    (lambda rows: jagged.concat([rows, ragged([1], 3)]), INVALID, "same number of rows"),
    (lambda rows: jagged.concat_alike([[rows, rows], [rows, ragged([2, 2], 3)]]), INVALID, None),
    (lambda rows: jagged.split(rows, []), ValueError, "lengths must hold one"),
    (lambda rows: jagged.split(rows, [[1, 1], [1, 1]]), INVALID, "lengths must add up"),
    (lambda rows: jagged.last(rows, -1), ValueError, "count must be >= 0, got -1"),
    (lambda rows: jagged.to_dense(tf.ragged.constant([[[1.0], []]])), ValueError, "axis 1 only, got ragged_rank 2"),
    (lambda rows: jagged.interleave(rows, rows, interleave_targets=False), ValueError, "needs num_targets, got None"),
    (
        lambda rows: jagged.interleave(rows, rows, tf.constant([0, 2]), interleave_targets=False),
        INVALID,
        "more targets",
    ),
    (lambda rows: jagged.interleave(rows, ragged([1, 2], 3)), INVALID, "first and second must have the same row lengt"),
    (lambda rows: jagged.checked_lengths(rows, 1, "x"), INVALID, "layer 'x': a row of x is longer than max_sequence"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call(ragged([2, 1], 3))


def counted(lengths, targets, contexts, *masks):
    rows = [
        visible_pairs(n, 0 if targets is None else t, context, *masks).sum(axis=1)
        for n, t, context in zip(lengths, lengths if targets is None else targets, contexts)
    ]
    return np.concatenate([*rows, np.empty(0, np.int64)])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_visible_keys_under_all_masks(rows, with_targets, of_each_row, window, full, group, first):
    """Every row has its context first, then history and targets."""
    contexts = [context if of_each_row else rows[0][2] for _, _, context in rows]
    lengths = [context + history + targets for context, (history, targets, _) in zip(contexts, rows)]
    targets = [count for _, count, _ in rows] if with_targets else None
    first = first if window else 0
    ours = jagged.visible_keys(
        tf.constant(splits_of(lengths)),
        None if targets is None else tf.constant(targets),
        tf.constant(contexts) if of_each_row else contexts[0],
        attention_window=window,
        min_full_length=full,
        global_window=first,
        target_group_size=group,
    )
    np.testing.assert_array_equal(ours, counted(lengths, targets, contexts, window, full, group, first))
