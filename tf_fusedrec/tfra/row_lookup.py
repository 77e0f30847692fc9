"""RowLookup replaces upstream's HvdVariable: rows of a layer or a group in one TFRA variable, by one exchange.

partition_by makes a user's TFRA partition function decide the owners of ids in exchange/routing.py. SharedShadow lets
several lookups of one step share the shadow variable, which upstream's optimizer trains.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras, outside_clusters, tf
from tf_fusedrec.exchange import collectives, routing
from tf_fusedrec.exchange.routing import Partition
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.files.hash_order import tfra_owner
from tf_fusedrec.tfra.table import MergedBits
from tf_fusedrec.tfra.tfra_library import de, default_partition_fn

_RECOVERED = (tf.float32, tf.float16, tf.bfloat16)  # The dtypes of ops.recover. Others go through stock operations.


class LookupIds(NamedTuple):
    """The ids of one layer call."""

    segment: int  # Index of the layer in its group.
    ids: tf.Tensor  # <key dtype>[n]


def _owner_of_default(key_dtype: tf.DType, ranks: int) -> bool:
    """Returns whether rank_partition's owner "tfra" equals the default partition function of this build of TFRA."""
    if key_dtype != tf.int64:
        return False
    keys = np.array([-(1 << 63), -1, 0, 5, (1 << 31) + 1, (1 << 62) + 7], np.int64)
    return np.array_equal(default_partition_fn(tf.constant(keys), ranks).numpy(), tfra_owner(keys, ranks))


