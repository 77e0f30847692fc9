"""Served tables for servers with this package: the hash table of training, filled from files of the SavedModel.

A file has records [id <int64> | row] by ascending id, without optimizer slots. The graph that reads a file also
verifies its checksum, so every loader refuses a damaged file without more code.
"""

from __future__ import annotations

import contextlib
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.exchange import routing
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows

_COPY = "Copy the export again."
_RECORD_HEADER_BYTES = 16  # A record of the table begins with counters, which a server does not need.


def served_dtype(config: TableConfig) -> str:
    """dtype in which a server keeps the rows of a table: as training stores them, so initial rows are rounded alike."""
    if config.storage.dtype in (None, "float32"):
        return config.dtype
    return "float32" if config.storage.dtype == "mixed" else config.storage.dtype


class NativeTables(tf.Module):
    """Constant tables of a SavedModel, by name. Their rows [n, D] have the dtype in which the server keeps them.

    folder: Folder for the files of rows, which are copied into the SavedModel.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[np.ndarray, np.ndarray]],
        unknown: Mapping[str, InitialRows | None],
        configs: Mapping[str, TableConfig],
        folder: pathlib.Path,
    ):
        super().__init__(name="tables")
        # TensorFlow saves these files because the module tracks them as assets.
        self._files, self._tables = {}, {}
        for name, (ids, rows) in tables.items():
            path = folder / f"{name}.rows"
            applying.write_records(path, name, ids, applying.bytes_of(rows))
            self._files[name] = tf.saved_model.Asset(str(path))
            self._tables[name] = _Table(configs[name], tf.as_dtype(rows.dtype), unknown[name], self._files[name])

    def find(self, group: int, group_ids: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """As StockTables.find, but a missing id has its initial row, so the second result is True everywhere."""
        rows = [self._tables[table].rows(table_ids) for table, table_ids in group_ids.requests]
        return tf.concat(rows, 0), tf.ones_like(group_ids.ids, tf.bool)


class _Table(tf.saved_model.experimental.TrackableResource):
    def __init__(self, config: TableConfig, stored: tf.DType, unknown: InitialRows | None, file: tf.saved_model.Asset):
        super().__init__()
        self._name, self._dim, self._row_bytes = config.name, config.dim, applying.row_bytes(config.dim, stored.name)
        # float32 rows of a table with mixed storage stay mixed.
        self._stored, self._hot_after = stored, config.storage.hot_after if stored == tf.float32 else 0
        self._unknown, self._file = unknown, file
        # The name is unique, because one process may serve two versions of a model.
        self._shared_name = f"fusedrec/served/{self._name}/{uuid.uuid4().hex}"
        _ = self.resource_handle  # Creates the handle here, outside the functions that capture it.

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        message, splits = routing.own_message(ids, tf.stack([tf.constant(0, tf.int64), tf.size(ids, tf.int64)]))
        read_as = tf.float32 if self._stored == tf.int8 else self._stored
        rows = ops.table_read(self.resource_handle, message, splits, dim=self._dim, dtype=read_as)
        return rows[: tf.size(ids)]

    # TensorFlow calls the methods below when it loads a SavedModel. Nothing destroys the table: it lives as long as the
    # handles in the functions of a loaded model.

    def _create_resource(self) -> tf.Tensor:
        # A session runs its graph many times and needs the name to find the table. A loader of functions calls this
        # once, and the handle is enough.
        of_session = not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function
        table: dict[str, Any] = {"name": self._name, "dim": self._dim, "unknown": "zeros"}
        table["storage.dtype"] = "mixed" if self._hot_after else self._stored.name
        table["storage.hot_after"] = self._hot_after
        if self._unknown is not None:
            initial = {"": self._unknown.distribution, ".a": self._unknown.a, ".b": self._unknown.b}
            table.update({f"initializer{key}": value for key, value in initial.items()})
            table.update(unknown="initial", seed=self._unknown.seed)
            if self._stored == tf.int8:
                table["storage.initial_dtype"] = self._unknown.stored
        on_cpu = self._stored == tf.int8  # where TensorFlow would choose a GPU
        with tf.device("/CPU:0") if on_cpu else contextlib.nullcontext():
            return ops.hash_table(shared_name=self._shared_name, anonymous=not of_session, tables=[table])

    def _initialize(self) -> None:
        path, row_bytes = self._file.asset_path, self._row_bytes
        record_bytes = applying.ID_BYTES + row_bytes
        first_bytes = tf.data.FixedLengthRecordDataset(path, 1).take(applying.HEADER_BYTES)
        header = tf.io.decode_raw(first_bytes.reduce("", lambda start, byte: start + byte), tf.uint8)
        missing = applying.HEADER_BYTES - tf.size(header)
        header = tf.pad(header, [[0, missing]])
        # A truncated header leaves no records, but the data set does not always notice that itself.
        records = tf.data.FixedLengthRecordDataset(path, record_bytes, applying.HEADER_BYTES)
        records = records.take(tf.where(missing > 0, tf.constant(0, tf.int64), -1)).batch(applying.BLOCK_ROWS)

        def insert(read: tuple[tf.Tensor, tf.Tensor], block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rows, checksum = read
            block_bytes = tf.reshape(tf.io.decode_raw(block, tf.uint8), [-1, record_bytes])
            ids = tf.bitcast(block_bytes[:, : applying.ID_BYTES], tf.int64)
            # A damaged id may equal the next one, which the import would refuse without naming the file.
            words = ["rows file ", path, f" of table {self._name} is damaged: its ids do not ascend. {_COPY}"]
            ascending = tf.debugging.Assert(tf.reduce_all(ids[1:] > ids[:-1]), [tf.strings.join(words)])
            with tf.control_dependencies([ascending]):
                ids = tf.identity(ids)
            counters = tf.zeros([tf.size(ids), _RECORD_HEADER_BYTES], tf.uint8)
            records = tf.concat([counters, block_bytes[:, applying.ID_BYTES :]], axis=1)
            ops.table_import(self.resource_handle, 0, ids, records)
            return rows + tf.size(ids, tf.int64), applying.next_checksum(checksum, block_bytes)

        start = tf.constant(0, tf.int64), applying.first_checksum(self._name, row_bytes)
        rows, checksum = records.reduce(start, insert)
        damaged = f" of table {self._name} is damaged: the checksum of its "
        header_differs = f" rows differs from its header. {_COPY}"
        message = tf.strings.join(["rows file ", path, damaged, tf.strings.as_string(rows), header_differs])
        tf.debugging.Assert(tf.reduce_all(header == applying.header_of(rows, checksum)), [message])
