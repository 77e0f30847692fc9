"""Oracle for fuse_ids. NumPy only; imports nothing from tf_fusedrec."""

import numpy as np


def fuse_ids_oracle(features, segments, num_segments):
    per_segment = [
        sum(len(ids) for ids, s in zip(features, segments) if s == segment) for segment in range(num_segments)
    ]
    fused = np.concatenate([np.asarray(ids, np.int64) for ids in features])
    splits = np.concatenate([[0], np.cumsum(per_segment)]).astype(np.int64)
    return fused, splits, np.array([len(ids) for ids in features], np.int64)
