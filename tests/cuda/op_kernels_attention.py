"""The attention ops refuse what is beyond a GPU. Their cases are those of the launchers (run_op_kernels.py)."""

from __future__ import annotations

import numpy as np

from tests.cuda.op_kernels import refused, run_op
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


def refuses(words, function, *arguments):
    refused(tf.errors.InvalidArgumentError, words, lambda: run_op(True, function, arguments))


def attend(tokens, splits):
    return ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0)


def buckets(value, splits, weights, thresholds, times):
    time = ops.BucketTable(weights, thresholds)
    return ops.bias_attention(value, splits, bias=ops.RelativeBias(time=time, times=ops.SequenceTimes(times, times)))


def run():
    tokens, splits, times = np.zeros([20, 1, 4], np.float32), np.array([0, 3, 20]), np.arange(20)
    refuses("row_splits must not decrease", attend, tokens, np.array([0, 5, 3, 20]))
    refuses("at most 256 columns", attend, np.zeros([20, 1, 257], np.float32), splits)
    no_bytes = np.zeros([2**31, 1, 0], np.float32)
    refuses("the number of tokens must be at most 2147483647", attend, no_bytes, np.array([0, 2**31]))
    many = np.zeros(4098, np.float32), np.arange(4097)
    refuses("thresholds must be at most 4096 on a GPU, got 4097", buckets, tokens, splits, *many, times)
