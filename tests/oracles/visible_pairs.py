"""Oracle for the masks of jagged attention. NumPy only, because a GPU machine need not have TensorFlow."""

import numpy as np


def visible_pairs(
    length,
    num_targets=0,
    contextual_length=0,
    attention_window=0,
    min_full_length=0,
    target_group_size=1,
    global_window=0,
):
    """Returns the mask <bool>[length, length] of one row: queries (rows) by visible keys (columns)."""
    places = np.arange(length)
    context = max(contextual_length - 1, 0)
    top = length - num_targets - context
    number = np.minimum(np.maximum(places - context, 0), top)
    asks, answers = number[:, None], number[None, :]
    visible = (places[:, None] == places[None, :]) | (asks > answers)
    if attention_window > 0:
        near = asks - answers <= attention_window
        if min_full_length > 0:
            near = near | (asks >= top - min_full_length)
        if global_window > 0:  # the context and the first tokens of the history
            first_history = np.flatnonzero(places >= contextual_length)[:global_window]
            near = near | (places < contextual_length)[None, :] | np.isin(places, first_history)[None, :]
        visible &= near
    if contextual_length > 0:
        visible |= (asks == 0) & (answers < top)
    for group in range(length - num_targets, length, target_group_size):  # Causal inside each group.
        size = min(target_group_size, length - group)
        visible[group : group + size, group : group + size] |= np.tri(size, dtype=bool)
    return visible


def masks_of_row(masks, row):
    """Returns the masks of one row of a batch. `contextual_length` may be one number per row."""
    context = np.asarray(masks.get("contextual_length", 0))
    return {**masks, "contextual_length": int(context if context.ndim == 0 else context[row])}
