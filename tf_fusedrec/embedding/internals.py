"""The state of a FusedEmbedding that other modules use, and CallHooks, which replace parts of its calls."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding.features import FlatFeature, flatten_inputs
from tf_fusedrec.embedding.group import LayerOptions, TableGroup, group_tables
from tf_fusedrec.embedding.step import Lookup, Step, TrainingCalls, lookups_of
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout

if TYPE_CHECKING:
    from tf_fusedrec.embedding.layer import FusedEmbedding

# The layer of each name in a graph. Names of layers are names of collectives.
_callers: weakref.WeakKeyDictionary[tf.Graph, dict[str, weakref.ref]] = weakref.WeakKeyDictionary()


class CallHooks:
    """The parts of a layer's call that `with layer.internals.using(hooks):` replaces by those of a subclass.

    A method that a subclass does not override is that of the hooks in force before, `self.before`.
    """

    before: CallHooks

    def call(self, layer: FusedEmbedding, inputs: Any, weights: Any, mask: Any, *, training: bool) -> dict[str, Any]:
        """The outputs of the call."""
        return self.before.call(layer, inputs, weights, mask, training=training)

    def rows(
        self, layer: FusedEmbedding, features: Mapping[str, FlatFeature], *, training: bool
    ) -> tuple[Step, Sequence[tf.Tensor]]:
        """The lookups of these features, each feature in one, and their rows <output dtype>[G, D]."""
        return self.before.rows(layer, features, training=training)

    def train(self, step: Step, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Trains the tables by the gradients of their rows in all calls of a step.

        Args:
          step: The lookups of the calls.
          gradients: <output dtype>[G, D] by position of the lookup.

        Returns:
          <float32>[], which is added to the anchor's gradient.
        """
        return self.before.train(step, gradients)

    def gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient <output dtype>[G, D] of a lookup's rows that reaches `train`."""
        return self.before.gradient(gradient)


class Internals:
    """The state of a FusedEmbedding that other modules of this package use. Keras and TensorFlow do not track it.

    Keras would track TFRA's variables as weights, and TensorFlow's checkpoint would hold rank 0's rows only.

    Attributes:
      tables, features, options: As the layer got them; features by name.
      all_groups: The groups of tables, in an order that is the same on all ranks.
      hooks: The hooks in force, see CallHooks.
      steps: The training step that is open in a graph.
    """

    def __init__(
        self, layer_name: str, tables: Sequence[TableConfig], features: Sequence[FeatureConfig], options: LayerOptions,
        hooks: CallHooks,
    ):  # fmt: skip
        self.tables, self.features, self.options = list(tables), {f.name: f for f in features}, options
        self.layout, self._layer_name = RankLayout(options.topology), layer_name
        with tf.init_scope():
            self.all_groups = [
                TableGroup(layer_name, config, options, self.layout) for config in group_tables(tables, features)
            ]
        self.hooks = hooks
        self.takes_tensor = False  # True for Embedding, whose calls have one feature without its name
        self.steps: weakref.WeakKeyDictionary[tf.Graph, TrainingCalls] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()

    @property
    def groups(self) -> list[TableGroup]:
        """The groups of this model's own tables."""
        return [group for group in self.all_groups if not group.config.external]

    @contextlib.contextmanager
    def using(self, hooks: CallHooks) -> Iterator[None]:
        """Calls inside use these hooks. Contexts may be nested."""
        hooks.before, self.hooks = self.hooks, hooks
        try:
            yield
        finally:
            self.hooks = hooks.before

    def check_deferrable(self, steps: int) -> None:
        """Raises ValueError unless the lookups of `steps` steps may precede the update of the first."""
        for group in self.groups:
            group.table.check_deferrable(steps)

    def by_feature(self, value: Any) -> Any:
        """Inputs, weights or a mask of a call, by feature."""
        named = value is None or isinstance(value, Mapping) or not self.takes_tensor
        return value if named else {next(iter(self.features)): value}

    def flat_features(self, inputs: Any, weights: Any, mask: Any) -> dict[str, FlatFeature]:
        """The inputs of a call, flattened by feature. Raises ValueError as the call."""
        inputs, weights, mask = map(self.by_feature, (inputs, weights, mask))
        tables = {feature.name: group.table for group in self.all_groups for feature in group.config.features}
        return flatten_inputs(self._layer_name, self.features, inputs, weights or {}, mask or {}, tables)

    def lookups_of(self, features: Mapping[str, FlatFeature], *, training: bool, micro_batch: int = 0) -> list[Lookup]:
        """The lookups of one call, in an order that is the same on all ranks.

        Args:
          features: The result of `flat_features`.
          training: True if the lookups train. Those of frozen and external tables never do.
          micro_batch: Number of the micro-batch. Those of one step share rows.
        """
        call = self._next_call()
        return [
            lookup
            for group, group_features in self._by_group(features)
            for lookup in lookups_of(group, group_features, call=call, training=training, micro_batch=micro_batch)
        ]

    def prefetch(self, features: Mapping[str, FlatFeature]) -> None:
        """As FusedEmbedding.prefetch."""
        call = self._next_call()
        for group, group_features in self._by_group(features):
            group.prefetch(group_features, call=call)

    def _by_group(self, features: Mapping[str, FlatFeature]) -> list[tuple[TableGroup, list[FlatFeature]]]:
        """The groups that have features among these, each with its features in its own order."""
        parts = [(group, [features[f.name] for f in group.config.features if f.name in features])
                 for group in self.all_groups]  # fmt: skip
        return [(group, group_features) for group, group_features in parts if group_features]

    def _next_call(self) -> int:
        """The number of a call in its graph. Eager calls run one after another and share the number 0."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        first = _callers.setdefault(graph, {}).setdefault(self._layer_name, weakref.ref(self))()
        if first not in (None, self) and collectives.size() > 1:
            raise ValueError(two_of_one_name(self._layer_name))
        number = self._calls.get(graph, 0)
        self._calls[graph] = number + 1
        return number


def two_of_one_name(name: str) -> str:
    return (
        f"Two FusedEmbeddings of one model are named {name!r}, but the name of a layer names its exchanges between "
        "ranks. Use another name=... for one of them, or no name=, which makes the names unique."
    )
