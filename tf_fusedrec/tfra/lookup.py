"""Rows of a layer, or of a group of fused layers, in one TFRA variable: upstream's HvdVariable with one exchange."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.ops.xla import outside_clusters
from tf_fusedrec.tables.keys import MergedBits
from tf_fusedrec.tables.tfra import de, default_partition_fn, owner_of
from tf_fusedrec.tfra.route import Route, bring_rows, return_gradients, route_by, route_ids
from tf_fusedrec.tfra.shadow import SharedShadow

_RECOVERED = (tf.float32, tf.float16, tf.bfloat16)  # what ops.recover takes; others go through stock operations


class Wanted(NamedTuple):
    """Ids of one call of one layer."""

    segment: int  # place of the layer in its group
    ids: tf.Tensor  # <key dtype>[n]


def _owner_of_default(key_dtype: tf.DType, ranks: int) -> bool:
    """Whether TFRA's default partition function, which asks how TensorFlow is built, is "tfra" of rank_partition."""
    if key_dtype != tf.int64:
        return False
    keys = np.array([-(1 << 63), -1, 0, 5, (1 << 31) + 1, (1 << 62) + 7], np.int64)
    return np.array_equal(default_partition_fn(tf.constant(keys), ranks).numpy(), owner_of(keys, ranks))


