"""masks.py against the literal rule, and the picture in its docstring."""

import numpy as np
import pytest

from tests.oracles.attention import mask_oracle
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import masks

LENGTHS = [0, 1, 2, 3, 4, 7, 12]


def visible(lengths, num_targets, contextual_length):
    lengths = tf.constant(lengths, tf.int64)
    targets = None if num_targets is None else tf.constant(num_targets, tf.int64)
    longest = tf.reduce_max(lengths)
    return masks.attention_mask(lengths, longest, targets, contextual_length).numpy()


@pytest.mark.parametrize("contextual_length", [0, 1, 3])
@pytest.mark.parametrize("targets", [None, 0, 1, 4, 100])
def test_every_row_follows_the_rule_and_sees_no_padding(targets, contextual_length):
    counts = None if targets is None else [min(targets, n) for n in LENGTHS]
    ours = visible(LENGTHS, counts, contextual_length)
    for row, length in enumerate(LENGTHS):
        mine = ours[row if len(ours) > 1 else 0][:length]
        expected = mask_oracle(length, None if counts is None else counts[row], contextual_length)
        np.testing.assert_array_equal(mine[:, :length], expected)
        assert not mine[:, length:].any()


def test_one_mask_serves_all_rows_of_a_purely_causal_batch():
    np.testing.assert_array_equal(visible([3, 2], None, 0), [np.tri(3, dtype=bool)])


def test_the_picture_in_the_docstring():
    drawn = [line for line in masks.attention_mask.__doc__.splitlines() if line.count(" 1") > 1]
    expected = np.array([[int(digit) for digit in line.split()] for line in drawn if "," not in line])
    np.testing.assert_array_equal(visible([7], [2], 2)[0], expected == 1)
