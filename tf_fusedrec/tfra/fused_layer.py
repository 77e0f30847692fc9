"""FusedTfraEmbedding replaces TFRA's HvdAllToAllEmbedding: same constructor, names and files; one exchange.

SavedModels: TFRA restores the rows of a FileSystemSaver table in TensorFlow's V1 loader only. Under
tf.saved_model.load and Keras' load_model, the model silently returns initial rows. Every loader initializes tables, so
here the initializer of a table reads its files (restore_when_loaded). They are in the SavedModel's variables folder and
contain the rows of all ranks.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import tempfile
import types
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, outside_clusters, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tfra.row_distributions import distribution_of, record_of, seed_of, uniforms
from tf_fusedrec.tfra.row_lookup import LookupIds, RowLookup
from tf_fusedrec.tfra.table import MergedBits
from tf_fusedrec.tfra.tfra_library import de, forget_variable

_UPSERT_ROWS = 1 << 16
# Attributes that a layer loses to its group.
_OF_THE_GROUP = ("shadow", "shadow_impl", "_current_ids", "_current_exists", "optimizer_vars", "params")


@keras.saving.register_keras_serializable("tf_fusedrec_tfra")
class FusedTfraEmbedding(de.keras.layers.HvdAllToAllEmbedding):
    """A TFRA embedding layer that sends ids to the owners that TFRA's partition function names.

    The layer trains separately, with three all-to-alls per step, until tf_fusedrec.tfra.fuse(model) puts it into a
    group.

    It shares with upstream's layer:
      the constructor: with_unique, with_secondary_unique, mpi_size, batch_size, then the arguments of
        de.keras.layers.Embedding by keyword;
      the attributes `params`, `shadow`, `hvd_variable` and `optimizer_vars`, and the names of tables and files;
      DynamicEmbeddingOptimizer (gradients are SUMMED over ranks), restrict policies, bp_v2, partitioners, inference
        mode, callbacks and savers.

    It differs from upstream's layer:
      The row of a new key is a pure function of (initializer's seed, layer's name, key). Upstream repeats rows.
      The layer may be called several times in one traced step. Upstream trains the keys of the last call only.
      with_unique=False sends duplicates. with_secondary_unique has no effect, because the owner must always remove
        duplicates: their updates would be lost otherwise.
      With new-style optimizers a step touches the layer's own slots. Upstream touches every layer's slots for each.
      An int64 layer takes int32 ids, and ragged ids may have any ragged rank.
      SavedModels hold the table's rows for all loaders (restore_on_load.py).
      The layer initializes Horovod under `horovodrun`. A single process needs no hvd.init().

    Call:
      ids: <key dtype> of any shape, dense or RaggedTensor. Returns rows of shape(ids) + [embedding_size].

    Raises:
      ValueError: ids have another dtype or are a SparseTensor, or the initializer defines no single row. Or mpi_size
        is neither 1 nor the number of processes, or the layer trains under the policy mixed_float16.
      InvalidArgumentError (at run time): A second lookup in another graph preceded the first one's gradient.
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
        self.key_dtype, self.value_dtype = tf.as_dtype(self.params.key_dtype), tf.as_dtype(self.params.value_dtype)
        layers = self.layers
        self.with_unique = with_unique
        self.hvd_variable = RowLookup(
            self.name, self.shadow, self.embedding_size, layers, with_unique=with_unique, mpi_size=ranks
        )
        _draw_rows_by_key(self.params, layers)
        restore_when_loaded(self.params)

    @property
    def layers(self) -> list[str]:
        """Names of the layers with rows in `params`. Segment s has the keys of layer s (MergedBits)."""
        return [self.name]

    def call(self, ids: Any) -> Any:
        return self._call(ids)

    # AutoGraph would take seconds per trace and has nothing to convert here.
    @tf.autograph.experimental.do_not_convert
    def _call(self, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor):
            raise ValueError(
                f"Layer {self.name!r} takes dense or ragged ids, got a SparseTensor. Use "
                "de.safe_embedding_lookup_sparse(layer.hvd_variable, ids, combiner=...), or convert the ids: "
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
        rows = self.member.rows(flat, self.embedding_size, self.value_dtype)
        shaped = tf.reshape(rows, tf.concat([tf.shape(ids), [self.embedding_size]], axis=0))
        shaped.set_shape([*ids.shape, self.embedding_size] if ids.shape.rank is not None else None)
        return shaped

    def __getattr__(self, name: str) -> Any:  # of an attribute that the layer lacks
        member = self.__dict__.get("member")
        if name in _OF_THE_GROUP and member is not None and member.group is not self:
            group = member.group
            raise AttributeError(
                f"layer {self.name!r} has no {name!r} since fuse(): its rows are in {group.name!r} with those of all "
                f"of {group.layers}. Use layer.export() for the rows of this layer, or {group.in_place_of(name)}."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def owner(self) -> Any:
        """The layer that owns `params` and `shadow`: this layer, or its group after fuse()."""
        return self.member.group

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns this rank's keys <key dtype>[n], ascending, and rows [n, D] of this layer. Eager, not collective."""
        return self.owner.export_segment(self.member.segment)

    def export_segment(self, segment: int) -> tuple[np.ndarray, np.ndarray]:
        """As `export`, of one member layer."""
        keys, rows = (tensor.numpy() for tensor in self.params.export())
        ids, segments = MergedBits(self.layers).decode(keys)
        places = np.flatnonzero(segments == segment)
        places = places[np.argsort(ids[places])]
        return ids[places], rows[places]

    def in_place_of(self, name: str) -> str:
        """The object that replaces an attribute of a fused layer, in the words of an error."""
        return f"layer.owner.{name} for the whole group"

    def join(self, group: FusedTfraEmbedding, segment: int) -> None:
        """Moves this layer's rows into a group."""
        keys, rows = self.params.export()
        if group.hvd_variable.hashed_ids:
            keys = group.hvd_variable.fitting(keys)
        bad = np.flatnonzero((keys.numpy() < 0) | (keys.numpy() >> group.hvd_variable.id_bits > 0))
        if len(bad):
            raise ValueError(
                f"layer {self.name!r} holds key {keys.numpy()[bad[0]]}; keys of {len(group.layers)} fused layers must "
                f"lie in [0, 2^{group.hvd_variable.id_bits}). Leave it alone: fuse(model, leave=[{self.name!r}])."
            )
        keys = MergedBits(group.layers).encode(keys, tf.fill(tf.shape(keys), tf.constant(segment, tf.int64)))
        for begin in range(0, keys.shape[0], _UPSERT_ROWS):
            group.params.upsert(keys[begin : begin + _UPSERT_ROWS], rows[begin : begin + _UPSERT_ROWS])
        self.belong_to(group, segment)

    def belong_to(self, group: Any, segment: int) -> None:
        """Deletes the layer's own variables. A FusedGroup or NativeRows has its rows from now on."""
        config = self.get_config()
        forget_variable(self.params.name)
        for name in _OF_THE_GROUP:
            self._delete_tracking(name)  # Keras does not, and TFRA's savers would write empty files.
            delattr(self, name)
        self.hvd_variable = group.hvd_variable.for_segment(segment)
        self.member = Membership(group, segment, self.member.arguments, config)

    def get_config(self) -> dict[str, Any]:
        if self.owner is not self:
            return dict(self.member.config)
        return {**super().get_config(), "with_secondary_unique": True}


class Membership:
    """A layer's membership in the group that looks up its rows. Before fuse(), a layer is its own group.

    It is no Keras object, because Keras would count the group's variables as the layer's. `segment` is the index of the
    layer in group.layers, `arguments` are its constructor arguments for de.keras.layers.Embedding, `config` is that of
    a layer in a group. `group` is a FusedTfraEmbedding or NativeRows.
    """

    def __init__(self, group: Any, segment: int, arguments: dict[str, Any], config: dict[str, Any] | None = None):
        self.group, self.segment, self.arguments, self.config = group, segment, arguments, config or {}
        self.prefetched: list[tf.Tensor | None] = []  # rows of the next calls, in order (fusing.py)
        self.recorded: list[tf.Tensor] | None = None  # ids of calls in a discovery trace (fusing.py)

    def rows(self, flat: tf.Tensor, dim: int, dtype: tf.DType) -> tf.Tensor:
        if self.recorded is not None:
            self.recorded.append(flat)
            return tf.identity(tf.zeros([tf.size(flat), dim], dtype), name=STAND_IN)
        rows = self.prefetched.pop(0) if self.prefetched else None
        return rows if rows is not None else self.group.hvd_variable.rows([LookupIds(self.segment, flat)])[0]


STAND_IN = "tf_fusedrec_stand_in"


def _draw_rows_by_key(params: Any, layers: list[str]) -> None:
    """Replaces the function by which `params` makes rows of new keys. Layers of one group have equal initializers."""
    initializer = params.initializer
    record = record_of(initializer, rows=params.init_size, dim=params.dim, layer=layers[0])
    if record is None:  # TFRA then calls the initializer itself.
        return
    distribution = distribution_of(record)
    salts = tf.constant([seed_of(initializer, layer) for layer in layers], tf.int64)
    encoding = MergedBits(layers)

    def rows_of(_: Any, keys: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(keys, [-1])
        if flat.dtype == tf.string:
            flat = tf.strings.to_hash_bucket_fast(flat, (1 << 62) - 57)
        ids, segments = encoding.decode(tf.cast(flat, tf.int64))
        return tf.cast(distribution(uniforms(ids, tf.gather(salts, segments), params.dim)), params.value_dtype)

    params._create_default_values_by_initializer = types.MethodType(rows_of, params)


_MARK = "tfra_tables.txt"


@functools.cache
def _mark() -> tf.saved_model.Asset:
    """Returns an asset file. Its path in the `assets` folder gives a loaded graph the SavedModel's location."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="tf_fusedrec-")) / _MARK
    path.write_text("The rows of this model's tables are in ../variables/TFRADynamicEmbedding.\n", encoding="utf-8")
    return tf.saved_model.Asset(str(path))


def restore_when_loaded(params: Any) -> None:
    """Makes the tables of a `de.Variable` read their files when a loader opens their SavedModel.

    Without a FileSystemSaver, a variable's rows are in the checkpoint, which every loader restores.
    """
    if not isinstance(params.kv_creator.saver, de.FileSystemSaver):
        return
    for table in params.tables:
        table._track_trackable(_mark(), "where_rows_are", overwrite=True)
        table._initialize = types.MethodType(_read_files, table)


def _read_files(table: Any) -> Any:
    mark = _mark().asset_path
    folder = tf.strings.regex_replace(mark, f"assets/{_MARK}$", "variables/TFRADynamicEmbedding")
    files = tf.io.matching_files(tf.strings.join([folder, f"/{table._name}_*-keys"]))

    def load() -> tf.Tensor:
        done = table.load_from_file_system(folder, file_name=table._name, load_entire_dir=True)
        with tf.control_dependencies([done] if done is not None else []):
            return tf.constant(True)

    return tf.cond(tf.size(files) > 0, load, lambda: tf.constant(False))
