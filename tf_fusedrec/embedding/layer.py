"""FusedEmbedding, the Keras layer: it takes ids by feature, returns rows, and trains its tables."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, keras_api, outside_clusters, tf
from tf_fusedrec.config import FeatureConfig, TableConfig, named_tables
from tf_fusedrec.embedding import describe
from tf_fusedrec.embedding.features import FlatFeature, check_dtype, is_kept, restore_form
from tf_fusedrec.embedding.group import LayerOptions
from tf_fusedrec.embedding.internals import CallHooks, Internals, two_of_one_name
from tf_fusedrec.embedding.step import Step, TrainingCalls
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.dense_gradients import check_steps
from tf_fusedrec.exchange.topology import RankLayout, Topology
from tf_fusedrec.tables import Table
from tf_fusedrec.tables.keras_savers import TableState, refuse_optimizer, refuse_scale

if KERAS_IS_LEGACY:
    from tf_fusedrec.tables import legacy_savers as savers  # also makes tf_keras' savers know tables
else:
    from tf_fusedrec.tables import keras_3_savers as savers  # type: ignore[no-redef]

_layers_of_table: dict[str, weakref.WeakSet] = {}
# For each layer, the layers that were found in no model together with it.
_apart: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _DefaultHooks(CallHooks):
    def call(self, layer: FusedEmbedding, inputs: Any, weights: Any, mask: Any, *, training: bool) -> dict[str, Any]:
        with outside_clusters(f"Layer {layer.name!r}"):
            caller = keras_api.layer_of_other_keras()
            if caller is not None:
                raise ValueError(
                    f"{layer.name!r} is called inside {caller.name!r}, which would not train its rows: it "
                    f"{keras_api.OTHER_KERAS} A loop may call this layer and pass its rows to such a model."
                )
            return layer._look_up(inputs, weights, mask, training)

    def rows(
        self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], *, training: bool
    ) -> tuple[Step, Sequence[tf.Tensor]]:
        lookups = layer.internals.lookups_of(features, training=training)
        if training:
            lookups = layer.internals.steps[tf.compat.v1.get_default_graph()].of_next_call(lookups)
        step = Step(tuple(lookups)).send_ids().look_up()
        return step, step.return_rows()

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        if keras.mixed_precision.global_policy().name == "mixed_float16":
            refuse_scale(step.lookups[min(gradients)].group.table.names, "the policy mixed_float16")
        step.update(step.send_gradients(gradients))
        return tf.zeros([])

    def gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        return gradient


class _OfKerasModel(CallHooks):
    """Refuses an optimizer of the calling model that would train the dense weights unlike the rows."""

    def __init__(self, before: CallHooks, layer: FusedEmbedding, optimizer: Any):
        self.before, self._layer, self._optimizer = before, layer, optimizer

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        if isinstance(self._optimizer, keras.mixed_precision.LossScaleOptimizer):
            refuse_scale(step.lookups[min(gradients)].group.table.names, "a LossScaleOptimizer")
        refuse_optimizer(self._layer.name, self._optimizer)
        check_steps(self._optimizer, self._layer.internals.options.accumulate_steps)
        return self.before.train(step, gradients)


class _ScaledLoss(CallHooks):
    """Trains by gradients of a scaled loss where they are finite on all ranks."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        parts = [{i: gradients[i] for i in positions} for _, positions in step.by_group(gradients)]
        return tf.add_n([self._train_group(step, part) for part in parts])

    def _train_group(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        scale = keras_api.loss_scale(self._optimizer)
        wide = {i: tf.cast(tf.convert_to_tensor(grad), tf.float32) / scale for i, grad in gradients.items()}
        bad = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.int64)) for grad in wide.values()])
        first = step.lookups[min(gradients)]
        name = f"{first.group.prefix}.{first.call}.overflows"
        finite = tf.equal(collectives.all_reduce_sum(bad, name=name), 0)

        def train() -> tf.Tensor:
            unscaled = {i: tf.cast(grad, gradients[i].dtype) for i, grad in wide.items()}
            step.update(step.send_gradients(unscaled))
            return tf.zeros([])

        return tf.cond(finite, train, lambda: tf.constant(np.inf, tf.float32))


