"""FusedEmbedding, in the place of TFRA's HvdAllToAllEmbedding: same constructor, names and files; one exchange."""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.ops.xla import outside_clusters
from tf_fusedrec.tables.keys import MergedBits
from tf_fusedrec.tables.tfra import de, forget_variable
from tf_fusedrec.tfra import saved_model
from tf_fusedrec.tfra.initial import law_of, seed_of, uniforms
from tf_fusedrec.tfra.lookup import RowLookup, Wanted

_UPSERT_ROWS = 1 << 16


@keras.saving.register_keras_serializable("tf_fusedrec_tfra")
class FusedEmbedding(de.keras.layers.HvdAllToAllEmbedding):
    """A TFRA embedding layer whose ids travel to the ranks of TFRA's partition function, and rows back.

    What it shares with upstream's layer: constructor (with_unique, with_secondary_unique, mpi_size, batch_size, then
    those of de.keras.layers.Embedding by keyword), `params`, `shadow`, `hvd_variable`, `optimizer_vars`, names of
    tables and files, DynamicEmbeddingOptimizer (gradients are SUMMED over ranks), restrict policies, bp_v2,
    partitioners, inference mode, callbacks and savers. A layer is trained alone, by three all2alls a step, until
    tf_fusedrec.tfra.fuse(model) puts it into a group.

    What differs:
      Rows of new keys are a pure function of (seed of the initializer, name of the layer, key); upstream repeats rows.
      The layer may be called several times in a step of one tf.function; upstream trains the last call's keys only.
      with_unique=False is honoured: duplicates travel. with_secondary_unique is accepted and has no effect: the owner
        finds duplicates in any case, without which updates are lost.
      With new-style optimizers a step reads and writes the layer's own slots; upstream all layers' for each.
      int32 ids suit an int64 layer; ragged ids may have any ragged rank.
      SavedModels give the table's rows under all loaders (saved_model.py).
      Horovod is joined when there is more than one process (`horovodrun`); one process needs no hvd.init().

    Call:
      ids: <key dtype> dense of any shape, or RaggedTensor. Returns rows of shape(ids) + [embedding_size].

    Raises:
      ValueError: ids of another dtype, a SparseTensor, an initializer without rows, an mpi_size that is neither 1 nor
        the number of processes, training under the policy mixed_float16.
      InvalidArgumentError (at run time): looked up a second time in another graph before the first was trained.
    """

    def __init__(
        self,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        collectives.init()
        ranks = collectives.size() if mpi_size is None else mpi_size
        super().__init__(with_unique, with_secondary_unique, ranks, batch_size, *args, **kwargs)
        bound = inspect.signature(de.keras.layers.Embedding.__init__).bind(self, *args, **kwargs).arguments
        arguments = {**bound.pop("kwargs", {}), **bound}
        del arguments["self"]
        self.member = Membership(self, 0, arguments)
        layers = self.layers
        self.with_unique = with_unique
        self.hvd_variable = RowLookup(
            self.name, self.shadow, self.embedding_size, layers, with_unique=with_unique, mpi_size=ranks
        )
        _draw_rows_by_key(self.params, layers)
        saved_model.restore_when_loaded(self.params)

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose rows `params` holds; layer s has the keys of segment s (tables/keys.py)."""
        return [self.name]

    def call(self, ids: Any) -> Any:
        return self._call(ids)

    # Nothing in here needs AutoGraph, and converting it would cost seconds per trace.
    @tf.autograph.experimental.do_not_convert
    def _call(self, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor):
            raise ValueError(
                f"Layer {self.name!r} takes dense or ragged ids, got a SparseTensor. Use "
                f"de.safe_embedding_lookup_sparse(layer.hvd_variable, ids, combiner=...), or ids = "
                "tf.RaggedTensor.from_sparse(ids)."
            )
        with outside_clusters(f"Layer {self.name!r}"):
            if isinstance(ids, tf.RaggedTensor):
                return ids.with_flat_values(self._dense(ids.flat_values))
            return self._dense(tf.convert_to_tensor(ids))

    def _dense(self, ids: tf.Tensor) -> tf.Tensor:
        key_dtype = self.key_dtype
        if ids.dtype == tf.int32 and key_dtype == tf.int64:
            ids = tf.cast(ids, tf.int64)
        if ids.dtype != key_dtype:
            raise ValueError(
                f"ids of layer {self.name!r} must be {key_dtype.name}, got {ids.dtype.name}. Cast them, or construct "
                f"the layer with key_dtype=tf.{ids.dtype.name}."
            )
        flat = tf.reshape(ids, [-1])
        rows = self.member.rows(flat)
        shaped = tf.reshape(rows, tf.concat([tf.shape(ids), [self.embedding_size]], axis=0))
        shaped.set_shape([*ids.shape, self.embedding_size] if ids.shape.rank is not None else None)
        return shaped

    @property
    def owner(self) -> FusedEmbedding:
        """The layer that owns `params` and `shadow`: this one, or the group that fuse() made."""
        return self.member.group

    @property
    def key_dtype(self) -> tf.DType:
        """Of the ids."""
        return tf.as_dtype(self.owner.params.key_dtype)

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's rows of this layer: keys <key dtype>[n], ascending, and rows [n, D]. Eager, not collective."""
        owner = self.owner
        keys, rows = (tensor.numpy() for tensor in owner.params.export())
        ids, segments = MergedBits(owner.layers).decode(keys)
        mine = np.flatnonzero(segments == self.member.segment)
        mine = mine[np.argsort(ids[mine])]
        return ids[mine], rows[mine]

    def join(self, group: FusedEmbedding, segment: int) -> None:
        """Hands this layer's rows to a group and owns no variable any more.

        Raises:
          ValueError: it holds a key that a group has no room for.
        """
        keys, rows = self.params.export()
        bad = np.flatnonzero((keys.numpy() < 0) | (keys.numpy() >> group.hvd_variable.id_bits > 0))
        if len(bad):
            raise ValueError(
                f"layer {self.name!r} holds key {keys.numpy()[bad[0]]}; keys of {len(group.layers)} fused layers must "
                f"lie in [0, 2^{group.hvd_variable.id_bits}). Leave it alone: fuse(model, leave=[{self.name!r}])."
            )
        keys = MergedBits(group.layers).encode(keys, tf.fill(tf.shape(keys), tf.constant(segment, tf.int64)))
        for begin in range(0, keys.shape[0], _UPSERT_ROWS):
            group.params.upsert(keys[begin : begin + _UPSERT_ROWS], rows[begin : begin + _UPSERT_ROWS])
        forget_variable(self.params.name)
        for variables in ("shadow", "shadow_impl", "_current_ids", "_current_exists", "optimizer_vars", "params"):
            delattr(self, variables)
        self.hvd_variable = group.hvd_variable.of_segment(segment)
        self.member = Membership(group, segment, self.member.arguments)

    def get_config(self) -> dict[str, Any]:
        if self.owner is not self:
            return {
                **self.owner.get_config(),
                "name": self.name,
                "init_capacity": self.member.arguments.get("init_capacity", 0),
            }
        return {**super().get_config(), "with_secondary_unique": True}


class Membership:
    """A layer's place in the group that looks up for it: itself, until fuse() makes one of several layers.

    A plain object, so that Keras does not take the group's variables for the layer's.

    Args:
      group: owner of the variables.
      segment: the layer's among group.layers.
      arguments: those of the layer's constructor for de.keras.layers.Embedding, by name.
    """

    def __init__(self, group: FusedEmbedding, segment: int, arguments: dict[str, Any]):
        self.group, self.segment, self.arguments = group, segment, arguments
        self.served: list[tf.Tensor | None] = []  # rows of the coming calls, see fusing.py
        self.asked: list[tf.Tensor] | None = None  # ids of calls, while a model is asked which it will look up

    def rows(self, flat: tf.Tensor) -> tf.Tensor:
        if self.asked is not None:
            self.asked.append(flat)
            rows = tf.zeros([tf.size(flat), self.group.embedding_size], self.group.params.value_dtype)
            return tf.identity(rows, name=STAND_IN)
        rows = self.served.pop(0) if self.served else None
        if rows is not None:
            return rows
        return self.group.hvd_variable.rows([Wanted(self.segment, flat)])[0]


STAND_IN = "tf_fusedrec_stand_in"


def _draw_rows_by_key(params: Any, layers: list[str]) -> None:
    """Replaces the rows that `params` gives to keys it does not hold. Layers of one group have equal initializers."""
    initializer = params.initializer
    law = law_of(initializer, rows=params.init_size, dim=params.dim, layer=layers[0])
    if law is None:
        return
    salts = tf.constant([seed_of(initializer, layer) for layer in layers], tf.int64)
    encoding = MergedBits(layers)

    def rows_of(_: Any, keys: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(keys, [-1])
        if flat.dtype == tf.string:
            flat = tf.strings.to_hash_bucket_fast(flat, (1 << 62) - 57)
        ids, segments = encoding.decode_tensor(tf.cast(flat, tf.int64))
        return tf.cast(law(uniforms(ids, tf.gather(salts, segments), params.dim)), params.value_dtype)

    params._create_default_values_by_initializer = types.MethodType(rows_of, params)