class RowLookup(de.shadow_ops.HvdVariable):
    """What looks up and trains a TFRA variable. Also upstream's handle for de.safe_embedding_lookup_sparse.

    Args:
      name: of the layer or group.
      shadow: its shadow variable.
      dim: D.
      layers: names of the layers whose rows it holds; layer s is segment s.
      with_unique: whether duplicates go before ids travel. They go at the owner in any case.
      mpi_size: number of processes that share the rows, or None for all.
    """

    def __init__(
        self, name: str, shadow: Any, dim: int, layers: Sequence[str], *, with_unique: bool, mpi_size: int | None
    ):  # fmt: skip
        super().__init__(name, shadow, dim, with_unique, True, mpi_size)
        if self._mpi_size not in (1, collectives.size()):
            raise ValueError(
                f"mpi_size of layer {name!r} must be 1 or the number of processes, {collectives.size()}, got "
                f"{self._mpi_size}. Leave it out, and start the processes with horovodrun."
            )
        self._layers = list(layers)
        self._encoding = MergedBits(self._layers)
        self._segment = 0  # of the ids that upstream's functions bring
        self._shared = SharedShadow(name, shadow)
        self._counts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        params = shadow.params
        self._by_op = params.partition_fn is default_partition_fn and _owner_of_default(
            params.key_dtype, self._mpi_size
        )

    def __alltoall_embedding_lookup__(self, ids: tf.Tensor) -> tf.Tensor:
        """As upstream's: rows [n, D] of ids <key dtype>[n]; what embedding_lookup of this object calls."""
        return self.rows([Wanted(self._segment, tf.reshape(ids, [-1]))])[0]

    def of_segment(self, segment: int) -> RowLookup:
        """The same lookup, as upstream's functions see it for one layer of a group."""
        view = copy.copy(self)
        view._segment = segment
        return view

    @property
    def id_bits(self) -> int:
        """Ids must lie in [0, 2^id_bits); 64 admits every key."""
        return min(self._encoding.id_bits, 63) if len(self._layers) > 1 else 64

    def rows(self, wanted: Sequence[Wanted]) -> list[tf.Tensor]:
        """Rows [n, D] of each, in one exchange; all ranks ask for the same layers in the same order.

        Raises:
          ValueError: training under the Keras policy mixed_float16.
          InvalidArgumentError: ids of a group outside of [0, 2^id_bits).
        """
        training = de.ModelMode.CURRENT_SETTING == de.ModelMode.TRAIN
        if training and keras.mixed_precision.global_policy().name == "mixed_float16":
            raise ValueError(
                f"Layer {self.name!r} cannot train under the policy mixed_float16: TFRA's optimizer takes no scaled "
                "losses. Use mixed_bfloat16, or de.enable_inference_mode()."
            )
        order = sorted(range(len(wanted)), key=lambda n: wanted[n].segment)
        sizes = [tf.size(wanted[n].ids) for n in order]
        flat = tf.concat([wanted[n].ids for n in order], axis=0)
        looked_up = self._here if self._mpi_size == 1 else self._everywhere
        splits = self._segment_splits([wanted[n].segment for n in order], sizes)
        parts = tf.split(looked_up(flat, splits, training), sizes, num=len(sizes))
        in_order: list[tf.Tensor] = [None] * len(wanted)
        for n, part in zip(order, parts):
            part.set_shape([None, self.embedding_size])
            in_order[n] = part
        return in_order

    def _segment_splits(self, segments: Sequence[int], sizes: Sequence[tf.Tensor]) -> tf.Tensor:
        counts = [[size for s, size in zip(segments, sizes) if s == segment] for segment in range(len(self._layers))]
        totals = [tf.add_n(mine) if mine else tf.constant(0) for mine in counts]
        return tf.cast(tf.concat([[0], tf.cumsum(tf.stack(totals))], axis=0), tf.int64)

    def _here(self, ids: tf.Tensor, splits: tf.Tensor, training: bool) -> tf.Tensor:
        """One process. Stock operations and TFRA's only: what is exported so needs nothing of this project."""
        if len(self._layers) > 1:
            limit = tf.constant(1 << self._encoding.id_bits, tf.int64)
            message = f"ids of the fused layers {self._layers} must lie in [0, 2^{self._encoding.id_bits})"
            checks = [tf.debugging.assert_non_negative(ids, message), tf.debugging.assert_less(ids, limit, message)]
            with tf.control_dependencies([check for check in checks if check is not None]):
                ids = self._encoding.encode(ids, self._segments(splits))
        keys, index = tf.unique(ids)
        if not training:
            return tf.gather(self.shadow.params.lookup(keys), index)
        read, place, still_held = self._shared.rows(keys)
        index = tf.gather(place, index)

        @tf.custom_gradient
        def answer(read: tf.Tensor):
            def backward(grads: tf.Tensor) -> tf.IndexedSlices:
                with outside_clusters(f"Layer {self.name!r}"), tf.control_dependencies(still_held()):
                    return tf.IndexedSlices(tf.identity(grads), index, tf.shape(read))

            return tf.gather(read, index), backward

        return answer(read)

    def _everywhere(self, ids: tf.Tensor, splits: tf.Tensor, training: bool) -> tf.Tensor:
        route = self._route(tf.cast(ids, tf.int64), splits)
        received = ops.unpack_message(route.message, route.message_splits, num_segments=len(self._layers))
        distinct = ops.segment_unique(received.ids, received.segment_splits)
        keys = self._encoding.encode(distinct.ids, self._segments(distinct.splits))
        keys = tf.cast(keys, self.shadow.params.key_dtype)
        position = tf.gather(distinct.inverse, received.position)
        if not training:
            rows = _recover(self.shadow.params.lookup(keys), position, pad=True)
            return _recover(bring_rows(route, rows), route.index)
        read, place, still_held = self._shared.rows(keys)
        position = tf.gather(place, position)

        @tf.custom_gradient
        def answer(read: tf.Tensor):
            def backward(grads: tf.Tensor) -> tf.IndexedSlices:
                with outside_clusters(f"Layer {self.name!r}"):
                    with tf.control_dependencies(still_held()):
                        grads = tf.identity(grads)
                    summed = _recover_grad(grads, route.index, route.num_unique)
                    return tf.IndexedSlices(return_gradients(route, summed), position, tf.shape(read))

            arrived = bring_rows(route, _recover(read, position, pad=True))
            return _recover(arrived, route.index), backward

        return answer(read)

    def _route(self, ids: tf.Tensor, splits: tf.Tensor) -> Route:
        name = f"{self.name}.{self._number()}"
        unique = ops.UniqueIds(ids, splits, tf.range(tf.size(ids)))
        if self.with_unique:
            unique = ops.segment_unique(ids, splits)
        if self._by_op:
            return route_ids(unique, name=name, id_bits=self._encoding.id_bits, layers=self._layers)
        params = self.shadow.params

        def partitioner(keys: tf.Tensor, ranks: int) -> tf.Tensor:
            return params.partition_fn(tf.cast(keys, params.key_dtype), ranks)

        route = route_by(partitioner, unique.ids, name=name)
        return route._replace(index=tf.gather(route.index, unique.inverse))

    def _segments(self, splits: tf.Tensor) -> tf.Tensor:
        return tf.repeat(tf.range(len(self._layers), dtype=tf.int64), splits[1:] - splits[:-1])

    def _number(self) -> int:
        """Number of this lookup in the outermost graph that is being traced; eager ones run one after another."""
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
