"""Tables inside TensorFlow's and Keras' own savers: tf.train.Checkpoint, save_weights, BackupAndRestore, model.save.

With one process these savers write the tables as bytes next to the weights. That suits small tables.
tf_fusedrec.checkpoint streams, verifies, and runs in the background. With several processes these savers raise
ValueError for tables, because a file of one process would lack all other rows. So do Keras' legacy HDF5 files, which
have variables only, and SavedModels, which would have the training calls.

With one process the list of get_weights has a copy of the rows, which set_weights restores. With several processes,
and for a list that has lost the copy, set_weights raises ValueError for a model with rows. fit raises ValueError for
callbacks and optimizers that would keep dense weights without their rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, optimizers_in, tf
from tf_fusedrec.tables.records import counters_of, restore_counters

_REMEDY = (
    "Use tf_fusedrec.checkpoint.save and load, or callbacks.Checkpoint: every process writes its rows. For the dense "
    "weights alone, save inside `with tf_fusedrec.checkpoint.without_tables():`."
)
_SERVED = (
    "Use tf_fusedrec.export(model, folder) for a SavedModel that serves, and tf_fusedrec.checkpoint.save, or with one "
    "process model.save('name.keras'), to train on."
)
_excluded: contextvars.ContextVar = contextvars.ContextVar("tables are excluded", default=False)


@contextlib.contextmanager
def without_tables() -> Iterator[None]:
    """In this context the savers of TensorFlow and Keras neither save nor restore tables.

    Examples:
      >>> with fr.checkpoint.without_tables():
      ...     model.save_weights("dense.weights.h5")
    """
    token = _excluded.set(True)
    try:
        yield
    finally:
        _excluded.reset(token)


class TableState(tf.train.experimental.PythonState):
    """The tables of one FusedEmbedding, for TensorFlow's and Keras' savers. The layer tracks it as an attribute.

    Keras' lists of weights have the rows in the place of `anchor`, a weight of the layer.
    """

    def __init__(self, layer: str, tables: Sequence[Any], ranks: int, anchor: tf.Variable | None = None):
        self._layer, self._tables, self._ranks, self._anchor = layer, list(tables), ranks, anchor

    def serialize(self) -> bytes:
        """All rows with slots and counters, and the optimizers' step counts; empty inside without_tables."""
        if _excluded.get():
            return b""
        self._refuse_several_ranks("written by one process would hold only the rows of that process")
        described, buffers = {}, []
        for name, table in self.copied(in_hash_order=True).items():
            rows = table.pop("rows")
            for ids, records in rows.values():
                buffers += [ids.tobytes(), records.tobytes()]
            sections = {section: [len(ids), records.dtype.itemsize] for section, (ids, records) in rows.items()}
            described[name] = {**table, "sections": sections}
        header = json.dumps(described).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *buffers])

    def deserialize(self, string_value: bytes) -> None:
        """Replaces all rows by the rows of `serialize`. Does nothing inside without_tables."""
        if _excluded.get():
            return
        self._refuse_several_ranks("restored by every process would give each of them all rows")
        if not string_value:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: the file was saved without tables. If it is the dense part of a "
                "checkpoint of tf_fusedrec, load that with tf_fusedrec.checkpoint.load."
            )
        self.put_back(self._parsed(string_value))

    def copied(self, *, in_hash_order: bool = False) -> dict[str, dict[str, Any]]:
        """A copy of all rows with slots and counters, and of the optimizers' step counts, by table.

        Entry "rows" of a table is {section: (ids <int64>[n], records [n])}.
        """
        return {
            name: {
                "spec": table.spec(name), **counters_of(table),
                "rows": {
                    section: table.snapshot(name, section, in_hash_order=in_hash_order)
                    for section in table.sections_of(name)
                },
            }
            for table in self._tables for name in table.names
        }  # fmt: skip

    def put_back(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces all rows by the rows of `copied`."""
        for table in self._tables:
            table.clear()
            for name in table.names:
                for section, (ids, records) in saved[name]["rows"].items():
                    table.restore(name, section, ids, records)
            restore_counters(table, [saved[name] for name in table.names])

    def position_in(self, weights: Sequence[tf.Variable]) -> int | None:
        """Position of the anchor in Keras' list of a model's weights; None if the model lacks it."""
        at = 0
        for weight in weights:
            if weight is self._anchor:
                return at
            at += getattr(weight, "num_tensors", 1)  # a lookup table of Keras has several places
        return None

    def in_weights(self) -> np.ndarray:
        """The anchor's number for get_weights: 0, or -0 if there are rows, with a copy of them. Files keep the sign."""
        value = np.array(-0.0 if self._has_rows() else 0.0, np.float32).view(_WithRows)
        if self._ranks == 1 and not _excluded.get():
            value.rows = self.copied()
        return value

    def rows_in(self, value: Any) -> dict[str, dict[str, Any]] | None:
        """The copy of rows that a list for set_weights has in the anchor's place; None: the tables stay."""
        if _excluded.get():
            return None
        rows = getattr(value, "rows", None) if self._ranks == 1 else None
        if rows is not None:
            self._check_specs(rows, "the list of weights")
            return rows
        if not self._has_rows() and not np.signbit(value).any():
            return None
        lost = (
            f"with {self._ranks} processes a list of weights has no rows"
            if self._ranks > 1
            else "this list of weights has no rows, because only the list of get_weights itself has them"
        )
        raise ValueError(
            f"FusedEmbedding {self._layer!r}: set_weights would leave its tables {self.names()} behind: {lost}. Use "
            "callbacks.EarlyStopping(restore_best=True), callbacks.Checkpoint(save_best=True) or "
            "tf_fusedrec.checkpoint.save and load. For the dense weights alone, call it inside "
            "`with tf_fusedrec.checkpoint.without_tables():`."
        )

    def refuse_fit(self, callbacks: Sequence[Any], optimizer: Any) -> None:
        """Raises ValueError if a callback, or the dense weights' optimizer, would keep these without their rows.

        Also refuses a callback that would stop one rank alone.
        """
        if _excluded.get() or not self._tables:
            return
        refuse_optimizer(self._layer, optimizer)
        for number, callback in enumerate(callbacks):
            name, remedy = type(callback).__name__, "callbacks.Checkpoint, with save_best=True for the best epoch"
            if self._ranks > 1 and getattr(callback, "restore_best_weights", False):
                fault, remedy = "would restore no rows", "callbacks.EarlyStopping(restore_best=True)"
            elif self._ranks > 1 and isinstance(callback, keras.callbacks.BackupAndRestore):
                fault, remedy = "would write the rows of one process", "callbacks.Checkpoint and its load"
            elif self._ranks > 1 and isinstance(callback, keras.callbacks.TerminateOnNaN):
                if any(getattr(later, "stops_all_ranks", False) for later in callbacks[number:]):
                    continue
                fault, remedy = "would stop a rank for which the others wait", "callbacks.Interrupt() after it"
            elif not keras_api.saves_whole_model(callback):
                continue
            elif self._ranks > 1:
                fault = "would write the rows of one process"
            elif not _holds_rows(callback.filepath, callback.save_weights_only):
                fault = f"would write no rows to {callback.filepath!r}, a legacy HDF5 file or a SavedModel"
                remedy += ", or a filepath that ends in .keras, with save_weights_only in .weights.h5"
            else:
                continue
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: {name} {fault} (tables {self.names()}, {self._ranks} processes). "
                f"Use {remedy}."
            )

    def save_own_variables(self, store: Any) -> None:
        """Puts the tables into Keras' .weights.h5 and .keras files. The layer's anchor is zero and needs no place."""
        store["tables"] = np.frombuffer(self.serialize(), np.uint8)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads the tables from such a file."""
        if "tables" not in store.keys():  # noqa: SIM118  The store of Keras 3.9 has no __contains__.
            raise ValueError(f"FusedEmbedding {self._layer!r}: the file holds no tables; this layer did not save it.")
        self.deserialize(np.asarray(store["tables"]).tobytes())

    def refuse_hdf5(self) -> None:
        """Raises ValueError, because a legacy HDF5 file cannot have tables. Does nothing inside without_tables."""
        if not _excluded.get():
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: a legacy HDF5 file (.h5) cannot hold its tables {self.names()}. "
                f"{_REMEDY}"
            )

    def refuse_saved_model(self) -> None:
        """Raises ValueError, because a SavedModel of Keras or TensorFlow has neither tables nor calls that serve."""
        raise ValueError(
            f"FusedEmbedding {self._layer!r}: a SavedModel of model.save(folder), model.export or tf.saved_model.save "
            f"cannot hold its tables {self.names()}. {_SERVED}"
        )

    def _trackable_children(self, save_type: str = "checkpoint", **more: Any) -> dict[str, Any]:
        # tf.saved_model.save calls this method of every object before it traces functions that use the tables.
        if save_type == "savedmodel":
            self.refuse_saved_model()
        return super()._trackable_children(save_type, **more)

    def _has_rows(self) -> bool:
        return any(table.size(name) for table in self._tables for name in table.names)

    def names(self) -> list[str]:
        return [name for table in self._tables for name in table.names]

    def _refuse_several_ranks(self, why: str) -> None:
        if self._ranks > 1:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: with {self._ranks} processes, a file of tf.train.Checkpoint, "
                f"save_weights, BackupAndRestore or model.save {why} (tables {self.names()}). {_REMEDY}"
            )

    def _parsed(self, data: bytes) -> dict[str, dict[str, Any]]:
        """The description of each table, with "rows": {section: (ids, records)}. All checks precede any use."""
        backends = {name: table for table in self._tables for name in table.names}
        at = 8 + int.from_bytes(data[:8], "little")
        described = json.loads(data[8:at])
        self._check_specs(described, "the file")
        for name, table in described.items():
            table["rows"] = {}
            for section, (rows, record_bytes) in table["sections"].items():
                ids, records = data[at : at + 8 * rows], data[at + 8 * rows : at + (8 + record_bytes) * rows]
                at += (8 + record_bytes) * rows
                if name in backends:
                    record = backends[name].record_dtype(section)
                    table["rows"][section] = np.frombuffer(ids, "<i8"), np.frombuffer(records, record)
        return described

    def _check_specs(self, saved: Mapping[str, Mapping[str, Any]], where: str) -> None:
        """Raises ValueError unless `saved` has all tables, with their present specs."""
        backends = {name: table for table in self._tables for name in table.names}
        missing = sorted(set(backends) - set(saved))
        if missing:
            raise ValueError(
                f"FusedEmbedding {self._layer!r}: {where} holds no table {missing[0]!r}. It holds {sorted(saved)}."
            )
        for name, backend in backends.items():
            now, was = (json.loads(json.dumps(spec)) for spec in (backend.spec(name), saved[name]["spec"]))
            if now != was:
                raise ValueError(f"table {name!r} was saved with the spec {was}, but has {now} now.")


class _WithRows(np.ndarray):
    """<float32>[] of a layer in a list of weights. Copies of it keep the rows; computed and pickled values do not."""

    rows: dict[str, dict[str, Any]] | None = None

    def copy(self, order: Any = "C") -> _WithRows:
        return self.__deepcopy__({})

    def __copy__(self) -> _WithRows:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any, /) -> _WithRows:
        value = np.array(self).view(_WithRows)
        value.rows = self.rows
        return value

    def __reduce__(self) -> Any:
        return np.array(self).__reduce__()

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(array, _WithRows) for array in options.get("out") or ()):
            del options["out"]  # A number changed in place is a different number.
        return getattr(ufunc, method)(*(np.array(x) if isinstance(x, _WithRows) else x for x in inputs), **options)


def _holds_rows(path: str, weights_only: bool) -> bool:
    """Returns whether a file that Keras saves has the tables (save_own_variables, serialize)."""
    return path.endswith(".weights.h5" if weights_only else ".keras") or (weights_only and not keras_api.is_hdf5(path))


def refuse_optimizer(layer: str, optimizer: Any) -> None:
    """Raises ValueError if an optimizer averages the dense weights over steps, or its gradients keep a scale."""
    for part in optimizers_in(optimizer):
        if getattr(part, "use_ema", False):
            raise ValueError(
                f"FusedEmbedding {layer!r}: the optimizer {type(part).__name__} has use_ema=True, which would "
                "replace the dense weights by their average over steps and leave the rows of the last step. Use "
                "use_ema=False."
            )
        if getattr(part, "loss_scale_factor", None) is not None:
            raise ValueError(
                f"FusedEmbedding {layer!r}: the optimizer {type(part).__name__} has loss_scale_factor="
                f"{part.loss_scale_factor}, by which gradients of rows would stay multiplied. Use "
                "loss_scale_factor=None, and a PipelinedModel with a LossScaleOptimizer for a scaled loss."
            )


def refuse_scale(names: Sequence[str], cause: str) -> typing.NoReturn:
    """Raises ValueError, because gradients of rows would keep the scale of the loss."""
    raise ValueError(
        f"tables {names} cannot train under {cause} here: the loss is scaled, and rows are trained before the scale is "
        "taken off. Use PipelinedModel, a loop inside `embedding.loss_scaled_by(optimizer)`, or the policy "
        "mixed_bfloat16 and no LossScaleOptimizer."
    )


def refuse_fit(model: Any, callbacks: Sequence[Any]) -> None:
    """Raises ValueError if a fit would keep dense weights of a model without rows. See TableState.refuse_fit."""
    for layer in model._flatten_layers():
        for state in states_of(layer, recursive=False):
            state.refuse_fit(callbacks, getattr(model, "optimizer", None) if layer.trainable else None)


def states_of(layer: Any, recursive: bool = True) -> Iterator[TableState]:
    """The tables of a FusedEmbedding; with `recursive` of all in a model or layer."""
    for inner in layer._flatten_layers() if recursive else [layer]:
        yield from (value for value in vars(inner).values() if isinstance(value, TableState))
