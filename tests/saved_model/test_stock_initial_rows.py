"""Initial rows by plain TensorFlow operations equal our op's, which has an oracle, also in a SavedModel.

test_unknown.py has tables of several forms in one model.
"""

import numpy as np
import pytest

from tf_fusedrec import ops, tf
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows, drawn_rows

LIMITS = np.iinfo(np.int64)
IDS = np.concatenate(
    [[LIMITS.min, LIMITS.max, -1, 0, 1], np.random.default_rng(7).integers(LIMITS.min, LIMITS.max, 9000)]
)
A, B = 0.1, 0.7  # not representable in float32, as which the op takes them


def of_op(spec, dtype):
    n = len(IDS)
    return ops.initial_rows(
        tf.zeros([n, spec.dim], dtype), tf.zeros([n], tf.bool), tf.constant(IDS), tf.constant([0, n], tf.int64),
        seeds=[spec.seed], distribution=spec.distribution, a=spec.a, b=spec.b,
    )  # fmt: skip


def bits(rows):
    return np.ascontiguousarray(rows).view(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["constant", "uniform", "normal", "truncated_normal"])
def test_rows_are_those_of_the_op(distribution, tmp_path):
    """The graph optimizer rewrites the graph of a SavedModel. 45,000 numbers of each kind reach both ends of the
    quantile.
    """
    module, expected = tf.Module(), {}
    for dim, stored, dtype, seed in (
        (5, "float32", "float32", -3),
        (1, "float16", "float32", 2**62),
        (4, "bfloat16", "bfloat16", 9),
    ):
        spec = InitialRows(seed, distribution, A, B, dim, stored)

        def drawn(ids, spec=spec, dtype=dtype):
            return tf.cast(drawn_rows([spec], ids, tf.zeros_like(ids)), dtype)

        function = tf.function(drawn, input_signature=[tf.TensorSpec([None], tf.int64)])
        setattr(module, f"rows{dim}", function)
        expected[dim] = tf.cast(of_op(spec, stored), dtype)
        np.testing.assert_array_equal(bits(drawn(tf.constant(IDS))), bits(expected[dim]))
    tf.saved_model.save(module, str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    for dim, rows in expected.items():
        np.testing.assert_array_equal(bits(getattr(loaded, f"rows{dim}")(tf.constant(IDS))), bits(rows))
        assert getattr(loaded, f"rows{dim}")(tf.zeros([0], tf.int64)).shape == (0, dim)
