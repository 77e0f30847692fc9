"""Native tables for tests of the ops."""

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np

from tests.oracles.hash_table import pack
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.table_records import records_of, rule_record
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.files.hash_order import mix64

_numbers = itertools.count()


class Table:
    """One HashTable, by default with plain gradient descent. The segments' seeds are 5, -6, 7 and so on."""

    def __init__(self, segments=1, dim=4, *, rule="sgd", hyperparameters=None, window=1, **spec):
        self.dim, self.window, self.spec = dim, window, {"distribution": "uniform", "a": 0.0, "b": 1.0, **spec}
        self.seeds = [(-1) ** s * (5 + s) for s in range(segments)]
        made = {"rule": rule} if hyperparameters is None else rule_record(rule, hyperparameters)
        self.handle = ops.hash_table(
            shared_name=f"tests/{next(_numbers)}",
            tables=records_of(dim, self.seeds, **made, **self.spec),
        )

    def initial(self, key):
        """Returns a uniform initial row <float32>[D]. The last bits of a normal one may differ from the oracle's."""
        segment, id_ = key
        a, b = self.spec["a"], self.spec["b"]
        return initial_row_oracle(self.spec["distribution"], a, b, self.seeds[segment], id_, self.dim)

    def lookup(self, batch, dtype=tf.float32):
        message, splits, _ = pack(batch)
        return ops.table_lookup(self.handle, message, splits, window=self.window, dim=self.dim, dtype=dtype)

    def find(self, batch, dtype=tf.float32):
        """Returns [V, D] as a NumPy array without the padding."""
        message, splits, received = pack(batch)
        return ops.table_read(self.handle, message, splits, dim=self.dim, dtype=dtype).numpy()[: len(received)]

    def apply(self, found, grads, *, scale=1.0, learning_rate=1.0, step=1):
        ops.table_apply_gradients(
            self.handle, found, tf.convert_to_tensor(grads), scale=scale, learning_rate=learning_rate, step=step
        )

    def train(self, batch, grads, **kwargs):
        self.apply(self.lookup(batch), grads, **kwargs)

    def record_dtype(self, wide=(), scalars=()):
        """Returns the dtype of records with these slots: custom_ops/hash_table/cpu/parts/row_records.h."""
        storage = self.spec.get("storage", "float32")
        row = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[storage]
        about = [(name, "<u4") for name in ("last", "count", "updated", "pool")]
        slots = [(name, "<f4" if storage == "float32" else "<u2", (self.dim,)) for name in wide]
        return np.dtype([*about, ("row", row, (self.dim,)), *slots, *[(name, "<f4") for name in scalars]])

    def records(self, segment=0, since=(0, 0), **slots):
        """Returns ids and records [n], in hash order."""
        ids, handles = (tensor.numpy() for tensor in ops.table_keys(self.handle, segment, since=since))
        order = np.argsort(mix64(ids))
        records = ops.table_read_records(self.handle, handles[order]).numpy()
        return ids[order], records.view(self.record_dtype(**slots))[:, 0]

    def restore(self, ids, records, segment=0):
        parts = np.ascontiguousarray(records).view(np.uint8).reshape(len(ids), -1)
        ops.table_import(self.handle, segment, np.asarray(ids, np.int64), parts)

    def statistics(self):
        """Returns keys, hits, inserts, evictions, refused and candidates by segment."""
        return ops.table_statistics(self.handle).segments.numpy().tolist()


@contextlib.contextmanager
def new_table(*args, **kwargs) -> Iterator[Table]:
    """Yields a Table and destroys it on exit."""
    table = Table(*args, **kwargs)
    try:
        yield table
    finally:
        tf.raw_ops.DestroyResourceOp(resource=table.handle)
