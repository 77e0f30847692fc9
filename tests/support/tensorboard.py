"""Reads what a job has written for TensorBoard."""

import pathlib

from tf_fusedrec import tf


def scalars(folder: pathlib.Path) -> dict[str, list[float]]:
    """Of all event files below the folder: by tag, the values in their order."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                found.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return found
