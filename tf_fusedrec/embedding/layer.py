"""FusedEmbedding, the Keras layer: it takes ids by feature, returns rows, and trains its tables."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, outside_clusters, tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding import anchor, construction
from tf_fusedrec.embedding.call_steps import ReplaceableSteps
from tf_fusedrec.embedding.description import Described
from tf_fusedrec.embedding.features import FlatFeature, flatten_inputs, is_kept
from tf_fusedrec.embedding.group_lookup import GroupLookup
from tf_fusedrec.embedding.groups import group_tables
from tf_fusedrec.embedding.lookup import look_up
from tf_fusedrec.embedding.routed_ids import LookupRequest
from tf_fusedrec.embedding.trained_rows import TrainingStep, trained_rows
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.tables.keras_savers import TableState

_layers_of_table: dict[str, weakref.WeakSet] = {}
# For each layer, the layers that were found in no model together with it.
_apart: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable("tf_fusedrec")
class FusedEmbedding(ReplaceableSteps, Described, keras.layers.Layer):
    """Distributed dynamic embedding tables for many features (FusedRec, Algorithm 1).

    Tables of equal spec (dim, dtype, initializer, optimizer) form a group, in which each keeps its own limits. K groups
    make 2K + 1 all-to-alls in a training step: one for all ids, two for rows and gradients of each group. Tables grow
    as ids come.

    The layer has one trainable weight, a scalar anchor. Its gradient sends the gradients of rows to their owners, whose
    optimizer updates the rows. So the layer trains in `model.fit` and in any custom loop, and `layer.trainable = False`
    freezes the tables. Dense optimizers never see rows, so clipping by global norm does not count them. A scaled loss
    (policy "mixed_float16") needs a PipelinedModel, or a loop inside `loss_scaled_by(optimizer)`.

    The training calls of one step make one update, by the sum of their gradients: towers may share tables. One call
    with all features makes fewer exchanges.

    Every call is collective. All ranks call the layer equally often, with no ids if need be.

    Args:
      tables: TableConfig of each table.
      features: FeatureConfig of each feature.
      seed: Seed of the initial rows, which are a pure function of (seed, table name, id).
      gradient_op: "average" over ranks, as hvd.DistributedOptimizer averages dense gradients, or "sum", as TFRA does.
        The topology rule "weight_sync" averages or sums over the ranks of a group.
      backend: Storage of rows: "native", this project's hash table, or "tfra", a de.Variable.
      accumulate_steps: Number of steps whose gradients make one update, as one large batch would (MTGRBoost, section
        5.2). The update takes their mean with gradient_op "average", else their sum. Dense weights of a PipelinedModel
        wait as long. A checkpoint holds no waiting gradients: save after a multiple. "native" only.
      lookups_per_update: Number of steps whose lookups come before the update of the first: 2 under
        schedules.SemiAsync, and under Pipelined from depth 4 on. The rows of these steps are neither evicted nor moved.
        It has no effect on tables without eviction, ttl, hot_after and memory_budget.
      topology: Division of the ranks into groups with a copy of the tables each; None: one copy over all ranks. Groups
        are for "native" only.
      wire_dtype: "bfloat16" or "float16": float32 rows and gradients travel in half the bytes. None: their own dtype.
        Every number is rounded once each way. In bfloat16 the error is at most 2^-8 of the number. In float16 it is at
        most 2^-11, or 2^-25 below 2^-14, and gradients beyond 65504 become 65504. Sums and tables stay float32. Groups
        that share gradients round them twice more, as sums of a group and as sums of all groups.
      key_encoding: Way from (table, id) to a key: "bits" (exact; ids must be >= 0 and fit) or "hash". "tfra" only.
      init_capacity: Number of rows per group and rank for which memory is taken at once. "tfra" only.

    Call:
      inputs: dict from feature name to ids: dense [B] or [B, L], RaggedTensor [B, (L)], SparseTensor [B, L] with its
        indices in any order; int32 or int64. It may hold a subset of the features.
      weights: dict from feature name to per-id weights in the same form, or flat [n], for features with a combiner.
      mask: dict from feature name to bools, False at padding, in the form of the ids or of their first dimensions.
        Keras passes the masks of earlier layers. FeatureConfig.padding_id names padding by its id.
      training: False for lookups that must not change the tables. Ids without a row then get the row that
        TableConfig.unknown names, and no gradient. Keras sets it in fit, evaluate and predict. None means True.

    Returns:
      dict from feature name to rows: [B, D], [B, L, D] or RaggedTensor [B, (L), D]; [B, D] with a combiner.
      Padding has rows of zeros. Dense rows without a combiner carry a Keras mask of it to later layers. Ragged rows
      carry none, because Keras refuses a mask there.

    Raises:
      ValueError: unknown features, ids that are not integers, weights or masks that do not suit, options that the
        backend, the topology or the device does not have, or two layers of a model that train a table of one name.
      InvalidArgumentError (at run time): wrong row_splits, weights or masks of other rows than the ids, indices outside
        of a SparseTensor or doubled, ids that do not fit "bits", or two updates from one step.
      ResourceExhaustedError (at run time): no memory, or max_rows below one batch.
      FailedPreconditionError (at run time): a later training lookup has moved rows whose gradients come only now.
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
        init_capacity: int = 1 << 16,
        name: str | None = None,
        **kwargs: Any,
    ):
        # As Keras names layers, but never by a name that a loaded or a user's layer has already.
        base = keras.src.utils.generic_utils.to_snake_case(type(self).__name__)
        name = name or keras.src.backend.unique_object_name(base, zero_based=True, avoid_observed_names=True)
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
            "init_capacity": init_capacity,
        }
        self._config = _Untracked(config)
        self._features = {feature.name: feature for feature in features}
        self._layout = _Untracked(RankLayout(topology))
        with tf.init_scope():
            groups = group_tables(tables, features)
            lookups = [construction.make_lookup(name, group, config, self.layout) for group in groups]
        construction.check_output_dtypes(name, lookups)
        # A plain holder: Keras would track TFRA's variables as weights, and TensorFlow's checkpoint only rank 0's rows.
        self._holder = _Untracked(lookups)
        # Without a table that trains, the gradient would train nothing.
        self._anchor = self.add_weight(
            name="anchor",
            shape=(),
            initializer="zeros",
            dtype=tf.float32,
            trainable=any(lookup.group.trains for lookup in lookups),
        )
        # TensorFlow's and Keras' own savers find the tables through this attribute.
        backends = [lookup.table for lookup in self.lookups]
        self._table_state = TableState(name, backends, collectives.size(), self._anchor)
        self._calls = _Untracked(weakref.WeakKeyDictionary())
        self._steps = _Untracked(weakref.WeakKeyDictionary())
        self.built = True
        for name in [name for lookup in self.lookups for name in lookup.table.names]:
            _layers_of_table.setdefault(name, weakref.WeakSet()).add(self)

    @property
    def layout(self) -> RankLayout:
        """The position of this process: its shard, and its replica of the tables."""
        return self._layout.value

    @property
    def lookups(self) -> Sequence[GroupLookup]:
        """The groups of this model's own tables, in an order that is the same on all ranks."""
        return [lookup for lookup in self._holder.value if not lookup.group.external]

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizer of each table, by table name. Tables of one group share an optimizer.

        A number assigned to its `learning_rate` counts from the next step on. Assign the same number on all ranks.
        """
        return {name: lookup.table.optimizer for lookup in self.lookups for name in lookup.table.names}

    @property
    def tables(self) -> list[TableConfig]:
        """The TableConfig of each table, external tables included."""
        return [TableConfig.from_dict(table) for table in self._config.value["tables"]]

    def call(
        self,
        inputs: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        training: bool | None = None,
        mask: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        if self.call_steps.answer is not None:
            return self.call_steps.answer(inputs, weights, mask)
        trains = self.trainable and training is not False and training != 0
        with outside_clusters(f"Layer {self.name!r}"):
            return self._look_up(inputs, weights, mask, trains)

    def compute_mask(self, inputs: Mapping[str, Any], mask: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The masks <bool>[B, L], False at padding, of dense features [B, L] without a combiner; None without padding.

        Ids [B] have no mask, because Keras would leave a sample without an id out of the loss and the metrics.
        """
        masks = {
            name: is_kept(self._features[name], ids, (mask or {}).get(name))
            for name, ids in inputs.items()
            if self._features[name].combiner is None
            and not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
            and len(np.shape(ids)) > 1
        }
        return {name: masks.get(name) for name in inputs} if any(m is not None for m in masks.values()) else None

    def _look_up(self, inputs: Mapping[str, Any], weights: Any, mask: Any, training: bool) -> dict[str, Any]:
        groups = self.requests(inputs, weights, mask, training=training)
        step = self._training_step() if training else None
        if step is not None and self.call_steps.look_up is look_up:
            construction.check_calls(self.name, self._config.value, groups, step.calls_by_group)
        outputs: dict[str, Any] = {}
        # Ids leave after the anchor's check: a rank whose check fails would leave the others waiting for its ids.
        with tf.control_dependencies([] if step is None else [step.value]):
            rows_by_group = self.call_steps.look_up(groups)
        for requests, found in zip(groups, rows_by_group):
            outputs.update(trained_rows(requests, found, step, self.call_steps.gradient))
        return {name: outputs[name] for name in inputs}

    def _training_step(self) -> TrainingStep:
        """The step that a training call made now belongs to."""
        graph = tf.compat.v1.get_default_graph()
        step = self._steps.value.get(graph)
        if step is None or not step.takes_calls():
            self._refuse_tables_of_two_layers(graph)
            step = TrainingStep(anchor.checked(self._anchor.read_value(), self.name), self.call_steps.train)
            self._steps.value[graph] = step
        return step

    def _refuse_tables_of_two_layers(self, graph: tf.Graph) -> None:
        """Raises ValueError if another layer of one model trains a table of the same name in this step.

        Layers of two models may: a student and its teacher, a clone, or the model that a notebook's cell built before.
        """
        from tf_fusedrec.embedding.search import embeddings_of  # which imports this module

        for name in [name for lookup in self.lookups for name in lookup.table.names]:
            for other in _layers_of_table[name] - _apart.setdefault(self, weakref.WeakSet([self])):
                step = other._steps.value.get(graph)
                if step is None or not step.takes_calls():
                    continue
                for model in [one for one in gc.get_objects() if issubclass(type(one), keras.Model)]:
                    if {self, other} <= set(embeddings_of(model)):
                        raise ValueError(
                            f"layers {other.name!r} and {self.name!r} of model {model.name!r} both train a table "
                            f"{name!r}, so they train two tables of one name. Remedy: one layer with the features of "
                            "both, which may be called more than once in a step; or another TableConfig.name."
                        )
                _apart[self].add(other)

    def prefetch(self, inputs: Mapping[str, Any]) -> None:
        """Starts to read the rows of a coming batch from disk, for tables with a memory_budget. Collective.

        It changes no row, so it may come any number of steps ahead, or never. See tf_fusedrec.data.lookahead.

        Args:
          inputs: Inputs of a call. They may hold a subset of the features.

        Raises:
          ValueError: As the call.
        """
        flat, call = self.flat_features(inputs, None, None), self._next_call()
        for lookup, features in self._by_group(flat):
            lookup.prefetch(features, call=call)

    def synchronize(self) -> None:
        """Makes replicas of tables equal, if they train apart (Topology rule "weight_sync"). Collective.

        Between synchronisations each group sees its own replica. Checkpoints and exports synchronise by themselves.
        Call it before export_table or an evaluation if the number of steps is no multiple of sync_every.
        """
        for lookup in self.lookups:
            lookup.synchronize()

    def check_deferrable(self, steps: int) -> None:
        """Raises ValueError unless the lookups of `steps` steps may come before the update of the first."""
        construction.check_deferrable(self.name, self._config.value, self.lookups, steps)

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
          training: True if the lookups train.

        Raises:
          ValueError: As the call.
        """
        return self.requests_of(self.flat_features(inputs, weights, mask), training=training)

    def requests_of(self, features: Mapping[str, FlatFeature], *, training: bool) -> list[list[LookupRequest]]:
        """As `requests`, for inputs that `flat_features` has flattened."""
        call = self._next_call()
        return [lookup.requests(mine, call, training=training) for lookup, mine in self._by_group(features)]

    def _by_group(self, flat: Mapping[str, FlatFeature]) -> list[tuple[GroupLookup, list[FlatFeature]]]:
        """The groups that have features among these, each with its features in its own order."""
        parts = [
            (lookup, [flat[f.name] for f in lookup.group.features if f.name in flat]) for lookup in self._holder.value
        ]
        return [(lookup, mine) for lookup, mine in parts if mine]

    def flat_features(
        self, inputs: Mapping[str, Any], weights: Mapping[str, Any] | None, mask: Mapping[str, Any] | None
    ) -> dict[str, FlatFeature]:
        """The inputs of a call, flattened by feature. Raises ValueError as the call."""
        tables = {feature.name: lookup.table for lookup in self._holder.value for feature in lookup.group.features}
        return flatten_inputs(self.name, self._features, inputs, weights or {}, mask or {}, tables)

    def _next_call(self) -> int:
        """The number of a call in its graph. Eager calls run one after another and share the number 0."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        first = _callers.setdefault(graph, {}).setdefault(self.name, weakref.ref(self))()
        if first not in (None, self) and collectives.size() > 1:
            raise ValueError(two_of_one_name(self.name))
        number = self._calls.value.get(graph, 0)
        self._calls.value[graph] = number + 1
        return number

    def export_table(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """ids <int64>[n], ascending, and rows [n, D] of one table that this rank holds. Eager, not collective."""
        tables = {name: lookup.table for lookup in self._holder.value for name in lookup.table.names}
        if name not in tables:
            raise ValueError(f"{self.name!r} has no table {name!r}. Known tables: {sorted(tables)}.")
        return tables[name].export(name)

    def remove(self, table: str, ids: Any) -> int:
        """Removes the rows of these ids, with slots and counters, from all ranks and replicas. Eager and collective.

        Delta checkpoints and delta exports tell the removed ids. Earlier checkpoints and exports still hold their rows.
        An id that comes again begins with its initial row. Rows that a schedule has looked up ahead cannot be trained
        afterwards: call it outside of fit.

        Args:
          table: Name of the table.
          ids: Integers of any shape. Ranks may name different ids; ids without a row have no effect.

        Returns:
          The number of removed rows on all ranks.

        Raises:
          ValueError: the layer has no such table of its own, or ids are not integers.
        """
        tables: dict[str, Any] = {name: lookup.table for lookup in self.lookups for name in lookup.table.names}
        if table not in tables:
            raise ValueError(f"{self.name!r} has no table {table!r} to remove rows from, only {sorted(tables)}.")
        wanted = np.asarray(ids)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise ValueError(
                f"ids to remove from table {table!r} are {wanted.dtype}, and must be integers. Remedy: ids as the "
                "model gets them, such as tf_fusedrec.hash_strings of a name."
            )
        wanted = np.unique(collectives.all_gather(wanted.astype(np.int64).ravel()))
        before = tables[table].size(table)
        tables[table].remove(table, wanted)
        return int(collectives.all_gather(np.array([before - tables[table].size(table)])).sum())

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


# The layer that each name stands for in a graph. Names of layers are names of collectives.
_callers: weakref.WeakKeyDictionary[tf.Graph, dict[str, weakref.ref]] = weakref.WeakKeyDictionary()


def two_of_one_name(name: str) -> str:
    """The error for two layers of one name in a model or step."""
    return (
        f"Two FusedEmbeddings of one model are named {name!r}, but the name of a layer names its exchanges between "
        "ranks. Remedy: another name=... for one of them, or no name=, which makes the names unique."
    )


class _Untracked:
    """Holds a value out of sight of Keras' and TensorFlow's attribute tracking."""

    def __init__(self, value: Any):
        self.value = value
