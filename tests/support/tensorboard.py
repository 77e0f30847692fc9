"""Reads a job's TensorBoard files."""

import pathlib

from tf_fusedrec import tf


def scalars(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the numbers of all event files below the folder, in order, by tag. Other summaries have none."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                tensor = tf.make_ndarray(value.tensor)
                found.setdefault(value.tag, []).extend([float(tensor)] if tensor.size == 1 else [])
    return found
