"""visible_keys equals the counts of masks that are built pair by pair."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.cases import splits_of
from tests.oracles.visible_pairs import visible_pairs
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers.jagged import visible_keys


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
def test_all_masks(rows, with_targets, of_each_row, window, full, group, first):
    """Every row has its context first, then history and targets."""
    contexts = [context if of_each_row else rows[0][2] for _, _, context in rows]
    lengths = [context + history + targets for context, (history, targets, _) in zip(contexts, rows)]
    targets = [count for _, count, _ in rows] if with_targets else None
    first = first if window else 0
    ours = visible_keys(
        tf.constant(splits_of(lengths)),
        None if targets is None else tf.constant(targets),
        tf.constant(contexts) if of_each_row else contexts[0],
        attention_window=window,
        min_full_length=full,
        global_window=first,
        target_group_size=group,
    )
    np.testing.assert_array_equal(ours, counted(lengths, targets, contexts, window, full, group, first))