@keras.saving.register_keras_serializable("tf_fusedrec")
class FusedEmbedding(keras.layers.Layer):
    """Distributed dynamic embedding tables for many features (FusedRec, Algorithm 1).

    Tables of equal spec (dim, dtype, initializer, optimizer) form a group, in which each keeps its own limits. K groups
    make 2K + 1 all-to-alls in a training step: one for all ids, two for rows and gradients of each group. Over Gloo, 8
    or more groups share them. Tables grow as ids occur.

    The layer has one trainable weight, a scalar anchor. Its gradient sends the gradients of rows to their owners, whose
    optimizer updates the rows. So the layer trains in `model.fit` and in any custom loop, and `layer.trainable = False`
    freezes the tables. Dense optimizers never see rows, so clipping by global norm does not count them. A scaled loss
    (policy "mixed_float16") needs a PipelinedModel, or a loop inside `loss_scaled_by(optimizer)`.

    The training calls of one step make one update, by the sum of their gradients: towers may share tables. One call
    with all features makes fewer exchanges.

    Every call is collective. All ranks call the layer equally often, with no ids if need be.

    Args:
      features: FeatureConfig of each feature.
      tables: TableConfig of each table that features name. Features may hold their TableConfig instead.
      seed: Seed of the initial rows, which are a pure function of (seed, table name, id).
      gradient_op: "average" over ranks, as hvd.DistributedOptimizer averages dense gradients, or "sum", as TFRA does.
        The topology rule "weight_sync" averages or sums over the ranks of a group.
      backend: Storage of rows: "native", this project's hash table, or "tfra", a de.Variable.
      accumulate_steps: Number of steps that make one update, as one large batch would (MTGRBoost, section
        5.2). The update takes their mean with gradient_op "average", else their sum. Dense weights of a PipelinedModel
        wait as long. A checkpoint has no waiting gradients: save after a multiple. "native" only.
      topology: Division of the ranks into groups with a copy of the tables each; None: one copy over all ranks. Groups
        are for "native" only.
      wire_dtype: "bfloat16" or "float16": float32 rows and gradients travel in half the bytes. None: their own dtype.
        Every number is rounded once each way. In bfloat16 the error is at most 2^-8 of the number. In float16 it is at
        most 2^-11, or 2^-25 below 2^-14, and gradients beyond 65504 become 65504. Sums and tables stay float32. Groups
        that share gradients round them twice more, as sums of a group and as sums of all groups.
      key_encoding: Way from (table, id) to a key: "bits" (exact; ids must be >= 0 and fit) or "hash". "tfra" only.
      init_capacity_per_rank: Number of rows per group and rank for which memory is taken at once. "tfra" only.

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
      ResourceExhaustedError (at run time): no memory, or max_rows_per_rank below one batch.
      FailedPreconditionError (at run time): a later training lookup has moved rows before their gradients arrived.

    Examples:
      >>> item = fr.TableConfig("item", dim=4, optimizer=fr.optimizers.Adagrad(0.1))
      >>> layer = fr.FusedEmbedding([fr.FeatureConfig("history", item, combiner="mean")])
      >>> with tf.GradientTape() as tape:
      ...     rows = layer({"history": tf.ragged.constant([[3, 5], [], [3]], dtype=tf.int64)})["history"]
      ...     loss = tf.reduce_sum(rows**2)
      >>> gradients = tape.gradient(loss, layer.trainable_variables)  # trains the rows
      >>> rows.shape, layer.statistics()["item"]["keys"]
      (TensorShape([3, 4]), 2)
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        tables: Sequence[TableConfig] = (),
        *,
        seed: int = 0,
        gradient_op: str = "average",
        backend: str = "native",
        accumulate_steps: int = 1,
        topology: Topology | None = None,
        wire_dtype: str | None = None,
        key_encoding: str = "bits",
        init_capacity_per_rank: int = 1 << 16,
        name: str | None = None,
        **kwargs: Any,
    ):
        if "dtype" in kwargs:
            raise TypeError(
                f"FusedEmbedding must get no dtype, got {kwargs['dtype']!r}. Use TableConfig(dtype=...) for a table, "
                "or FeatureConfig(output_dtype=...) for the rows of a feature."
            )
        super().__init__(name=name or keras_api.unique_layer_name(type(self).__name__), dtype="float32", **kwargs)
        self.supports_masking = True
        self.supports_jit = False  # lookups have no XLA kernels; Keras 3 then chooses no jit_compile
        collectives.check_init()
        features, tables = named_tables(features, tables)
        options = LayerOptions(
            seed=seed,
            gradient_op=gradient_op,
            backend=backend,
            accumulate_steps=accumulate_steps,
            topology=Topology() if topology is None else topology,
            wire_dtype=wire_dtype,
            key_encoding=key_encoding,
            init_capacity_per_rank=init_capacity_per_rank,
        )
        options.check_tables(tables)
        self.internals = Internals(self.name, tables, features, options, _DefaultHooks())
        # Its gradient sends the gradients of rows. Without a table that trains, it would train nothing.
        trains = any(group.config.trains for group in self.internals.all_groups)
        self._anchor = savers.make_anchor(self, trainable=trains)
        # TensorFlow's and Keras' own savers find the tables through this attribute.
        backends = [group.table for group in self.internals.groups]
        self._table_state = TableState(self.name, backends, collectives.size(), self._anchor)
        self.built = True
        for table in self.optimizers:
            _layers_of_table.setdefault(table, weakref.WeakSet()).add(self)

    @property
    def layout(self) -> RankLayout:
        """The position of this process: its shard, and its replica of the tables."""
        return self.internals.layout

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizer of each table, by table name. Tables of one group share an optimizer.

        A number assigned to its `learning_rate` counts from the next step on. Assign the same number on all ranks.
        """
        return {name: group.table.optimizer for group in self.internals.groups for name in group.table.names}

    @property
    def tables(self) -> list[TableConfig]:
        """The TableConfig of each table, external tables included."""
        return list(self.internals.tables)

    def loss_scaled_by(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """For training steps with a scaled loss: divides gradients of rows by the scale that `optimizer` has then.

        If one of them is not finite on any rank, no row of its group is trained. The layer's anchor then gets a
        gradient that is not finite. The optimizer sees it, skips its step, and lowers the scale. The calls and the
        gradient must be inside. PipelinedModel enters this context automatically.

        Args:
          optimizer: A keras.mixed_precision.LossScaleOptimizer.
        """
        return self.internals.using(_ScaledLoss(optimizer))

    def call(
        self,
        inputs: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        training: bool | None = None,
        mask: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        trains = bool(self.trainable and training is not False and training != 0)
        return self.internals.hooks.call(self, inputs, weights, mask, training=trains)

    def compute_mask(self, inputs: Mapping[str, Any], mask: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The masks <bool>[B, L], False at padding, of dense features [B, L] without a combiner; None without padding.

        Ids [B] have no mask, because Keras would leave a sample without an id out of the loss and the metrics.
        """
        masks = {
            name: is_kept(self.internals.features[name], ids, (mask or {}).get(name))
            for name, ids in inputs.items()
            if self.internals.features[name].combiner is None
            and not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
            and len(np.shape(ids)) > 1
        }
        return {name: masks.get(name) for name in inputs} if any(m is not None for m in masks.values()) else None

    def compute_output_spec(self, inputs: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """The symbolic rows of a functional model, so that Keras 3 traces no lookup for them."""
        return {name: self._symbolic_rows(name, ids) for name, ids in inputs.items()}

    def _symbolic_rows(self, name: str, ids: Any) -> Any:
        if name not in self.internals.features or not isinstance(ids, keras_api.KerasTensor):
            form = self.internals.flat_features({name: ids}, None, None)[name].form  # or its error
            is_dense = isinstance(form, tf.Tensor)
            ids = keras_api.KerasTensor(form.shape, form.dtype.name, ragged=not is_dense)
        check_dtype(name, ids.dtype)
        group = next(group for group in self.internals.all_groups if name in group.output_dtype)
        dim, dtype = group.config.tables[0].dim, group.output_dtype[name]
        if self.internals.features[name].combiner is not None:
            return keras_api.KerasTensor((ids.shape[0], dim), dtype)
        ragged = len(ids.shape) > 1 and (ids.ragged or ids.sparse)
        return keras_api.KerasTensor((*ids.shape, dim), dtype, ragged=ragged)

    def _look_up(self, inputs: Mapping[str, Any], weights: Any, mask: Any, training: bool) -> dict[str, Any]:
        features = self.internals.flat_features(inputs, weights, mask)
        calls = self._training_calls() if training else None
        # Ids leave after the anchor's check: a rank that fails the check would leave the others waiting for its ids.
        with tf.control_dependencies([] if calls is None else [calls.anchor]):
            step, rows = self.internals.hooks.rows(self, features, training=training)
        rows = [tf.stop_gradient(part) for part in rows] if calls is None else calls.trained(step, rows)
        outputs: dict[str, Any] = {}
        for lookup, part in zip(step.lookups, rows):
            parts = tf.split(part, lookup.fused.feature_bags) if len(lookup.features) > 1 else [part]
            for name, feature_rows in zip(lookup.features, parts):
                feature_rows.set_shape([None, part.shape[1]])
                outputs[name] = restore_form(features[name], feature_rows)
        return {name: outputs[name] for name in inputs}

    def _training_calls(self) -> TrainingCalls:
        """The step that a training call made now belongs to."""
        graph = tf.compat.v1.get_default_graph()
        calls = self.internals.steps.get(graph)
        if calls is None or not calls.takes_calls():
            world, hooks = self.layout.world, self.internals.hooks
            inner, optimizer = hooks, keras_api.calling_optimizer()
            while not isinstance(inner, (_DefaultHooks, _ScaledLoss)):
                inner = inner.before
            if optimizer is not None and isinstance(inner, _DefaultHooks):
                hooks = _OfKerasModel(hooks, self, optimizer)
            calls = TrainingCalls(keras_api.tf_variable(self._anchor).read_value(), self.name, world, hooks)
            self._refuse_tables_of_two_layers(graph)
            self.internals.steps[graph] = calls
        return calls

    def _refuse_tables_of_two_layers(self, graph: tf.Graph) -> None:
        """Raises ValueError if another layer of one model trains a table of the same name in this step.

        Layers of two models may: a student and its teacher, a clone, or the model that a notebook's cell built before.
        """
        for table in self.optimizers:
            for other in _layers_of_table[table] - _apart.setdefault(self, weakref.WeakSet([self])):
                calls = other.internals.steps.get(graph)
                if calls is None or not calls.takes_calls():
                    continue
                for model in [value for value in gc.get_objects() if issubclass(type(value), keras.Model)]:
                    if {self, other} <= set(embeddings_of(model)):
                        raise ValueError(
                            f"layers {other.name!r} and {self.name!r} of model {model.name!r} both train a table "
                            f"{table!r}, so they train two tables of one name. Use one layer with the features of "
                            "both, which may be called more than once in a step; or another TableConfig.name."
                        )
                _apart[self].add(other)

    def prefetch(self, inputs: Mapping[str, Any]) -> None:
        """Starts to read the rows of a coming batch from disk, for tables with a memory_budget_per_rank. Collective.

        It changes no row, so it may run any number of steps ahead, or never. See tf_fusedrec.data.lookahead.

        Args:
          inputs: Inputs of a call. They may hold a subset of the features.

        Raises:
          ValueError: As the call.
        """
        self.internals.prefetch(self.internals.flat_features(inputs, None, None))

    def synchronize(self) -> None:
        """Makes replicas of tables equal, if they train apart (Topology rule "weight_sync"). Collective.

        Between synchronisations each group sees its own replica. Checkpoints and exports synchronise by themselves.
        Call it before export_table or an evaluation if the number of steps is no multiple of sync_every.
        """
        for group in self.internals.groups:
            group.synchronize()

    def describe(self, all_ranks: bool = False) -> str:
        """The groups, tables and features as a text to print. Eager.

        A row's bytes include slots and counters, without the key. All rows of storage "mixed" count as float32. Rows on
        disk (memory_budget_per_rank) count, too.

        Args:
          all_ranks: True to count the rows of all ranks, each replica once. The call is collective then.
        """
        return describe.describe(self.name, self.internals, all_ranks=all_ranks)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters of each table on this rank, by table name. Eager, not collective.

        All tables: keys, the number of rows. Backend "native", summed over training lookups: hits (distinct ids with a
        row), inserts, evictions, refused, candidates (ids that wait for admission), left_out (rows that updates left
        unchanged, because their gradients were not finite). With host_rows also hot_hits (distinct ids that were
        hot_rows_per_rank), bytes_to_device and bytes_to_host (of rows that crossed the bus, with slots and headers).
        """
        return {name: counts for group in self.internals.groups for name, counts in group.table.statistics.items()}

    def count_params(self) -> int:
        """The number of weights in the rows of this rank, without slots. Lookups and evictions change it."""
        tables = [(group.config.tables[0].dim, group.table) for group in self.internals.all_groups]
        return sum(dim * table.size(name) for dim, table in tables for name in table.names)

    def export_table(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """ids <int64>[n], ascending, and rows [n, D] of one table on this rank. Eager, not collective."""
        tables = {name: group.table for group in self.internals.all_groups for name in group.table.names}
        if name not in tables:
            raise ValueError(f"{self.name!r} has no table {name!r}. Known tables: {sorted(tables)}.")
        return tables[name].export(name)

    def remove(self, table: str, ids: Any) -> int:
        """Removes the rows of these ids, with slots and counters, from all ranks and replicas. Eager and collective.

        Delta checkpoints and delta exports tell the removed ids. Earlier checkpoints and exports still hold their rows.
        An id that occurs again begins with its initial row. Rows that a schedule has looked up ahead cannot be trained
        afterwards: call it outside of fit.

        Args:
          table: Name of the table.
          ids: Integers of any shape. Ranks may name different ids; ids without a row have no effect.

        Returns:
          The number of removed rows on all ranks.

        Raises:
          ValueError: the layer has no such table of its own, or ids are not integers.
        """
        tables: dict[str, Any] = {name: group.table for group in self.internals.groups for name in group.table.names}
        if table not in tables:
            raise ValueError(f"{self.name!r} has no table {table!r} to remove rows from, only {sorted(tables)}.")
        values = np.asarray(ids)
        if values.size and values.dtype.kind not in "iu":
            raise ValueError(
                f"ids to remove from table {table!r} are {values.dtype}, and must be integers. Use ids as the "
                "model gets them, such as tf_fusedrec.hash_strings of a name."
            )
        values = np.unique(collectives.all_gather(values.astype(np.int64).ravel()))
        before = tables[table].size(table)
        tables[table].remove(table, values)
        return int(collectives.all_gather(np.array([before - tables[table].size(table)])).sum())

    def save_own_variables(self, store: Any) -> None:
        self._table_state.save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        self._table_state.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        tables = [table.to_dict() for table in self.internals.tables]
        features = [dataclasses.asdict(feature) for feature in self.internals.features.values()]
        options = dataclasses.asdict(self.internals.options)
        return {**super().get_config(), "tables": tables, "features": features, **options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbedding:
        """A layer of the same tables and features, with no rows. tf_fusedrec.checkpoint.load restores rows."""
        config = dict(config)
        config.pop("dtype", None)
        config["tables"] = [TableConfig.from_dict(table) for table in config["tables"]]
        config["features"] = [FeatureConfig(**feature) for feature in config["features"]]
        config["topology"] = Topology(**config["topology"])
        return cls(**config)


def embeddings_of(model: tf.Module) -> list[FusedEmbedding]:
    """The FusedEmbedding layers that a model has now, in an order that is the same on all ranks.

    Args:
      model: Keras model, or one FusedEmbedding. The search covers nested models, nested layers and their attributes,
        including lists, tuples and dicts.
    """
    return [module for module in keras_api.modules_of(model) if isinstance(module, FusedEmbedding)]


def check_names(model: tf.Module) -> None:
    """Raises ValueError if two FusedEmbedding layers of a model have one name."""
    names = [layer.name for layer in embeddings_of(model)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(two_of_one_name(name))


def tables_in(model: tf.Module) -> list[Table]:
    """The tables of each group of these layers, without those of other models."""
    return [group.table for embedding in embeddings_of(model) for group in embedding.internals.groups]
