"""Oracle for segment_unique. NumPy only; imports nothing from tf_fusedrec."""

import numpy as np


def segment_unique_oracle(ids, segment_splits):
    unique, inverse, splits = [], np.empty(len(ids), np.int32), [0]
    for begin, end in zip(segment_splits[:-1], segment_splits[1:]):
        row_of = {}  # first occurrence decides the order
        for n in range(begin, end):
            row_of.setdefault(int(ids[n]), len(row_of))
            inverse[n] = splits[-1] + row_of[int(ids[n])]
        unique += list(row_of)
        splits.append(len(unique))
    return np.array(unique, np.int64), np.array(splits, np.int64), inverse
