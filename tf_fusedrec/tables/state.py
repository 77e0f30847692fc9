"""Tables inside TensorFlow's and Keras' own savers: tf.train.Checkpoint, save_weights, BackupAndRestore, model.save.

With one process these savers write the tables as bytes beside the weights. That suits small tables.
tf_fusedrec.checkpoint streams, verifies, and runs in the background. With several processes the tables refuse these
savers, because a file of one process would lack the rows of the others. Tables always refuse Keras' legacy HDF5 files,
which hold variables alone, and SavedModels, which would hold the calls of training.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf

_REMEDY = (
    "Use tf_fusedrec.checkpoint.save and load, or callbacks.Checkpoint: every process writes its rows. For the dense "
    "weights alone, save inside `with tf_fusedrec.checkpoint.without_tables():`."
)
_SERVED = (
    "Use tf_fusedrec.export(model, folder) for a SavedModel that serves, and tf_fusedrec.checkpoint.save, or with one "
    "process model.save('name.keras'), to train on."
)
_left_out: contextvars.ContextVar = contextvars.ContextVar("tables are left out", default=False)


@contextlib.contextmanager
def without_tables() -> Iterator[None]:
    """In this context the savers of TensorFlow and Keras neither save nor restore tables."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


class TableState(tf.train.experimental.PythonState):
    """The tables of one FusedEmbedding, for savers that know no tables. The layer tracks it as an attribute.

    Args:
      layer: Name of the layer, for messages.
      tables: Backends of the layer.
      ranks: Number of processes.

    Raises (when saving or restoring):
      ValueError: there are several processes, or the file holds other tables.
    """

    def __init__(self, layer: str, tables: Sequence[Any], ranks: int):
        self._layer, self._tables, self._ranks = layer, list(tables), ranks

    def serialize(self) -> bytes:
        """All rows with slots and counters, and the optimizers' step counts; empty inside without_tables."""
        if _left_out.get():
            return b""
        self._refuse_several_ranks("written by one process would hold only the rows of that process")
        described, buffers = {}, []
        for table in self._tables:
            for name in table.names:
                sections = {}
                for section in table.sections_of(name):
                    ids, records = table.snapshot(name, section)
                    sections[section] = [len(ids), records.dtype.itemsize]
                    buffers += [ids.tobytes(), records.tobytes()]
                described[name] = {
                    "spec": table.spec(name), "clock": table.clock, "iterations": _iterations(table),
                    "learning_rate": getattr(table.optimizer, "rates", None), "sections": sections,
                }  # fmt: skip
        header = json.dumps(described).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *buffers])

    def deserialize(self, string_value: bytes) -> None:
        """Replaces all rows by the rows of `serialize`. Does nothing inside without_tables."""
        if _left_out.get():
            return
        self._refuse_several_ranks("restored by every process would give each of them all rows")
        if not string_value:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: the file was saved without tables. If it is the dense part of a "
                "checkpoint of tf_fusedrec, load that with tf_fusedrec.checkpoint.load."
            )
        saved = self._parsed(string_value)
        for table in self._tables:
            table.clear()
            for name in table.names:
                for section, (ids, records) in saved[name]["rows"].items():
                    table.restore(name, section, ids, records)
            table.clock = max(saved[name]["clock"] for name in table.names)
            if saved[table.names[0]]["iterations"] is not None:
                table.optimizer.iterations.assign(max(saved[name]["iterations"] for name in table.names))
            rates = [saved[name]["learning_rate"] for name in table.names if saved[name].get("learning_rate")]
            if rates:
                table.optimizer.restore_rates(rates)

    def save_own_variables(self, store: Any) -> None:
        """Puts the tables into Keras' .weights.h5 and .keras files. The layer's anchor is zero and needs no place."""
        store["tables"] = np.frombuffer(self.serialize(), np.uint8)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads the tables from such a file.

        Raises:
          ValueError: the file holds no tables.
        """
        if "tables" not in store:
            raise ValueError(f"FusedEmbedding {self._layer!r}: the file holds no tables; this layer did not save it.")
        self.deserialize(np.asarray(store["tables"]).tobytes())

    def refuse_hdf5(self) -> None:
        """Raises ValueError, because a legacy HDF5 file cannot hold tables. Does nothing inside without_tables."""
        if not _left_out.get():
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: a legacy HDF5 file (.h5) cannot hold its tables {self._names()}. "
                f"{_REMEDY}"
            )

    def refuse_saved_model(self) -> None:
        """Raises ValueError, because a SavedModel of Keras or TensorFlow holds neither tables nor calls that serve."""
        raise ValueError(
            f"FusedEmbedding {self._layer!r}: a SavedModel of model.save(folder), model.export or tf.saved_model.save "
            f"cannot hold its tables {self._names()}. {_SERVED}"
        )

    def _trackable_children(self, save_type: str = "checkpoint", **more: Any) -> dict[str, Any]:
        # tf.saved_model.save calls this method of every object before it traces functions that use the tables.
        if save_type == "savedmodel":
            self.refuse_saved_model()
        return super()._trackable_children(save_type, **more)

    def _names(self) -> list[str]:
        return [name for table in self._tables for name in table.names]

    def _refuse_several_ranks(self, why: str) -> None:
        if self._ranks > 1:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: with {self._ranks} processes, a file of tf.train.Checkpoint, "
                f"save_weights, BackupAndRestore or model.save {why} (tables {self._names()}). {_REMEDY}"
            )

    def _parsed(self, data: bytes) -> dict[str, dict[str, Any]]:
        """The description of each table, with "rows": {section: (ids, records)}. All checks precede any use."""
        backends = {name: table for table in self._tables for name in table.names}
        at = 8 + int.from_bytes(data[:8], "little")
        described = json.loads(data[8:at])
        missing = sorted(set(backends) - set(described))
        if missing:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: the file holds no table {missing[0]!r}. It holds {sorted(described)}."
            )
        for name, table in described.items():
            now = json.loads(json.dumps(backends[name].spec(name))) if name in backends else table["spec"]
            if now != table["spec"]:
                raise ValueError(f"table {name!r} was saved with the spec {table['spec']}, but has {now} now.")
            table["rows"] = {}
            for section, (rows, record_bytes) in table["sections"].items():
                ids, records = data[at : at + 8 * rows], data[at + 8 * rows : at + (8 + record_bytes) * rows]
                at += (8 + record_bytes) * rows
                if name in backends:
                    record = backends[name].record_dtype(section)
                    table["rows"][section] = np.frombuffer(ids, "<i8"), np.frombuffer(records, record)
        return described


def _iterations(table: Any) -> int | None:
    iterations = getattr(table.optimizer, "iterations", None)
    return None if iterations is None else int(iterations.numpy())


def _asking_tables_first(
    write: Callable[..., None],
    model_at: int,
    refuse: Callable[[TableState], None],
    applies: Callable[..., bool] = lambda *arguments, **options: True,
) -> Callable[..., None]:
    """Wraps `write` so that it refuses models with tables.

    Args:
      write: Writer of a model.
      model_at: Position of the model among its arguments.
      refuse: Raises the error for the tables of a layer.
      applies: Function of the writer's arguments that says whether tables are refused.
    """

    @functools.wraps(write)
    def write_without_tables(*arguments: Any, **options: Any) -> None:
        if applies(*arguments, **options):
            for layer in arguments[model_at]._flatten_layers():
                for value in vars(layer).values():
                    if isinstance(value, TableState):
                        refuse(value)
        write(*arguments, **options)

    return write_without_tables


def _writes_hdf5(model: Any, filepath: Any, overwrite: bool = True, save_format: str | None = None, **_: Any) -> bool:
    if save_format is None:
        return keras.src.saving.legacy.saving_utils.is_hdf5_filepath(str(filepath))
    return save_format.lower().strip() in ("hdf5", "h5", "keras")


# These writers read a layer's variables or its call, and call no method of the layer that could refuse.
# Writers of whole files refuse before they open the file, which would truncate an existing one.
_hdf5, _archive, _files = (
    keras.src.saving.legacy.hdf5_format, keras.src.export.export_lib, keras.src.saving.legacy.save
)  # fmt: skip
_hdf5.save_weights_to_hdf5_group = _asking_tables_first(_hdf5.save_weights_to_hdf5_group, 1, TableState.refuse_hdf5)
_hdf5.save_model_to_hdf5 = _asking_tables_first(_hdf5.save_model_to_hdf5, 0, TableState.refuse_hdf5)
_files.save_weights = _asking_tables_first(_files.save_weights, 0, TableState.refuse_hdf5, _writes_hdf5)
_archive.export_model = _asking_tables_first(_archive.export_model, 0, TableState.refuse_saved_model)
