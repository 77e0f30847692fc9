"""Dense weights: a tf.train.Checkpoint of model and optimizer, taken into memory, written and checked like all else."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint import disk
from tf_fusedrec.checkpoint.shard_file import REMEDY
from tf_fusedrec.tables.state import without_tables

PREFIX = "dense"


def _checkpoint(model: keras.Model, optimizer: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}))


def snapshot(save: str, model: keras.Model, optimizer: Any) -> dict[str, bytes]:
    """Files of a tf.train.Checkpoint by name, as bytes: training may go on. `save` is the save's unique name."""
    # TensorFlow writes to named places only; this one is in memory.
    folder = f"ram://tf_fusedrec/{save}"
    with without_tables():
        _checkpoint(model, optimizer).write(f"{folder}/{PREFIX}")
    files = {}
    for path in tf.io.gfile.glob(f"{folder}/*"):
        with tf.io.gfile.GFile(path, "rb") as file:
            files[path.rsplit("/", 1)[1]] = file.read()
        tf.io.gfile.remove(path)
    return files


def write(folder: pathlib.Path, files: Mapping[str, bytes]) -> dict[str, list]:
    """Writes the files, synced; returns what `check` wants: [bytes, xxh3_64] by name."""
    for name, data in files.items():
        with disk.new_file(folder / name) as file:
            disk.write(file, data)
    return {name: [len(data), disk.checksum(data)] for name, data in files.items()}


def check(folder: pathlib.Path, files: Mapping[str, list]) -> None:
    """Raises ValueError unless all files are there and whole."""
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.exists():
            raise ValueError(f"Checkpoint file {path} is missing. {REMEDY}")
        data = path.read_bytes()
        if len(data) != size:
            what = "is truncated" if len(data) < size else "has too much"
            raise ValueError(f"Checkpoint file {path} {what}: {len(data)} bytes, want {size}. {REMEDY}")
        if disk.checksum(data) != checksum:
            raise ValueError(f"Checkpoint file {path} is damaged: it differs from its checksum. {REMEDY}")


def read(folder: pathlib.Path, model: keras.Model, optimizer: Any) -> None:
    """Restores the weights that exist; others (an optimizer before its first step) when they are made."""
    with without_tables():
        _checkpoint(model, optimizer).read(str(folder / PREFIX))
