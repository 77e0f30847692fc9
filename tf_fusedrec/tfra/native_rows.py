"""Rows of fused layers in native tables: fuse(model, tables="native").

A FusedEmbedding has the rows, with a table and a feature per layer. Its anchor is a dense weight of the model, whose
gradient trains the rows. So TFRA's DynamicEmbeddingOptimizer meets no TFRA variable and trains dense weights only.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, recorded_by_tape, tf
from tf_fusedrec.config import FeatureConfig, Limits, TableConfig
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.files.hash_order import OWNERS, table_seed
from tf_fusedrec.optimizers.keras_counterparts import from_keras
from tf_fusedrec.optimizers.trainer import Trainer
from tf_fusedrec.tables.records import put_numbers
from tf_fusedrec.tfra.row_distributions import record_of
from tf_fusedrec.tfra.row_lookup import LookupIds
from tf_fusedrec.tfra.tfra_library import de

_EVICTIONS = {de.TimestampRestrictPolicy: "lru", de.FrequencyRestrictPolicy: "lfu"}


class KerasTrainer(Trainer):
    """The learning rate and the update count of a Keras optimizer, which counts when it trains the dense weights."""

    _optimizer: Any
    _model: weakref.ref

    def __init__(self, model: keras.Model, optimizer: Any, name: str):
        rule = from_keras(optimizer)
        self.__dict__.update(
            rule=rule, iterations=optimizer.iterations, _name=name, _rate_scale=rule.rate_scale, _optimizer=optimizer,
            _model=weakref.ref(model),
        )  # fmt: skip
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer._create_hypers()

    @property
    def _rate(self) -> Any:
        """A schedule or a variable. A program may assign another one to the optimizer."""
        is_new = isinstance(self._optimizer, keras.optimizers.Optimizer)
        return self._optimizer._learning_rate if is_new else self._optimizer._get_hyper("learning_rate")

    def current(self) -> tuple[tf.Tensor, tf.Tensor]:
        compiled = getattr(self._model(), "optimizer", None)
        if compiled not in (None, self._optimizer):
            raise ValueError(
                f"the model was compiled with another {type(compiled).__name__} than its native "
                "tables were made for, which would not learn of its steps. Compile it before fuse(model, "
                "tables='native'), or pass the same object: fuse(..., optimizer=optimizer)."
            )
        return super().current()

    def count(self) -> None:
        pass


class NativeRows(de.shadow_ops.HvdVariable):
    """Looks up the rows of fused layers in native tables. Also upstream's handle, as RowLookup.

    Attributes:
      name: Name of the FusedEmbedding.
      layers: Names of the layers. Each is the name of a table and of a feature.
      embedding: The FusedEmbedding.
      short_file_name: That of the layers.
    """

    def __init__(  # upstream's constructor would want a shadow variable
        self, model: keras.Model, layers: Sequence[Any], name: str, optimizer: Any, max_rows_per_rank: Mapping[str, int]
    ):
        rule = _rule_of(optimizer)
        configs = [_table_of(layer, rule, max_rows_per_rank) for layer in layers]
        unused = sorted(
            set(max_rows_per_rank) - {layer.name for layer in layers if layer.params.restrict_policy is not None}
        )
        if unused:
            raise ValueError(
                f"max_rows_per_rank names {unused}, which are no fused layers with a restrict policy. Use "
                "restrict_policy=de.TimestampRestrictPolicy or de.FrequencyRestrictPolicy for these layers."
            )
        shorts = [layer.member.arguments.get("short_file_name", False) for layer in layers]
        shared = sorted({f"devices {layer.params.devices}, {short}" for layer, short in zip(layers, shorts)})
        if len(shared) > 1:
            raise ValueError(
                f"layers of native tables must have equal devices and short_file_name, got {shared}. Use equal ones, "
                "or leave some of the layers alone: fuse(model, leave=[...])."
            )
        seeds = {getattr(layer.params.initializer, "seed", None) or 0 for layer in layers}
        with tf.device(layers[0].params.devices[0]):
            self.embedding = FusedEmbedding(
                [FeatureConfig(config.name, config) for config in configs],
                seed=seeds.pop() if len(seeds) == 1 else table_seed(0, str(sorted(seeds))), gradient_op="sum",
                name=name,
            )  # fmt: skip
        self.name, self.layers, self.hvd_variable, self._segment = name, [c.name for c in configs], self, 0
        self.short_file_name = shorts[0]
        for group in self.embedding.internals.groups:
            group.table.optimizer = KerasTrainer(model, optimizer, f"{name}/{group.config.name}")
        for segment, layer in enumerate(layers):
            self._take(layer)
            layer.belong_to(self, segment)
        layers[0].native_tables = self.embedding  # Keras finds the anchor, and savers the tables, by this attribute.

    def rows(self, lookups: Sequence[LookupIds]) -> list[tf.Tensor]:
        """Returns rows [n, D] of each lookup, by one call. All ranks pass the same layers in the same order."""
        numbers: dict[int, list[int]] = {}
        for n, lookup in enumerate(lookups):
            numbers.setdefault(lookup.segment, []).append(n)
        ids = {s: [lookups[n].ids for n in numbers[s]] for s in sorted(numbers)}
        joined = {self.layers[s]: parts[0] if len(parts) == 1 else tf.concat(parts, 0) for s, parts in ids.items()}
        # TFRA inserts and trains rows in the update, so lookups without a gradient must insert none.
        training = de.ModelMode.CURRENT_SETTING == de.ModelMode.TRAIN and recorded_by_tape(tf.zeros([])) is not None
        outputs = self.embedding(joined, training=training)
        rows: dict[int, tf.Tensor] = {}
        for s, parts in ids.items():
            output = outputs[self.layers[s]]
            rows.update(zip(numbers[s], [output] if len(parts) == 1 else tf.split(output, [tf.size(p) for p in parts])))
        return [rows[n] for n in range(len(lookups))]

    def export_segment(self, segment: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's ids, ascending, and rows of one layer."""
        return self.embedding.export_table(self.layers[segment])

    def in_place_of(self, name: str) -> str:
        """The object that replaces an attribute of a fused layer, in the words of an error."""
        return "the FusedEmbedding that fuse(model, tables='native') has returned"

    def for_segment(self, segment: int) -> NativeRows:
        """Returns this lookup as the handle of one layer, for upstream's functions."""
        view = copy.copy(self)
        view._segment = segment
        return view

    def verify_embedding_weights(self, sparse_ids: Any, sparse_weights: Any = None) -> None:
        """Upstream's check of dtypes. The lookup checks them, too."""

    def embedding_lookup(self, ids: tf.Tensor, name: str | None = None, max_norm: Any = None) -> tuple[tf.Tensor, Any]:
        """Upstream's lookup, of ids <int64>[n]."""
        return self.rows([LookupIds(self._segment, tf.reshape(ids, [-1]))])[0], None

    def _take(self, layer: Any) -> None:
        """Moves the rows that a layer has. TFRA's partition function names other owners. Collective."""
        (group,) = (g for g in self.embedding.internals.groups if layer.name in g.table.names)
        keys, rows = (collectives.all_gather(tensor.numpy()) for tensor in layer.params.export())
        kept = np.flatnonzero(OWNERS[group.table.owner](keys, collectives.size()) == collectives.rank())
        records = group.table.new_records(layer.name, len(kept))
        put_numbers(records, "row", rows[kept])
        group.table.restore(layer.name, "rows", keys[kept], records)


