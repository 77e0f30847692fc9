"""Position embeddings equal a loop over tokens; those with ages results of the public operators, too."""

import math

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, assert_within_noise, oracle_file, ragged, splits_of, times, tokens
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import PositionEmbedding, PositionTimeEmbedding


@pytest.mark.parametrize("name", ["plain", "targets_ctx"])
def test_equals_the_reference_forward_and_backward(name):
    arrays, settings = oracle_file(f"pos_ts_embedding_{name}")
    columns = arrays["seq_emb"].shape[1]
    # The files' reference limits buckets to its table's columns, so this table has as many rows.
    layer = PositionTimeEmbedding(arrays["pos_emb"].shape[0], columns - 1, settings["time_bucket_fn"])
    layer.build([None, None, columns])
    layer.positions.assign(arrays["pos_emb"])
    layer.ages.assign(arrays["ts_emb"][:columns])
    # The reference adds to scaled embeddings.
    x = tf.constant(arrays["seq_emb"] / math.sqrt(columns))
    splits = tf.constant(arrays["seq_offsets"])
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = layer(
            tf.RaggedTensor.from_row_splits(x, splits),
            tf.RaggedTensor.from_row_splits(arrays["timestamps"], splits),
            num_targets=tf.constant(arrays["num_targets"]),
            contextual_length=settings["contextual"],
        ).values
        total = tf.reduce_sum(out * arrays["dout"])
    assert_within_noise(out, arrays["out"], 1e-7)  # one multiplication and two additions
    d_x, d_positions, d_ages = tape.gradient(total, [x, layer.positions, layer.ages])
    assert_within_noise(d_x / math.sqrt(columns), arrays["d_seq_emb"], 1e-7)
    assert_within_noise(d_positions, arrays["d_pos_emb"], 1e-6)  # sums of up to 20 terms
    assert_within_noise(d_ages, arrays["d_ts_emb"][:columns], 1e-6)
    assert not arrays["d_ts_emb"][columns:].any()


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("buckets", [40, 2048])
@pytest.mark.parametrize("function", ["sqrt", "log"])
def test_each_token_gets_the_rows_of_its_place_and_age(lengths, function, buckets):
    layer, splits = PositionTimeEmbedding(9, buckets, function), splits_of(lengths)
    stamps = times(lengths) // 50  # ages up to ten days
    counts = [n // 3 for n in lengths]
    x = tf.RaggedTensor.from_row_splits(tokens(lengths, 4), splits)
    ragged_times = tf.RaggedTensor.from_row_splits(stamps, splits)
    out = layer(x, ragged_times, num_targets=tf.constant(counts, tf.int64), contextual_length=2)
    for begin, end, count in zip(splits[:-1], splits[1:], counts):
        for token in range(begin, end):
            place = token - begin
            position = place if place < 2 else min(2 + max(end - begin - count - place, 0), 8)
            minutes = int(stamps[end - 1] - stamps[token]) / 60
            bucket = math.sqrt(minutes) if function == "sqrt" else math.log(max(minutes, 1))
            expected = x.values[token] * 2.0 + layer.positions[position] + layer.ages[min(int(bucket), buckets)]
            np.testing.assert_allclose(out.values[token], expected, atol=1e-6)


def test_thresholds_of_large_buckets_fit():
    thresholds = PositionTimeEmbedding(1, 2048, "log")._thresholds()
    assert (thresholds[1:] >= thresholds[:-1]).all() and thresholds[0] == math.ceil(60 * math.e)
    assert thresholds[37] == math.ceil(60 * np.exp(38.0)) and (thresholds[38:] == 2**63 - 1).all()
    assert PositionTimeEmbedding(1, 3)._thresholds().tolist() == [60, 240, 540]


def test_other_row_lengths_are_refused():
    x = tf.RaggedTensor.from_row_splits(tf.zeros([3, 4]), [0, 1, 3])
    with pytest.raises(tf.errors.InvalidArgumentError, match="timestamps must have the row lengths of x"):
        PositionTimeEmbedding(3)(x, tf.RaggedTensor.from_row_splits(tf.zeros([3], tf.int64), [0, 2, 3]))


@pytest.mark.parametrize("lengths", ROW_LENGTHS.values(), ids=ROW_LENGTHS)
@pytest.mark.parametrize("with_targets", [False, True])
def test_each_token_gets_the_row_of_its_place_and_targets_share_one(lengths, with_targets):
    layer = PositionEmbedding(24)
    x, counts = ragged(lengths, 4), [n // 2 for n in lengths]
    out = layer(x, num_targets=tf.constant(counts, tf.int64) if with_targets else None)
    table = layer.positions.numpy()
    for row, length in enumerate(lengths):
        first_target = length - (counts[row] if with_targets else 0)
        for place in range(length):
            expected = x[row, place] * 2.0 + table[min(place, first_target)]  # sqrt(4) = 2
            np.testing.assert_array_equal(out[row, place], expected)


def test_the_gradient_of_the_table_is_dense_and_counts_tokens():
    layer = PositionEmbedding(4)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(ragged([3, 0, 2], 4)).values)
    gradient = tape.gradient(total, layer.positions)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_array_equal(gradient[:, 0], [2, 2, 1, 0])


def test_the_scale_of_the_table():
    layer = PositionEmbedding(2000)
    layer(ragged([5], 4))
    # A normal truncated at two deviations keeps 0.88 of its deviation, 1 / sqrt(D) = 0.5.
    assert abs(np.std(layer.positions) - 0.44) < 0.02
