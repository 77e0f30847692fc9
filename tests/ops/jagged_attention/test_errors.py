"""The ops of jagged attention refuse wrong inputs, and name the argument."""

import numpy as np
import pytest

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

TOKENS = np.zeros([3, 2, 4], np.float32)
SPLITS = np.array([0, 1, 3])
TIMES = ops.SequenceTimes(np.zeros(3, np.int64), np.zeros(3, np.int64))
TABLE = ops.BucketTable(np.zeros(3, np.float32), np.array([1, 9]))


def attend(query=TOKENS, key=TOKENS, value=TOKENS, splits=SPLITS, scale=1.0, **rest):
    return ops.jagged_attention(query, key, value, splits, scale=scale, **rest)


def zeros(shape):
    return np.zeros(shape, np.float32)


def int64(values):
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("splits", int64([0, 2, 1, 3]), "row_splits must not decrease, got 2 then 1 at entry 2"),
        ("splits", int64([0, 2]), "row_splits must run from 0 to 3, got first 0, last 2"),
        ("splits", int64([1, 3]), "row_splits must run from 0 to 3, got first 1, last 3"),
        ("splits", int64([]), "row_splits must have at least one entry, got none"),
        ("key", zeros([3, 2, 5]), r"key must have the shape of query \[3,2,4\], got \[3,2,5\]"),
        ("key", zeros([3, 1, 4]), r"key must have the shape of query \[3,2,4\], got \[3,1,4\]"),
        ("value", zeros([2, 2, 4]), r"value must have the tokens and heads of query \[3,2,4\], got \[2,2,4\]"),
        ("query", zeros([3, 8]), "query must have rank 3"),
        *(("scale", zeros(shape), r"scale must have shape \[\] or \[3\]") for shape in ([2], [3, 1], [0])),
        ("num_targets", int64([1, 3]), r"num_targets\[1\] must lie between 0 and the row's length 2, got 3"),
        ("num_targets", int64([-1, 0]), r"num_targets\[0\] must lie between 0 and the row's length 1, got -1"),
        ("num_targets", int64([1]), "num_targets must have one entry per row, that is 2, got 1"),
        ("num_targets", int64([]), "num_targets must have one entry per row, that is 2, got 0"),
        ("contextual_length", int64([1, -3]), r"contextual_length\[1\] must be >= 0, got -3"),
        ("contextual_length", int64([1]), "contextual_length must have one entry per row, that is 2, got 1"),
        ("contextual_length", int64([[1, 2]]), "contextual_lengths must have rank 1"),
    ],
)
def test_tensors(name, value, words):
    """In a graph without static shapes, so the kernel refuses, not the shape function."""
    call = tf.function(lambda given: attend(**{name: given}), [tf.TensorSpec(None, value.dtype)], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        call(value)


@pytest.mark.parametrize("name", ["contextual_length", "attention_window", "min_full_length", "target_group_size"])
def test_negative_lengths(name):
    for value in (-1, 0)[: 1 + (name == "target_group_size")]:
        with pytest.raises(ValueError, match=f"{name} must be >= [01], got {value}"):
            attend(**{name: value})


@pytest.mark.parametrize("call", [attend, lambda **bias: ops.bias_attention(TOKENS, SPLITS, **bias)])
@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (ops.RelativeBias(np.zeros(1, np.float32)), "row 1 has 2 tokens, longer than N = 1 of position_weights"),
        (ops.RelativeBias(np.zeros(6, np.float32)), "position_weights must have 2N - 1 entries .*, got 6"),
        (ops.RelativeBias(np.zeros(0, np.float32)), "position_weights must have 2N - 1 entries .*, got 0"),
        (
            ops.RelativeBias(time=TABLE._replace(thresholds=np.array([9, 1])), times=TIMES),
            "thresholds must not decrease, got 9 then 1 at entry 1",
        ),
        (
            ops.RelativeBias(time=TABLE._replace(weights=np.zeros(2, np.float32)), times=TIMES),
            "time_weights must have one entry more than thresholds, that is 3, got 2",
        ),
        (
            ops.RelativeBias(time=TABLE, times=TIMES._replace(asks=np.zeros(2, np.int64))),
            "asks must have one time per token, that is 3, got 2",
        ),
        (
            ops.RelativeBias(time=TABLE, times=TIMES._replace(answers=np.zeros(4, np.int64))),
            "answers must have one time per token, that is 3, got 4",
        ),
        (
            ops.RelativeBias(time=ops.TimeFunction("power", np.zeros(3, np.float32)), times=TIMES),
            "time_weights must have one entry per parameter of this function of time, that is 2, got 3",
        ),
    ],
)
def test_bias(call, bias, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        call(bias=bias)


def test_an_incomplete_bias():
    for bias in (ops.RelativeBias(time=TABLE), ops.RelativeBias(tf.zeros(5), times=TIMES)):
        with pytest.raises(ValueError, match="time and times of a RelativeBias must be given together"):
            attend(bias=bias)
    with pytest.raises(ValueError, match="kind of a TimeFunction must be one of .*, got 'linear'"):
        attend(bias=ops.RelativeBias(time=ops.TimeFunction("linear", tf.zeros(2)), times=TIMES))
    with pytest.raises(ValueError, match="bias must have position_weights, time, or both, got neither"):
        ops.bias_attention(TOKENS, SPLITS, bias=ops.RelativeBias())


def test_timestamps_that_are_not_ragged_seconds():
    stamps = tf.RaggedTensor.from_row_lengths(tf.zeros(3, tf.int32), [3])
    with pytest.raises(ValueError, match="timestamps must be int64 seconds, got int32"):
        ops.sequence_times(stamps)
    with pytest.raises(ValueError, match="query_times must be a RaggedTensor"):
        ops.sequence_times(tf.cast(stamps, tf.int64), query_times=tf.zeros([1, 3], tf.int64))
