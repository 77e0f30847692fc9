"""FusedEmbedding, the Keras layer: features in, rows out, tables that train themselves. Composes the other rooms."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding import anchor, construction
from tf_fusedrec.embedding.description import Described
from tf_fusedrec.embedding.group_lookup import GroupLookup, LookupRequest
from tf_fusedrec.embedding.groups import group_tables
from tf_fusedrec.embedding.hooks import CallModes, Reached
from tf_fusedrec.embedding.inputs import FlatFeature, flatten_inputs, is_kept
from tf_fusedrec.embedding.lookup import route
from tf_fusedrec.embedding.trained_rows import GroupCall, trained_rows
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import Place, Topology
from tf_fusedrec.ops.xla import outside_clusters
from tf_fusedrec.tables.state import TableState


@keras.saving.register_keras_serializable("tf_fusedrec")
class FusedEmbedding(CallModes, Described, keras.layers.Layer):
    """Distributed dynamic embedding tables for many features (FusedRec, Algorithm 1).

    Tables of equal spec (dim, dtype, initializer, optimizer) are fused into groups by themselves. A training step costs
    two all-to-alls per group, of rows and gradients, whatever the number of features, and one of the ids of all groups.
    Tables grow as ids come.

    Training happens inside the gradient: when a tape asks for the gradient of the layer's one trainable weight, a
    scalar anchor, gradients go to the rows' owners and their optimizer is applied there. So the layer works in
    `model.fit` and in any custom loop; `layer.trainable = False` freezes the tables. Dense optimizers never see rows
    (clipping by global norm does not count them). A scaled loss (policy "mixed_float16") needs a PipelinedModel, or a
    loop inside `loss_scaled_by(optimizer)`, since rows would get scaled gradients; rows keep their own dtypes.

    On R processes every call is collective: all ranks must call the layer equally often, with no ids if need be.

    Args:
      tables: TableConfig of each table.
      features: FeatureConfig of each feature.
      seed: initial rows are a pure function of (seed, table name, id).
      gradient_op: "average" over ranks, as hvd.DistributedOptimizer does with dense gradients, or "sum", TFRA's rule.
        Under the topology rule "weight_sync", over the ranks of a group.
      backend: where rows live: "native", this project's hash table, or "tfra", a de.Variable.
      accumulate_steps: gradients of that many steps make one update of the tables, equal to that of one large batch
        (MTGRBoost, section 5.2): their mean with gradient_op "average", else their sum. Gradients that wait are in no
        checkpoint: save after a multiple of it. "native" only.
      lookups_per_update: steps whose lookups come before the update of the first: 2 under schedules.SemiAsync, and
        under Pipelined from depth 4 on. Rows of so many are neither evicted nor moved. Tables without eviction, ttl,
        hot_after, memory_budget and host_rows need not know.
      topology: how ranks share the tables; None: one copy of them over all ranks. Groups are for "native" only.
      wire_dtype: "bfloat16" or "float16": float32 rows and gradients travel in half the bytes, ids never; None: as they
        are. Every number is rounded once each way: by at most 2^-8 of itself in bfloat16; by 2^-11 in float16, or 2^-25
        where it is below 2^-14, and gradients beyond 65504 become that. Sums and tables stay float32. Gradients that
        groups share are rounded twice more, as sums of a group and as sums of all groups.
      key_encoding: "tfra" only: how (table, id) becomes a key: "bits" (exact; ids must be >= 0 and fit) or "hash".
      keep_reverse_map: "tfra" with "hash": remember the ids behind keys; without, rows cannot be exported.
      init_capacity: "tfra" only: rows per group and rank for which memory is taken at once.

    Call:
      inputs: dict from feature name to ids: dense [B] or [B, L], RaggedTensor [B, (L)], SparseTensor [B, L]; int32 or
        int64. May hold a subset of the features.
      weights: dict from feature name to per-id weights in the same form, for features with a combiner.
      mask: dict from feature name to bools, False at padding, in the same form or that of its first dimensions; Keras
        passes the masks of layers before this one. FeatureConfig.padding_id names padding by its id.
      training: False for lookups that must not change the tables: ids without a row have what TableConfig.unknown says,
        and no gradient is taken. Keras sets it in fit, evaluate and predict; None, as in loops of one's own, is True.

    Returns:
      dict from feature name to rows: [B, D], [B, L, D] or RaggedTensor [B, (L), D]; [B, D] with a combiner.
      Padding has rows of zeros. Dense rows without a combiner bring a Keras mask of it to later layers; ragged rows
      bring none, since Keras refuses a mask there.

    Raises:
      ValueError: unknown features, ids that are not integers, weights or masks that do not suit. At run time
        InvalidArgumentError: row_splits that lie, ids that do not fit "bits", two trainings from lookups of one step;
        ResourceExhaustedError: no memory, or max_rows below one batch; FailedPreconditionError: a later training lookup
        has moved the rows of one whose gradients come only now.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        *,
        seed: int = 0,
        gradient_op: str = "average",
        backend: str = "native",
        accumulate_steps: int = 1,
        lookups_per_update: int = 1,
        topology: Topology | None = None,
        wire_dtype: str | None = None,
        key_encoding: str = "bits",
        keep_reverse_map: bool = True,
        init_capacity: int = 1 << 16,
        name: str = "fused_embedding",
        **kwargs: Any,
    ):
        super().__init__(name=name, dtype=tf.float32, **kwargs)
        self.supports_masking = True
        collectives.check_init()
        construction.check_backend(
            backend, tables, accumulate_steps=accumulate_steps, lookups_per_update=lookups_per_update
        )
        if wire_dtype not in (None, "bfloat16", "float16"):
            raise ValueError(f"wire_dtype must be 'bfloat16', 'float16' or None, got {wire_dtype!r}.")
        topology = topology or Topology()
        if backend != "native" and topology.groups > 1:
            raise ValueError(f"{topology} of {name!r} needs backend='native', and it has {backend!r}.")
        config: dict[str, Any] = {
            "tables": [table.to_dict() for table in tables],
            "features": [dataclasses.asdict(feature) for feature in features],
            "seed": seed,
            "gradient_op": gradient_op,
            "backend": backend,
            "accumulate_steps": accumulate_steps,
            "lookups_per_update": lookups_per_update,
            "topology": topology.to_dict(),
            "wire_dtype": wire_dtype,
            "key_encoding": key_encoding,
            "keep_reverse_map": keep_reverse_map,
            "init_capacity": init_capacity,
        }
        self._config = _Untracked(config)
        self._features = {feature.name: feature for feature in features}
        self._place = _Untracked(Place(topology))
        with tf.init_scope():
            groups = group_tables(tables, features)
            construction.check_output_dtypes(groups, backend)
            lookups = [construction.make_lookup(name, group, config, self.place) for group in groups]
        # A plain holder: Keras would track TFRA's variables as weights, and TensorFlow's checkpoint only rank 0's rows.
        self._holder = _Untracked(lookups)
        # Without tables of its own there is nothing that its gradient would train.
        self._anchor = self.add_weight(
            name="anchor", shape=(), initializer="zeros", dtype=tf.float32, trainable=bool(self.lookups)
        )
        # What TensorFlow's and Keras' own savers see of the tables.
        self._table_state = TableState(name, [lookup.table for lookup in self.lookups], collectives.size())
        self._calls = _Untracked(weakref.WeakKeyDictionary())
        self.built = True

    @property
    def place(self) -> Place:
        """Which part of which replica of the tables this process holds."""
        return self._place.value

    @property
    def lookups(self) -> Sequence[GroupLookup]:
        """The groups of this model's own tables, in an order that is the same on all ranks."""
        return [lookup for lookup in self._holder.value if not lookup.group.external]

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizer that trains each table, by table name; tables of one group share theirs.

        A number assigned to its `learning_rate` counts from the next step on, on this rank: assign the same on all.
        """
        return {name: lookup.table.optimizer for lookup in self.lookups for name in lookup.table.names}

    @property
    def tables(self) -> list[TableConfig]:
        """As they were given, external ones included."""
        return [TableConfig.from_dict(table) for table in self._config.value["tables"]]

    def call(
        self,
        inputs: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        training: bool | None = None,
        mask: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        if self._interrupts:
            raise Reached(inputs, weights, mask)
        if self._server is not None:
            return self._served(self._flat_features(inputs, weights, mask), self._server)
        trains = self.trainable and training is not False and training != 0
        with outside_clusters(f"Layer {self.name!r}"):
            return self._look_up(inputs, weights, mask, trains)

    def compute_mask(self, inputs: Mapping[str, Any], mask: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Of dense features [B, L] without a combiner: <bool>[B, L], False at padding; None if nothing can be padding.

        Ids [B] bring none: Keras would leave a sample whose id is missing out of the loss and the metrics.
        """
        masks = {
            name: is_kept(self._features[name], ids, (mask or {}).get(name))
            for name, ids in inputs.items()
            if self._features[name].combiner is None
            and not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
            and len(np.shape(ids)) > 1
        }
        return {name: masks.get(name) for name in inputs} if any(m is not None for m in masks.values()) else None

    # Nothing in here needs AutoGraph, and a conversion would cost seconds per trace.
    @tf.autograph.experimental.do_not_convert
    def _look_up(self, inputs: Mapping[str, Any], weights: Any, mask: Any, training: bool) -> dict[str, Any]:
        requests = self.requests(inputs, weights, mask, training=training)
        supplied = self._next_supplied(len(requests)) if training else [None] * len(requests)
        routed = iter(route([one for group, rows in zip(requests, supplied) if rows is None for one in group]))
        value = self._anchor.read_value()
        value = anchor.checked(value, self.name) if training else value
        outputs: dict[str, Any] = {}
        for group, rows in zip(requests, supplied):
            mine = [next(routed) for _ in group] if rows is None else []
            call = GroupCall(self.name, group, mine, rows, self._deferral, self._loss_scaler)
            outputs.update(trained_rows(call, value))
        return {name: outputs[name] for name in inputs}

    def prefetch(self, inputs: Mapping[str, Any]) -> None:
        """Begins to bring rows of a coming batch from disk into memory, for tables with a memory_budget.

        Changes nothing, so that it may come any number of steps ahead, or not at all; see tf_fusedrec.data.lookahead.
        Collective, as a call is.

        Args:
          inputs: as those of a call; may hold a subset of the features.

        Raises:
          ValueError: as a call.
        """
        flat, call = self._flat_features(inputs, None, None), self._next_call()
        for lookup, features in self._by_group(flat):
            lookup.prefetch(features, call=call)

    def synchronize(self) -> None:
        """Makes replicas of tables equal now, where they train apart (Topology rule "weight_sync"). Collective.

        Between synchronisations each group sees its own replica. Checkpoints synchronise by themselves; call it before
        rows are exported, or a model is evaluated, after steps that are no multiple of sync_every.
        """
        for lookup in self.lookups:
            lookup.synchronize()

    def check_deferrable(self, steps: int) -> None:
        """Raises ValueError unless the lookups of `steps` steps may come before the update of the first."""
        construction.check_deferrable(self.name, self._config.value, self.lookups, steps)

    def check_accumulates(self) -> None:
        """Raises ValueError unless the gradients of several lookups of a step can make one update."""
        construction.check_accumulates(self.name, self.lookups)

    def requests(
        self,
        inputs: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        mask: Mapping[str, Any] | None = None,
        *,
        training: bool,
    ) -> list[list[LookupRequest]]:
        """The lookups of one call by group, in an order that is the same on all ranks. For schedules.

        Args:
          inputs, weights, mask: Arguments of the call.
          training: Whether the lookups train.

        Raises:
          ValueError: As the call.
        """
        flat, call = self._flat_features(inputs, weights, mask), self._next_call()
        return [lookup.requests(mine, call, training=training) for lookup, mine in self._by_group(flat)]

    def _by_group(self, flat: Mapping[str, FlatFeature]) -> list[tuple[GroupLookup, list[FlatFeature]]]:
        """The groups that have features among these, each with its features in its own order."""
        parts = [
            (lookup, [flat[f.name] for f in lookup.group.features if f.name in flat]) for lookup in self._holder.value
        ]
        return [(lookup, mine) for lookup, mine in parts if mine]

    def _flat_features(
        self, inputs: Mapping[str, Any], weights: Mapping[str, Any] | None, mask: Mapping[str, Any] | None
    ) -> dict[str, FlatFeature]:
        return flatten_inputs(self.name, self._features, inputs, weights or {}, mask or {})

    def _next_call(self) -> int:
        """Number of a call in its graph. Eager calls run one after another and share the number 0."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        number = self._calls.value.get(graph, 0)
        self._calls.value[graph] = number + 1
        return number

    def export_table(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """ids <int64>[n], ascending, and rows [n, D] of one table that this rank holds. Eager, not collective."""
        tables = {name: lookup.table for lookup in self._holder.value for name in lookup.table.names}
        if name not in tables:
            raise ValueError(f"{self.name!r} has no table {name!r}. Known tables: {sorted(tables)}.")
        return tables[name].export(name)

    def save_own_variables(self, store: Any) -> None:
        self._table_state.save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        self._table_state.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._config.value}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbedding:
        """A layer of the same tables and features, with no rows. Rows come back with tf_fusedrec.checkpoint.load."""
        config = dict(config)
        config.pop("dtype", None)
        config["tables"] = [TableConfig.from_dict(table) for table in config["tables"]]
        config["features"] = [FeatureConfig(**feature) for feature in config["features"]]
        config["topology"] = Topology(**config["topology"])
        return cls(**config)


class _Untracked:
    """Holds a value out of sight of Keras' and TensorFlow's attribute tracking."""

    def __init__(self, value: Any):
        self.value = value
