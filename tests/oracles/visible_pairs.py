"""Who sees whom in jagged attention. NumPy alone: a machine with a GPU need not have TensorFlow."""

import numpy as np


def visible_pairs(length, num_targets=0, contextual_length=0, attention_window=0, min_full_length=0):
    """<bool>[length, length] of one row: who (rows) sees whom (columns)."""
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
        visible &= near
    if contextual_length > 0:
        visible |= (asks == 0) & (answers < top)
    return visible
