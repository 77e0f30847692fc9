"""The gate of jagged_attention, both passes: the definition of the attention and the formulas of gate and norm."""

import numpy as np
import pytest

from tests.cuda.checks.jagged_attention_call import compare, gated_case
from tests.oracles.jagged_attention import dropout_of
from tests.support import small_ops
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

RUN, SHARE = small_ops.TensorFlowOps(), (0.3, -(2**40) - 7)
FORMS = {
    "plain": {"weights": False},
    "weights": {},
    "per_head": {"per_head": True},
    "gate_first": {"gate_first": True},
    "gate_first_per_head_plain": {"weights": False, "gate_first": True, "per_head": True},
}
# Rows of one panel, columns that fill no vector, several units per row, hidden pairs, and rows with fewer queries.
CASES = {
    "short": (([5, 0, 63], 2, 16), {"targets": [3, 0, 2], "bias": False}, {}, None),
    "odd": (([70, 9], 3, 7), {"contextual_length": 2}, {}, None),
    "units": (([1100, 3], 2, 4), {"bias": False}, {}, None),
    "dropout": (([70, 9], 2, 6), {}, {"dropout": SHARE[0], "dropout_seed": SHARE[1], **dropout_of(*SHARE)}, None),
    "queries": (([90, 600, 4], 2, 6), {"bias": False}, {}, [0, 520, 4]),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("sizes", "options", "dropout", "queries"), CASES.values(), ids=CASES)
def test_equals_the_definitions_forward_and_backward(sizes, options, dropout, queries, form):
    compare(RUN, 0, {**gated_case(*sizes, **options, **form), **dropout}, queries)


def test_the_last_head_of_a_block_gates_it_whatever_the_threads():
    case = gated_case([1300, 700, 20], 3, 8, bias=False)
    first, *others = (RUN.attention(0, case, np.ones(case["gate"].shape)) for _ in range(4))
    for again in others:
        for name, gradient in again.items():
            np.testing.assert_array_equal(gradient, first[name])


def test_no_tokens():
    for lengths in ([0, 0], []):
        case = gated_case(lengths, 2, 3)
        assert RUN.attention(0, case)["gated"].size == 0
        assert not np.any(RUN.attention(0, case, np.zeros(case["gate"].shape))["norm_weight_grads"])


def test_refusals():
    tokens, splits = tf.zeros([3, 2, 4]), tf.constant([0, 3], tf.int64)

    def refuses(words, error=tf.errors.InvalidArgumentError, gate=tokens, **norm):
        with pytest.raises(error, match=words):
            given = ops.OutputGate(gate, **norm)
            tf.function(lambda: ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0, gate=given))()

    refuses("weight and bias of an OutputGate must be given together", ValueError, weight=tf.ones(8))
    refuses(
        "norm_weight must have one entry per column of all heads, that is 8, got 4", weight=tf.ones(4), bias=tf.ones(4)
    )
    refuses(
        "norm_bias must have one entry per column of all heads, that is 8, got 1", weight=tf.ones(8), bias=tf.ones(1)
    )

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def call(gate):
        return ops.jagged_attention(tokens, tokens, tokens, splits, scale=1.0, gate=ops.OutputGate(gate))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gate must have the shape of the attention \[3,2,4\]"):
        call(tf.zeros([3, 8]))


def test_shape_function():
    def attend(q, v, splits, gate):
        return ops.jagged_attention(q, q, v, splits, scale=1.0, gate=ops.OutputGate(gate))

    unknown = (tf.float32, [None, None, None])
    shapes = (tf.float32, [7, None, 8]), (tf.float32, [None, None, 3]), (tf.int64, [3])
    assert inferred(attend, *shapes, (tf.float32, [None, 2, None])) == [[7, 2, 3]]
    assert inferred(attend, *shapes, unknown) == [[7, None, 3]]
    with pytest.raises(ValueError, match="must be rank 3"):
        inferred(attend, *shapes, (tf.float32, [7, 8]))
