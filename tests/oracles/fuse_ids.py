"""Oracle for fuse_ids. NumPy only; imports nothing from tf_fusedrec."""

import numpy as np


def fuse_ids_oracle(features, segments, num_segments):
    per_segment = [
        sum(len(ids) for ids, s in zip(features, segments) if s == segment) for segment in range(num_segments)
    ]
    fused = np.concatenate([np.asarray(ids, np.int64) for ids in features])
    splits = np.concatenate([[0], np.cumsum(per_segment)]).astype(np.int64)
    return fused, splits


def bags_oracle(features, row_splits, bag_sizes, combiners):
    """Returns bag_splits, bag_scale and bags by feature. row_splits {feature: list} serve features of bag size 0."""
    splits, scale, bags = [0], [], []
    for f, ids in enumerate(features):
        if bag_sizes[f]:
            lengths = [bag_sizes[f]] * (len(ids) // bag_sizes[f])
        else:
            lengths = [end - begin for begin, end in zip(row_splits[f], row_splits[f][1:])]
        bags.append(len(lengths))
        for n in lengths:
            splits.append(splits[-1] + n)
            scale.append({"sum": 1.0, "mean": 1.0 / max(n, 1), "sqrtn": max(n, 1) ** -0.5}[combiners[f]])
    return np.array(splits, np.int64), np.array(scale, np.float32), np.array(bags, np.int64)
