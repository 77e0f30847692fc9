"""Small random batches in the two layouts, and a batch split into one row per exposure."""

import numpy as np

from tf_fusedrec import tf

START = 1_700_000_000


def ragged(lengths, values, dtype=np.int64):
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return tf.RaggedTensor.from_row_splits(np.asarray(values, dtype), splits.astype(np.int64))


def ranking_batch(histories, exposures, seed=0):
    """Returns a batch with these history and exposure lengths, one entry per user."""
    rng = np.random.default_rng(seed)
    users, past, shown = len(histories), sum(histories), sum(exposures)

    def times(lengths, begin):
        gaps = [np.cumsum(rng.integers(30, 90_000, length)) for length in lengths]
        return np.concatenate([*gaps, []]) + begin

    return {
        "user_id": tf.constant(rng.integers(1, 60, users), tf.int64),
        "user_budget": tf.constant(rng.integers(0, 4, users), tf.int64),
        "history_item": ragged(histories, rng.integers(1, 60, past)),
        "history_action": ragged(histories, rng.integers(0, 4, past)),
        "history_time": ragged(histories, times(histories, START)),
        "exposed_item": ragged(exposures, rng.integers(1, 60, shown)),
        "exposed_time": ragged(exposures, times(exposures, START + 10_000_000)),
        "exposed_click": ragged(exposures, rng.integers(0, 2, shown), np.float32),
        "exposed_conversion": ragged(exposures, rng.integers(0, 2, shown), np.float32),
    }


def one_row_per_exposure(batch):
    """Returns the same exposures, each in a separate row with a copy of its user."""
    exposed = batch["exposed_item"]
    user = exposed.value_rowids()
    rows = {}
    for name, column in batch.items():
        if name.startswith("exposed_"):
            rows[name] = ragged([1] * int(tf.size(user)), column.values, column.dtype.as_numpy_dtype)
        else:
            rows[name] = tf.gather(column, user)
    return rows


def retrieval_batch(lengths, seed=0):
    """Returns a batch of histories with these lengths."""
    rng = np.random.default_rng(seed)
    times = [START + np.cumsum(rng.integers(30, 90_000, length)) for length in lengths]
    return {
        "item_id": ragged(lengths, rng.integers(1, 60, sum(lengths))),
        "timestamp": ragged(lengths, np.concatenate([*times, []])),
    }


def of_any_size(batch):
    """Returns the signature of batches with any number of users, like a data set's."""

    def spec_of(tensor):
        if isinstance(tensor, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], tensor.dtype, 1, tf.int64)
        return tf.TensorSpec([None], tensor.dtype)

    return {name: spec_of(tensor) for name, tensor in batch.items()}
