"""Edge cases and small random inputs for all ops that take ids in segments."""

import numpy as np

INT64_MIN, INT64_MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max

EDGE_CASES: dict[str, list[list[int]]] = {
    "no_ids": [[]],
    "no_ids_in_three_segments": [[], [], []],
    "one_id": [[7]],
    "empty_first_segment": [[], [1, 2, 1]],
    "empty_middle_segment": [[1, 1], [], [1, 2]],
    "empty_last_segment": [[3, 3, 1], []],
    "one_id_repeated": [[5] * 33],
    "all_distinct": [list(range(100)), list(range(50))],
    "negative_and_extreme": [[-1, INT64_MIN, INT64_MAX, -1, 0], [INT64_MIN, -1]],
    "same_ids_in_all_segments": [[1, 2, 3]] * 4,
    "longer_than_the_prefetch": [[i % 7 for i in range(41)]],
}


def from_segments(segments: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids <int64>[N] and segment_splits <int64>[S+1] of a list of segments."""
    ids = np.array([i for segment in segments for i in segment], np.int64)
    return ids, splits_of([len(segment) for segment in segments])


def splits_of(lengths) -> np.ndarray:
    """Returns the bounds <int64>[S+1] of neighbours of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def random_segments(seed: int, max_segments: int = 6, max_length: int = 40, vocabulary: int = 12):
    """Returns a small random case with short segments over few ids, so that ids repeat often."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, max_length, random.integers(1, max_segments + 1))
    return from_segments([random.integers(-vocabulary, vocabulary, n).tolist() for n in lengths])


def communities(random, samples: int = 240, groups: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and row_splits of samples of 3 to 9 ids.

    Sample b is of group b % groups, whose samples share 20 ids. One id in 4 is anyone's.
    """
    lengths = random.integers(3, 10, samples)
    row = np.repeat(np.arange(samples), lengths)
    own = (row % groups) * 1000 + random.integers(0, 20, len(row))
    ids = np.where(random.random(len(row)) < 0.25, 10_000 + random.integers(0, 40, len(row)), own)
    return ids, splits_of(lengths)
