"""Reads a job's TensorBoard files."""

import pathlib

from tf_fusedrec import tf


def scalars(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the values of all event files below the folder, in order, by tag."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                found.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return found
