"""The attention ops on a GPU: random cases give what the kernels of the CPU give, and limits of a GPU are refused."""

from __future__ import annotations

import numpy as np

from tests.cuda.op_kernels import refused, run_op
from tests.golden import attention
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

# float32 sums run in another order with another exponential; 16-bit numbers and maps are rounded, twice the last place.
NEAR = {"float32": 2e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
CASES = 30


def compare(number):
    host, device = (run_op(on_device, attention.results, (number,)) for on_device in (False, True))
    # A norm divides by a small deviation.
    times = 8 if attention.op_of(number) == "gated_attention" else 1
    for theirs, ours in zip(host, device):
        limit = times * NEAR[theirs.dtype.name] if theirs.dtype == host[0].dtype else times * NEAR[host[0].dtype.name]
        theirs, ours = (np.asarray(tf.cast(x, tf.float32)) for x in (theirs, ours))
        largest = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit * largest, err_msg=f"case {number}")


def refuses(words, function, *arguments):
    refused(tf.errors.InvalidArgumentError, words, lambda: run_op(True, function, arguments))


def attend(tokens, splits):
    return ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0)


def buckets(value, splits, weights, thresholds, times):
    time = ops.BucketTable(weights, thresholds)
    return ops.bias_attention(value, splits, bias=ops.RelativeBias(time=time, times=ops.SequenceTimes(times, times)))


def run():
    small = [number for number in range(3 * attention.CASES) if attention.tokens_of(number) <= 100]
    for number in small[:CASES]:
        compare(number)
    tokens, splits, times = np.zeros([20, 1, 4], np.float32), np.array([0, 3, 20]), np.arange(20)
    refuses("row_splits must not decrease", attend, tokens, np.array([0, 5, 3, 20]))
    refuses("at most 256 columns", attend, np.zeros([20, 1, 257], np.float32), splits)
    no_bytes = np.zeros([2**31, 1, 0], np.float32)
    refuses("the number of tokens must be at most 2147483647", attend, no_bytes, np.array([0, 2**31]))
    many = np.zeros(4098, np.float32), np.arange(4097)
    refuses("thresholds must be at most 4096 on a GPU, got 4097", buckets, tokens, splits, *many, times)