class RowLookup(de.shadow_ops.HvdVariable):
    """Looks up and trains a TFRA variable. It is also upstream's handle for de.safe_embedding_lookup_sparse.

    Layer s of `layers`, names of the layers with rows in the variable, is segment s. with_unique=True removes
    duplicates before ids travel; the owner always removes them. mpi_size=None shares the rows among all processes.
    """

    def __init__(
        self, name: str, shadow: Any, dim: int, layers: Sequence[str], *, with_unique: bool, mpi_size: int | None
    ):  # fmt: skip
        super().__init__(name, shadow, dim, with_unique, True, mpi_size)
        if self._mpi_size not in (1, collectives.size()):
            raise ValueError(
                f"mpi_size of layer {name!r} must be 1 or the number of processes, {collectives.size()}, got "
                f"{self._mpi_size}. Omit it, and start the processes with horovodrun."
            )
        self._layers = list(layers)
        self._encoding = MergedBits(self._layers)
        self.id_bits = self._encoding.id_bits  # ids must be in [0, 2^id_bits); 64 admits every key
        self.hashed_ids = False  # True: ids of a group lose the bits that its keys have no room for.
        self._segment = 0  # The segment of ids from upstream's functions.
        self._shared = SharedShadow(name, shadow)
        self._counts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._layout = RankLayout(Topology())
        params = shadow.params
        by_op = params.partition_fn is default_partition_fn and _owner_of_default(params.key_dtype, self._mpi_size)
        self._partition: routing.Partition = functools.partial(
            ops.rank_partition, owner="tfra", id_bits=self.id_bits, segment_names=self._layers
        )
        if not by_op:
            self._partition = partition_by(params.partition_fn, key_dtype=params.key_dtype, layer_name=name)

    def __alltoall_embedding_lookup__(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows [n, D] of ids <key dtype>[n]. Upstream's embedding_lookup calls it."""
        return self.rows([LookupIds(self._segment, tf.reshape(ids, [-1]))])[0]

    def for_segment(self, segment: int) -> RowLookup:
        """Returns this lookup as the handle of one layer of a group, for upstream's functions."""
        view = copy.copy(self)
        view._segment = segment
        return view

    def fitting(self, ids: tf.Tensor) -> tf.Tensor:
        """The ids <key dtype>[n] of a group, checked, or the lowest bits of hashes; other ids as they are."""
        if len(self._layers) == 1:
            return ids
        limit = tf.constant(1 << self.id_bits, tf.int64)
        if self.hashed_ids:
            return tf.bitwise.bitwise_and(ids, limit - 1)
        message = (
            f"ids of the fused layers {self._layers} must lie in [0, 2^{self.id_bits}). For 64-bit hashes use "
            "fuse(model, hashed_ids=True). For other ids use fuse(model, leave=[...]) with the names of their layers."
        )
        checks = [tf.debugging.assert_non_negative(ids, message), tf.debugging.assert_less(ids, limit, message)]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(ids)

    def rows(self, lookups: Sequence[LookupIds]) -> list[tf.Tensor]:
        """Returns rows [n, D] of each lookup, by one exchange. All ranks pass the same layers in the same order."""
        training = de.ModelMode.CURRENT_SETTING == de.ModelMode.TRAIN
        if training and keras.mixed_precision.global_policy().name == "mixed_float16":
            raise ValueError(
                f"Layer {self.name!r} cannot train under the policy mixed_float16, because TFRA's optimizer does not "
                "unscale losses. Use mixed_bfloat16, or de.enable_inference_mode()."
            )
        by_segment = sorted(range(len(lookups)), key=lambda n: lookups[n].segment)
        sizes = [tf.size(lookups[n].ids) for n in by_segment]
        flat = self.fitting(tf.concat([lookups[n].ids for n in by_segment], axis=0))
        look_up = self._local_rows if self._mpi_size == 1 else self._exchanged_rows
        segments = [lookups[n].segment for n in by_segment]
        totals = tf.math.unsorted_segment_sum(tf.stack(sizes), segments, len(self._layers))
        splits = tf.cast(tf.concat([[0], tf.cumsum(totals)], axis=0), tf.int64)
        parts = tf.split(look_up(flat, splits, training), sizes, num=len(sizes))
        in_order: list[tf.Tensor] = [None] * len(lookups)
        for n, part in zip(by_segment, parts):
            part.set_shape([None, self.embedding_size])
            in_order[n] = part
        return in_order

    def _local_rows(self, ids: tf.Tensor, splits: tf.Tensor, training: bool) -> tf.Tensor:
        """Looks up in this process, by operations of TensorFlow and TFRA only, so that exports need no other op."""
        if len(self._layers) > 1:
            ids = self._encoding.encode(ids, self._segments(splits))
        keys, index = tf.unique(ids)
        if not training:
            return tf.gather(self.shadow.params.lookup(keys), index)
        return self._trained_rows(keys, index, tf.gather, lambda grads: grads)

    def _exchanged_rows(self, ids: tf.Tensor, splits: tf.Tensor, training: bool) -> tf.Tensor:
        ids = tf.cast(ids, tf.int64)
        unique = ops.UniqueIds(ids, splits, tf.range(tf.size(ids)))
        if self.with_unique:
            unique = ops.segment_unique(ids, splits)
        outgoing = routing.Outgoing(f"{self.name}.{self._number()}", unique, self._partition, len(self._layers))
        route = routing.send_ids([outgoing], self._layout)[0]
        received = ops.unpack_message(*route.request, num_segments=len(self._layers))
        distinct = ops.segment_unique(received.ids, received.segment_splits)
        keys = self._encoding.encode(distinct.ids, self._segments(distinct.splits))
        keys = tf.cast(keys, self.shadow.params.key_dtype)
        position = tf.gather(distinct.inverse, received.position)

        def send(rows: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
            outgoing = routing.outgoing_rows(route, _recover(rows, position, pad=True), None)
            return _recover(routing.exchange([outgoing], self._layout)[0], route.index)

        def send_gradients(grads: tf.Tensor) -> tf.Tensor:
            sums = _recover_grad(grads, route.index, route.num_unique)
            return routing.exchange([routing.outgoing_gradients(route, [sums], None)], self._layout)[0]

        if not training:
            return send(self.shadow.params.lookup(keys), position)
        return self._trained_rows(keys, position, send, send_gradients)

    def _trained_rows(
        self,
        keys: tf.Tensor,
        index: tf.Tensor,
        send: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        send_gradients: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Rows of distinct keys at `index`, sent to their requesters. Their gradients train the shadow variable."""
        rows, row_of_key, still_held = self._shared.rows(keys)
        index = tf.gather(row_of_key, index)

        @tf.custom_gradient
        def answer(rows: tf.Tensor):
            def backward(grads: tf.Tensor) -> tf.IndexedSlices:
                with outside_clusters(f"Layer {self.name!r}"):
                    with tf.control_dependencies(still_held()):
                        grads = tf.identity(grads)
                    return tf.IndexedSlices(send_gradients(grads), index, tf.shape(rows))

            return send(rows, index), backward

        return answer(rows)

    def _segments(self, splits: tf.Tensor) -> tf.Tensor:
        return tf.repeat(tf.range(len(self._layers), dtype=tf.int64), splits[1:] - splits[:-1])

    def _number(self) -> int:
        """Numbers this lookup in the outermost graph being traced. Eager lookups run one after another: all are 0."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        while isinstance(getattr(graph, "outer_graph", None), type(graph)):
            graph = graph.outer_graph
        self._counts[graph] = self._counts.get(graph, -1) + 1
        return self._counts[graph]


def _recover(rows: tf.Tensor, index: tf.Tensor, *, pad: bool = False) -> tf.Tensor:
    return ops.recover(rows, index, pad=pad) if rows.dtype in _RECOVERED else tf.gather(rows, index)


def _recover_grad(grads: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
    if grads.dtype in _RECOVERED:
        return ops.recover_grad(grads, index, num_rows, pad=True)
    return tf.math.unsorted_segment_sum(grads, index, num_rows)


def partition_by(
    partitioner: Callable[[tf.Tensor, int], tf.Tensor], *, key_dtype: tf.DType, layer_name: str
) -> Partition:
    """Returns ops.rank_partition with the user's owners, and a message without padding.

    partitioner: Function (keys <key dtype>[U], number of ranks R) -> owner ranks <integer>[U] in [0, R).
    """

    def partition(ids: tf.Tensor, splits: tf.Tensor, /, *, num_ranks: int) -> ops.RankedIds:
        owner = tf.cast(partitioner(tf.cast(ids, key_dtype), num_ranks), tf.int32)
        requirement = f"partitioner of layer {layer_name!r} must give ranks in [0, {num_ranks})"
        in_range = tf.debugging.assert_non_negative(tf.minimum(owner, num_ranks - 1 - owner), message=requirement)
        with tf.control_dependencies([] if in_range is None else [in_range]):
            order = tf.argsort(owner, stable=True)
        segments = splits.shape[0] - 1
        cell = owner * segments + tf.repeat(tf.range(segments), splits[1:] - splits[:-1])
        counts = tf.math.bincount(cell, minlength=num_ranks * segments, maxlength=num_ranks * segments)
        headers = tf.reshape(counts, [num_ranks, segments])
        id_splits = tf.reduce_sum(headers, axis=1)
        blocks = tf.RaggedTensor.from_row_lengths(tf.gather(ids, order), id_splits, validate=False)
        message = tf.concat([tf.cast(headers, tf.int64), blocks], axis=1).flat_values
        return ops.RankedIds(message, id_splits + segments, id_splits, tf.math.invert_permutation(order))

    return partition


class SharedShadow:
    """The shadow variable of a group, filled by several lookups of one step.

    The `ids` of upstream's ShadowVariable are the step's keys, its value their rows. The optimizer changes the value,
    and `update_op` writes it into the table.
    """

    def __init__(self, name: str, variable: Any):
        self._name, self._variable = name, variable
        # By graph, keys <int64>[W] of the lookups since the last update. The order of tracing is the order of lookups.
        self._keys: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        written = variable.update_op

        def update_op(v0: Any = None) -> Any:
            self._keys.pop(tf.compat.v1.get_default_graph(), None)  # Lookups after an update belong to the next step.
            return written(v0)

        tracked = variable._track_optimizer_slots

        def track_own_slots(slots: list[Any]) -> None:
            # With new-style optimizers upstream reads and writes the slots of ALL shadows once per shadow: k * M^2
            # finds and inserts a step. The slots of one shadow share its ids. The caller uses the list in place.
            slots[:] = [slot for slot in slots if slot.ids is variable.ids]
            tracked(slots)

        variable.update_op, variable._track_optimizer_slots = update_op, track_own_slots

    def rows(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Callable[[], list[tf.Operation]]]:
        """Looks up distinct keys [W] as rows that the optimizer trains.

        Returns all rows [W', D] of the step so far, the index <int32>[W] of each key's row, and a function that returns
        checks that the shadow still has these keys. A gradient waits for them.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = None if graph is None else self._keys.get(graph)
        position = tf.range(tf.size(keys))
        if before is not None:
            # tf.unique keeps the order of first occurrences, so earlier positions stay valid.
            keys, index = tf.unique(tf.concat([before, keys], axis=0))
            position = index[tf.size(before) :]
        if graph is not None:
            self._keys[graph] = keys
        rows = tf.ensure_shape(de.shadow_ops.embedding_lookup(self._variable, keys), [None, self._variable.params.dim])
        return rows, position, lambda: self._still_holds(keys)

    def _still_holds(self, keys: tf.Tensor) -> list[tf.Operation]:
        now = self._variable.ids.read_value()
        message = (
            f"Layer {self._name!r} was looked up again, in another graph or eagerly, before the gradient of this "
            "lookup was taken; training would write rows of other keys. Make both lookups in one tf.function, or "
            "look up all ids at once."
        )
        long_enough = tf.debugging.assert_less_equal(tf.size(keys), tf.size(now), message=message)
        with tf.control_dependencies([] if long_enough is None else [long_enough]):
            equal = tf.debugging.assert_equal(now[: tf.size(keys)], keys, message=message)
        return [] if equal is None else [equal]
