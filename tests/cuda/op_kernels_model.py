"""A Keras model whose ops run their GPU OpKernels equals one on CPU kernels: fits, evaluation and tables.

Tables lie on the device, and in host memory with buffers on the device; batches are looked up ahead or
not, whole or in micro-batches.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np

from tests.cuda.op_kernels import LABELS, refused
from tests.schedules import clicks
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import Limits, Storage, Tier
from tf_fusedrec.ops import _library
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested
from tf_fusedrec.tables import places

from tensorflow.python.framework import kernels  # isort: skip  (tf_fusedrec first: it chooses legacy Keras)

LRU = {"limits": Limits(max_rows_per_rank=18, eviction="lru")}
OF_DEVICE = {
    "record_tombstones": True, "storage": Storage("mixed", hot_after=2),
    "limits": Limits(18, "lru", admission_count=2, max_candidates_per_rank=12, frequency_decay_steps=3),
}  # fmt: skip
OF_HOST_ROWS = {"record_tombstones": True, "limits": Limits(18, "lru", ttl=9)}


def on_device_where_it_can(function, labels):
    """Wraps an op of the library so that it takes the labelled kernel, in graphs and in eager calls."""

    def make(**arguments):
        with tf.compat.v1.get_default_graph()._kernel_label_map(labels):
            return function(**arguments)

    functions = {}  # traced once for all eager calls with equal attributes

    def call(**arguments):
        if not tf.executing_eagerly():
            return make(**arguments)
        inputs = {name: value for name, value in arguments.items() if any(map(tf.is_tensor, tf.nest.flatten(value)))}
        rest = {name: value for name, value in arguments.items() if name not in inputs}

        def make_with(given):
            answer = make(**given, **rest)
            return None if isinstance(answer, tf.Operation) else answer

        return functions.setdefault(str(rest), tf.function(make_with, reduce_retracing=True))(inputs)

    return call


@contextlib.contextmanager
def on_device():
    """Places ops on the emulated device, except those that compute in host memory. Tables know that they lie there.

    Yields the names of the ops on the device.
    """
    has_label = lambda op: any(k.label == "emulated" for k in kernels.get_registered_kernels_for_op(op).kernel)  # noqa: E731
    labels = {op: label for op, label in LABELS.items() if has_label(op)}
    originals = {
        name: getattr(_library.library, name) for name in dir(_library.library) if name.startswith("fusedrec_")
    }
    for name, function in originals.items():
        setattr(_library.library, name, on_device_where_it_can(function, labels))
    try:
        with mock.patch.object(places, "on_gpu", lambda: True):
            yield set(labels)
    finally:
        for name, function in originals.items():
            setattr(_library.library, name, function)


def fitted(schedule, table):
    """Returns the losses, the evaluation's results, and the trained state."""
    embedding = clicks.make_embedding("Adam", table)
    model = clicks.make_model(embedding, schedule)
    data = tf.data.Dataset.from_tensor_slices(clicks.batch(30, seed=1)).batch(8)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    return history, clicks.state(model, embedding)


def run():
    with on_device():
        mixed = {"storage": Storage(dtype="mixed", hot_after=2), "tier": Tier(host_rows=True)}
        refused(ValueError, "TableConfig.storage.hot_after of table", lambda: fitted("sync", mixed))
    host_rows, hot_rows = {"tier": Tier(host_rows=True)}, {"tier": Tier(host_rows=True, hot_rows_per_rank=12)}
    for table, reference, others in (
        (LRU, FrozenWindow(2), ((Nested(2), hot_rows),)),
        (OF_DEVICE, "sync", ((DualBuffer(), {}),)),
        (OF_HOST_ROWS, "sync", (("sync", host_rows), (DualBuffer(), hot_rows))),
    ):
        wanted, state = fitted(reference, table)
        for schedule, more in others:
            with on_device():
                got, its_state = fitted(schedule, {**table, **more})
            assert got == wanted, (got, wanted)
            assert its_state.keys() == state.keys()
            for what, array in state.items():
                np.testing.assert_array_equal(its_state[what], array, err_msg=f"{what}, {schedule}, {more}")
            print(f"a model agrees, {schedule}, {table} {more}", flush=True)
