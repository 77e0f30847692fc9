"""stock_attention.py equals the op's definitions under all masks and biases.

tests/ops/jagged_attention compares the op with reference results.
"""

import numpy as np
import pytest

from tests.layers.cases import ROW_LENGTHS, splits_of, times, tokens
from tests.oracles import jagged_attention as oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import sequence_times
from tf_fusedrec.layers.relative_bias import bucket_thresholds
from tf_fusedrec.layers.stock_attention import bias_attention, jagged_attention
from tf_fusedrec.ops import BucketTable, RelativeBias, TimeFunction

MASKS = {
    "causal": {},
    "window": {"attention_window": 4},
    "window_and_newest": {"attention_window": 3, "min_full_length": 2},
    "context": {"contextual_length": 2},
    "context_window": {"contextual_length": 1, "attention_window": 5, "min_full_length": 1},
    "semi_local": {"attention_window": 3, "global_window": 2},
    "context_semi_local": {"contextual_length": 2, "attention_window": 3, "global_window": 2},
    "groups": {"target_group_size": 2, "attention_window": 4},
}
CASES = [*(("mixed", of) for of in MASKS), *((of, "context_semi_local") for of in ROW_LENGTHS if of != "mixed")]
FUNCTIONS = {"power": [0.3, 0.5], "exponential": [0.2, -9.0], "stretched": [0.3, -2.0, 0.3]}


def biases(lengths, counts, kind):
    """Returns a RelativeBias and the equal arguments of the oracle."""
    generator = np.random.default_rng(2)
    position = tf.constant(generator.normal(size=59).astype(np.float32))
    stamps = tf.RaggedTensor.from_row_splits(times(lengths) % 10**6, splits_of(lengths))
    asked = sequence_times(stamps, num_targets=counts)
    shared = {"asks": asked.asks, "answers": asked.answers, "position_weights": position, "time": kind}
    if kind == "buckets":
        weights, thresholds = tf.constant(generator.normal(size=31).astype(np.float32)), bucket_thresholds(30)
        bias = RelativeBias(position, BucketTable(weights, tf.constant(thresholds)), asked)
        return bias, {**shared, "time_weights": weights, "thresholds": thresholds}
    parameters = tf.constant(FUNCTIONS[kind])
    return RelativeBias(position, TimeFunction(kind, parameters), asked), {**shared, "time_weights": parameters}


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "masks"), CASES)
@pytest.mark.parametrize("with_targets", [False, True])
def test_equals_the_definitions(lengths, masks, with_targets):
    # Every row is long enough for its context and its targets.
    lengths, masks = [n + 3 if n else 0 for n in ROW_LENGTHS[lengths]], MASKS[masks]
    counts = tf.constant([n // 4 for n in lengths], tf.int64) if with_targets else None
    q, k, v = (tf.constant(tokens(lengths, 2, d, seed=s)) for s, d in enumerate((5, 5, 3)))
    splits = tf.constant(splits_of(lengths))
    scale = tf.constant(np.linspace(0.1, 1.0, sum(lengths)).astype(np.float32))
    for kind in (None, "buckets", *FUNCTIONS):
        bias, arguments = (None, {}) if kind is None else biases(lengths, counts, kind)
        shared = {"num_targets": counts, **masks}
        ours = jagged_attention(q, k, v, splits, scale=scale, alpha=0.7, bias=bias, **shared)
        case = {"value": v, "row_splits": splits, "num_targets": counts, "masks": masks, **arguments}
        case = {name: x.numpy() if isinstance(x, tf.Tensor) else x for name, x in case.items()}
        expected = oracle.attention(query=q.numpy(), key=k.numpy(), scale=scale.numpy(), alpha=0.7, **case)
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)  # float32, other order of summation
        if bias is not None:
            ours = bias_attention(v, splits, bias=bias, **shared)
            expected = oracle.bias_attention(**case)
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
