"""Tables as a server with this package has them: the hash table of training, filled from files of the SavedModel.

A file holds records [id <int64> | row], by ascending id: 8 bytes beside the row, and no optimizer slots.
"""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Mapping

import numpy as np

from tf_fusedrec import exchange, ops
from tf_fusedrec._tf_compat import tf

_ID_BYTES = 8
_HEADER_BYTES = 16  # of a record of the table: counters that a server does not need
_BLOCK_ROWS = 1 << 16  # read at once when a server starts


class NativeTables(tf.Module):
    """Tables that never change. An id that is in none of them has a row of zeros.

    Args:
      tables: table name -> ids <int64>[n], ascending, and rows <float>[n, D].
      folder: where files of the rows are made; they are copied into the SavedModel.
    """

    def __init__(self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]], folder: pathlib.Path):
        super().__init__(name="tables")
        # Saved as files because the module knows them.
        self._files = {
            name: tf.saved_model.Asset(_write(folder / f"{name}.rows", *rows)) for name, rows in tables.items()
        }
        self._tables = {
            name: _Table(name, rows.shape[1], rows.dtype, self._files[name]) for name, (_, rows) in tables.items()
        }

    def rows(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows [n, D] of ids <int64>[n]."""
        return self._tables[table].rows(ids)


def _write(path: pathlib.Path, ids: np.ndarray, rows: np.ndarray) -> str:
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    records = np.empty([len(ids), _ID_BYTES + row_bytes], np.uint8)
    records[:, :_ID_BYTES] = ids.astype("<i8").view(np.uint8).reshape(-1, _ID_BYTES)
    records[:, _ID_BYTES:] = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, row_bytes)
    records.tofile(path)
    return str(path)


class _Table(tf.saved_model.experimental.TrackableResource):
    def __init__(self, name: str, dim: int, dtype: np.dtype, file: tf.saved_model.Asset):
        super().__init__()
        self._name, self._dim, self._dtype, self._file = name, dim, tf.as_dtype(dtype), file
        # Two versions of a model may be served by one process: each has its own resource.
        self._shared_name = f"fusedrec/served/{name}/{uuid.uuid4().hex}"

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        message, splits = exchange.own_message(ids, tf.stack([tf.constant(0, tf.int64), tf.size(ids, tf.int64)]))
        found = ops.table_find(self.resource_handle, message, splits, dim=self._dim, dtype=self._dtype)
        return found[: tf.size(ids)]

    # What a SavedModel calls when it is loaded, and when it is dropped.

    def _create_resource(self) -> tf.Tensor:
        return ops.hash_table(
            shared_name=self._shared_name,
            dim=self._dim,
            seeds=[0],
            segment_names=[self._name],
            rule="sgd",
            hyperparameters=[0.0],
            storage=self._dtype.name,
        )

    def _initialize(self) -> None:
        record_bytes = _ID_BYTES + self._dim * self._dtype.size
        records = tf.data.FixedLengthRecordDataset(self._file.asset_path, record_bytes).batch(_BLOCK_ROWS)

        def insert(rows: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
            bytes_of = tf.reshape(tf.io.decode_raw(block, tf.uint8), [-1, record_bytes])
            ids = tf.bitcast(bytes_of[:, :_ID_BYTES], tf.int64)
            header = tf.zeros([tf.size(ids), _HEADER_BYTES], tf.uint8)
            ops.table_import(self.resource_handle, 0, ids, tf.concat([header, bytes_of[:, _ID_BYTES:]], axis=1))
            return rows + tf.size(ids, tf.int64)

        records.reduce(tf.constant(0, tf.int64), insert)

    def _destroy_resource(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.resource_handle, ignore_lookup_error=True)