def _rule_of(optimizer: Any) -> Any:
    if optimizer is None:
        raise ValueError(
            "fuse(model, tables='native') needs the model's optimizer, whose rule the tables apply. Call it after "
            "model.compile, or pass optimizer=."
        )
    try:
        rule = from_keras(optimizer)
    except ValueError as error:
        raise ValueError(f"fuse(model, tables='native'): {error} Or keep TFRA's tables: fuse(model).") from error
    if isinstance(optimizer, keras.optimizers.Optimizer) and any(rule.slot_starts.values()):
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer of fuse(model, tables='native') is the new {name}, whose accumulators TFRA does not begin at "
            f"initial_accumulator_value. Use keras.optimizers.legacy.{name}, or keep TFRA's tables: fuse(model)."
        )
    return rule


def _table_of(layer: Any, rule: Any, max_rows_per_rank: Mapping[str, int]) -> TableConfig:
    """The native table of a layer. Raises ValueError for an argument that it lacks."""
    params, remedy = layer.params, f"Or leave it alone: fuse(model, leave=[{layer.name!r}])."
    if layer.max_norm is not None:
        raise ValueError(
            f"layer {layer.name!r} has max_norm, and native tables clip no rows. Use a penalty in the loss. {remedy}"
        )
    if layer.hvd_variable._mpi_size != collectives.size():
        raise ValueError(
            f"layer {layer.name!r} has mpi_size {layer.hvd_variable._mpi_size}, and native tables share rows among all "
            f"{collectives.size()} processes. Omit mpi_size. {remedy}"
        )
    initializer = record_of(params.initializer, rows=params.init_size, dim=params.dim, layer=layer.name)
    if initializer is None:
        raise ValueError(
            f"layer {layer.name!r} has the initializer {params.initializer!r}, and native tables draw rows by those of "
            f"keras.initializers. Use RandomNormal, RandomUniform, TruncatedNormal or Constant. {remedy}"
        )
    limits, policy = Limits(), params.restrict_policy
    if policy is not None:
        if type(policy) not in _EVICTIONS:
            raise ValueError(
                f"layer {layer.name!r} has the restrict policy {type(policy).__name__}; native tables have "
                f"{', '.join(known.__name__ for known in _EVICTIONS)}. {remedy}"
            )
        if layer.name not in max_rows_per_rank:
            raise ValueError(
                f"layer {layer.name!r} has a restrict policy, and native tables evict when they reach a number of "
                f"rows. Use fuse(model, tables='native', max_rows_per_rank={{{layer.name!r}: ...}}). {remedy}"
            )
        limits = Limits(max_rows_per_rank=max_rows_per_rank[layer.name], eviction=_EVICTIONS[type(policy)])  # type: ignore[arg-type]
    try:
        return TableConfig(
            layer.name, params.dim, rule, initializer, layer.value_dtype.name,
            trainable=layer.trainable, limits=limits,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r} cannot have a native table: {error} {remedy}") from error
