"""Keras metrics that are correct on any number of ranks: their states are summed over ranks before the result.

The mean over ranks of an AUC, or of any ratio, differs from its value on all data. `summed_over_ranks` sums the states
of all ranks first. PipelinedModel does so for its metrics at the end of every epoch and evaluation. exact.py has exact
offline forms, which hold all predictions. The metrics here hold a few numbers each. An undefined result is nan.

All metrics stand in compile(metrics=...) and compile(weighted_metrics=...). There, the metrics of ranks take lists of
candidates: labels and scores [B, C] of B users or queries. GAUC takes such lists, or the name of an input.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.metrics.exact import checked_k

AUC_BINS = 1 << 14
_LEAST_PROBABILITY = 1e-7
_LARGEST_LOGIT = 16.0  # Probabilities above 1 - 1e-7 fall into the last bin.
_inputs: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("inputs of the batch", default=None)


@contextlib.contextmanager
def of_batch(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Metrics that are updated inside find the inputs of their batch by name."""
    token = _inputs.set(inputs)
    try:
        yield
    finally:
        _inputs.reset(token)


class SummedMetric(keras.metrics.Metric, abc.ABC):
    """A metric with states that may be added over batches and over ranks.

    Args:
      name: Name of the metric.
      **states: Shape of each state by name. States are float64, which counts exactly up to 2**53.

    Examples:
      >>> class ClickRate(fr.metrics.SummedMetric):
      ...     def update_state(self, y_true, y_pred, sample_weight=None):
      ...         self.add(tf.reduce_sum(y_true), tf.size(y_true))
      ...     def value_of(self, clicks, targets):
      ...         return clicks / targets
      >>> rate = ClickRate("click_rate", clicks=(), targets=())
      >>> rate.update_state(tf.constant([0.0, 1.0, 1.0]), None)
      >>> round(float(rate.result()), 2)
      0.67
    """

    def __init__(self, name: str, **states: tuple[int, ...]):
        super().__init__(name=name, dtype="float64")
        self._states = [
            self.add_weight(name=state, shape=shape, dtype="float64", initializer="zeros")
            for state, shape in states.items()
        ]

    @abc.abstractmethod
    def value_of(self, *states: tf.Tensor) -> tf.Tensor:
        """Computes the metric <float64>[] from the states, in the order of __init__."""

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}

    def result(self) -> tf.Tensor:
        """Returns the metric of this rank's data."""
        return self.value_of(*map(tf.convert_to_tensor, self._states))

    def reset_state(self) -> None:
        for state in self._states:
            state.assign(tf.zeros_like(state))

    def across_ranks(self) -> float:
        """Returns the metric of all ranks' data. Collective, with the metrics in the same order. Eager."""
        return self.value_of_states(self.summed_states())

    def summed_states(self) -> np.ndarray:
        """Returns the concatenated states <float64>[n], summed over ranks. Such sums may be added again. Collective."""
        flat = np.concatenate([np.ravel(state.numpy()) for state in self._states])
        return collectives.all_reduce_sum(tf.constant(flat), name="fusedrec.metric").numpy()

    def value_of_states(self, flat: np.ndarray) -> float:
        """Returns the metric of concatenated states <float64>[n], see `summed_states`."""
        parts = np.split(flat, np.cumsum([state.shape.num_elements() for state in self._states])[:-1])
        return float(self.value_of(*(tf.reshape(part, state.shape) for part, state in zip(parts, self._states))))

    def add(self, *values: tf.Tensor) -> None:
        """Adds to the states, in the order of __init__. For update_state of a subclass."""
        for state, value in zip(self._states, values):
            keras_api.tf_variable(state).assign_add(tf.cast(value, tf.float64))  # Keras 3's own makes three ops


def check_summable(metrics: Iterable[keras.metrics.Metric]) -> None:
    """Raises ValueError for a metric that says that its states may not be added, so neither over ranks."""
    for metric in metrics:
        reason = keras_api.why_not_summed(metric)
        if reason is not None:
            raise ValueError(
                f"metric {metric.name!r} of class {type(metric).__name__} has {reason}, but its states "
                f"are summed over {collectives.size()} ranks. Use a metric with states that may be added, such as a "
                "subclass of tf_fusedrec.metrics.SummedMetric."
            )


@contextlib.contextmanager
def summed_over_ranks(metrics: Iterable[keras.metrics.Metric]) -> Iterator[None]:
    """Sums the state of each metric over all ranks inside the context and restores it on exit. Collective, eager.

    Keras' own metrics have states that may be added, so the sum is exact for them.

    Args:
      metrics: Keras metrics of any class, the same on all ranks and in the same order.

    Raises:
      ValueError: check_summable refuses a metric.
    """
    metrics = list(metrics)
    check_summable(metrics)
    variables = [variable for metric in metrics for variable in metric.variables]
    local_states = [variable.numpy() for variable in variables]
    flat = np.concatenate([np.zeros(1), *(np.ravel(state).astype(np.float64) for state in local_states)])
    total = collectives.all_reduce_sum(tf.constant(flat), name="fusedrec.metrics").numpy()[1:]
    begins = np.cumsum([0, *(state.size for state in local_states)])
    for variable, state, begin in zip(variables, local_states, begins):
        variable.assign(np.reshape(total[begin : begin + state.size], state.shape).astype(state.dtype))
    try:
        yield
    finally:
        for variable, state in zip(variables, local_states):
            variable.assign(state)


class _OfLogits(SummedMetric):
    """A metric of log odds, or of the probabilities from which it computes them."""

    def __init__(self, name: str, from_logits: bool, **states: tuple[int, ...]):
        super().__init__(name, **states)
        self._from_logits = from_logits

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "from_logits": self._from_logits}

    def _flat(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Labels, logits and weights <float64>[n]."""
        labels, logits, weights = _flat(y_true, y_pred, sample_weight)
        if not self._from_logits:
            share = tf.clip_by_value(logits, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
            logits = tf.math.log(share) - tf.math.log1p(-share)
        return labels, logits, weights


@keras.saving.register_keras_serializable("tf_fusedrec")
class AUC(_OfLogits):
    """Area under the ROC curve, from counts of logits in AUC_BINS bins of width 1/512.

    Positives and negatives of one bin count as ties. The error is at most half the share of pairs that share a bin.

    Args:
      name: Name of the metric.
      from_logits: True for predictions that are log odds, False for probabilities, such as those of a sigmoid.

    update_state: labels <any>[n], 0 or 1; predictions <float>[n]; sample_weight None or <float>[n].

    Examples:
      >>> metrics = [fr.metrics.AUC(), fr.metrics.GAUC(), fr.metrics.NormalizedEntropy(), fr.metrics.Calibration(),
      ...            fr.metrics.HitRate(2), fr.metrics.NDCG(2), fr.metrics.MRR()]
      >>> for metric in metrics:  # two users, three candidates each
      ...     metric.update_state([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[-1.0, 2.0, 0.5], [0.1, 0.3, -2.0]])
      >>> [round(float(metric.result()), 2) for metric in metrics]
      [0.75, 0.75, 0.8, 1.5, 1.0, 0.82, 0.75]
    """

    def __init__(self, name: str = "auc", from_logits: bool = True):
        super().__init__(name, from_logits, negatives=(AUC_BINS,), positives=(AUC_BINS,))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels, logits, weights = self._flat(y_true, y_pred, sample_weight)
        scaled = (tf.clip_by_value(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT) / _LARGEST_LOGIT + 1) * (AUC_BINS / 2)
        bins = tf.minimum(tf.cast(scaled, tf.int32), AUC_BINS - 1)
        counts = [tf.math.unsorted_segment_sum(weights * member, bins, AUC_BINS) for member in (1 - labels, labels)]
        self.add(*counts)

    def value_of(self, negatives: tf.Tensor, positives: tf.Tensor) -> tf.Tensor:
        below = tf.cumsum(negatives, exclusive=True)
        pairs = tf.reduce_sum(negatives) * tf.reduce_sum(positives)
        return tf.reduce_sum(positives * (below + negatives / 2)) / pairs


@keras.saving.register_keras_serializable("tf_fusedrec")
class GAUC(SummedMetric):
    """Mean AUC of the groups (users) that have both classes. The result is exact, and ties count one half.

    A group must be whole in one batch. A group in several batches counts several times. metrics.exact.gauc documents
    the definition.

    Args:
      weight: "none" counts each group once, "impressions" weighs it by its number of predictions.
      name: Name of the metric.
      group: Name of the input <int>[n] with the group of each prediction, such as "user_id", in any order. A
        PipelinedModel finds it in a batch whose x is a dict, or in the inputs of a functional model. None: labels and
        logits are [G, n] or ragged [G, (n)], and each row is a group, or update_state gets groups.

    update_state: labels <any>[n], 0 or 1; logits <float>[n]; groups None or <int>[n]. A prediction of sample_weight 0
      does not count. Other weights, [G] or one per prediction, weigh the group by their mean ("none") or their sum
      ("impressions").

    Examples:
      >>> model.compile(model.optimizer, "mse", metrics=[fr.metrics.GAUC(group="item")])
      >>> labels = np.float32(np.arange(32) < 16)
      >>> round(model.evaluate(x, labels, verbose=0, return_dict=True)["gauc"], 2)  # a group has equal scores
      0.5
    """

    def __init__(self, weight: str = "none", name: str = "gauc", group: str | None = None):
        if weight not in ("none", "impressions"):
            raise ValueError(f"weight must be 'none' or 'impressions', got {weight!r}.")
        if not isinstance(group, (str, type(None))):
            raise ValueError(f"group must be the name of an input or None, got {group!r}.")
        super().__init__(name, area=(), weight=())
        self._by_impressions, self._group = weight == "impressions", group

    def get_config(self) -> dict[str, Any]:
        weight = "impressions" if self._by_impressions else "none"
        return {**super().get_config(), "weight": weight, "group": self._group}

    def update_state(self, y_true: Any, y_pred: Any, groups: Any = None, sample_weight: Any = None) -> None:
        if groups is None:
            groups = self._rows(y_pred) if self._group is None else self._input(self._group)
        labels, scores, weights = _flat(y_true, y_pred, sample_weight)
        groups = tf.reshape(getattr(groups, "flat_values", groups), [-1])
        words = f"metric {self.name!r} must get one group for each prediction. Use an input of one group per row."
        with tf.control_dependencies([tf.debugging.assert_equal(tf.size(groups), tf.size(scores), message=words)]):
            groups = tf.identity(groups)
        if sample_weight is not None:
            counted = tf.where(weights > 0)[:, 0]
            labels, scores, weights, groups = (tf.gather(x, counted) for x in (labels, scores, weights, groups))
        order = tf.argsort(scores, stable=True)
        order = tf.gather(order, tf.argsort(tf.gather(groups, order), stable=True))
        labels, scores, weights, groups = (tf.gather(values, order) for values in (labels, scores, weights, groups))
        group = _runs(groups[1:] != groups[:-1], groups)
        tie = _runs((groups[1:] != groups[:-1]) | (scores[1:] != scores[:-1]), groups)
        position = tf.range(1, tf.size(groups) + 1)
        # Equal scores share the middle of their ranks.
        middle = (tf.math.segment_min(position, tie) + tf.math.segment_max(position, tie)) / 2
        before_group = tf.gather(tf.math.segment_min(position, group) - 1, group)
        rank = tf.gather(middle, tie) - tf.cast(before_group, tf.float64)
        size = tf.math.segment_sum(tf.ones_like(labels), group)
        positives = tf.math.segment_sum(labels, group)
        pairs = positives * (size - positives)
        area = tf.math.segment_sum(labels * rank, group) - positives * (positives + 1) / 2
        weight = tf.math.segment_sum(weights, group)
        weight = tf.where(pairs > 0, weight if self._by_impressions else weight / size, 0)
        self.add(tf.reduce_sum(weight * tf.math.divide_no_nan(area, pairs)), tf.reduce_sum(weight))

    def _input(self, name: str) -> Any:
        """The input of this name in the present batch."""
        inputs = _inputs.get()
        if inputs is None or name not in inputs:
            got = "no inputs" if inputs is None else f"the inputs {sorted(inputs)}"
            raise ValueError(
                f"metric {self.name!r} must find the groups in the input {name!r}, got {got}. Use a PipelinedModel "
                "and an input of this name, or update_state(labels, logits, groups) in a train_step."
            )
        groups = inputs[name] if isinstance(inputs[name], tf.RaggedTensor) else tf.convert_to_tensor(inputs[name])
        if not groups.dtype.is_integer:
            raise ValueError(
                f"metric {self.name!r} must get integers as groups, got {groups.dtype.name} in the input {name!r}. "
                "Use fr.hash_strings for strings."
            )
        return groups

    def _rows(self, y_pred: Any) -> tf.Tensor:
        """The row <int64>[n] of each prediction [G, n/G] or [G, (n)], as its group."""
        if isinstance(y_pred, tf.RaggedTensor):
            return tf.cast(y_pred.value_rowids(), tf.int64)
        y_pred = tf.convert_to_tensor(y_pred)
        if y_pred.shape.rank != 2 or y_pred.shape[1] == 1:
            raise ValueError(
                f"metric {self.name!r} got predictions {y_pred.shape} without groups, want a row for each "
                "group, [G, n]. Use such an output, or GAUC(group=...) with the name of the input that has the groups."
            )
        shape = tf.shape(y_pred, tf.int64)
        return tf.repeat(tf.range(shape[0]), shape[1])

    def value_of(self, area: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return area / weight


@keras.saving.register_keras_serializable("tf_fusedrec")
class NormalizedEntropy(_OfLogits):
    """Normalized cross entropy, see metrics.normalized_entropy. Arguments: see AUC."""

    def __init__(self, name: str = "ne", from_logits: bool = True):
        super().__init__(name, from_logits, entropy=(), positives=(), weight=())

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels, logits, weights = self._flat(y_true, y_pred, sample_weight)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        self.add(*(tf.reduce_sum(weights * values) for values in (entropy, labels, tf.ones_like(labels))))

    def value_of(self, entropy: tf.Tensor, positives: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        rate = positives / weight
        rate_entropy = -(tf.math.xlogy(rate, rate) + tf.math.xlogy(1 - rate, 1 - rate))
        return tf.where(rate_entropy > 0, entropy / weight / rate_entropy, np.nan)


@keras.saving.register_keras_serializable("tf_fusedrec")
class Calibration(_OfLogits):
    """Sum of predicted probabilities divided by the number of positives: 1 is calibrated. Arguments: see AUC."""

    def __init__(self, name: str = "calibration", from_logits: bool = True):
        super().__init__(name, from_logits, predicted=(), positives=())

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels, logits, weights = self._flat(y_true, y_pred, sample_weight)
        self.add(tf.reduce_sum(weights * tf.sigmoid(logits)), tf.reduce_sum(weights * labels))

    def value_of(self, predicted: tf.Tensor, positives: tf.Tensor) -> tf.Tensor:
        return tf.where(positives > 0, predicted / positives, np.nan)


class _MeanOfRanks(SummedMetric):
    """Mean over users of a gain that depends on the target's rank.

    update_state: ranks <int>[B], counted from 1, of metrics.rank_of_target (whole catalogue without seen items). Or
      scores <float>[B, C] as y_pred, and as y_true the column of each target, <int>[B] or [B, 1], or <number>[B, C]
      with 1 at the target, 0 elsewhere; a row of zeros does not count. Candidates with equal scores rank by column.
      sample_weight: None or <float>[B].
    """

    def __init__(self, name: str):
        super().__init__(name, gain=(), users=())

    @abc.abstractmethod
    def gain(self, ranks: tf.Tensor) -> tf.Tensor:
        """Returns the gains <float64>[B] of ranks <float64>[B]."""

    def update_state(self, y_true: Any, y_pred: Any = None, sample_weight: Any = None) -> None:
        ranks = tf.convert_to_tensor(y_true)
        known = tf.ones_like(ranks, tf.float64)
        if y_pred is not None:
            ranks, known = self._ranks(ranks, tf.convert_to_tensor(y_pred))
        ranks, known, weights = _flat(ranks, known, sample_weight)
        weights *= known
        self.add(tf.reduce_sum(weights * self.gain(ranks)), tf.reduce_sum(weights))

    def _ranks(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Ranks <int32>[B] among C candidates, C + 1 for a score of NaN, and whether there is a target <bool>[B]."""
        if y_pred.shape.rank != 2 or y_pred.shape[1] == 1 or y_true.shape.rank not in (1, 2):
            raise ValueError(
                f"metric {self.name!r} got predictions {y_pred.shape} and targets {y_true.shape}, want the scores of "
                "all candidates [B, C] and the column of each target [B]. Use an output with these scores, or "
                "update_state(ranks) with metrics.rank_of_target."
            )
        known = tf.ones_like(y_pred[:, 0], tf.bool)
        if y_true.shape.rank == 2 and y_true.shape[1] != 1:
            relevance = tf.cast(y_true, tf.float32)
            y_true, known = tf.argmax(relevance, 1), tf.reduce_any(relevance > 0, 1)
        target = tf.reshape(tf.cast(y_true, tf.int32), [-1, 1])
        score = tf.gather(y_pred, target, batch_dims=1)
        column = tf.range(tf.shape(y_pred)[1])
        # A score of NaN is neither above nor below others, so those not below are counted.
        is_below = (y_pred < score) | ((y_pred == score) & (column >= target))
        return 1 + tf.reduce_sum(tf.cast(~is_below, tf.int32), 1), known

    def value_of(self, gain: tf.Tensor, users: tf.Tensor) -> tf.Tensor:
        return gain / users


class _MeanOfFirstRanks(_MeanOfRanks):
    """Ranks above K have no gain."""

    _prefix: str

    def __init__(self, k: int, name: str | None = None):
        super().__init__(name or f"{self._prefix}@{checked_k(k)}")
        self._k = k

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "k": self._k}


@keras.saving.register_keras_serializable("tf_fusedrec")
class HitRate(_MeanOfFirstRanks):
    """HR@K; see metrics.exact.hit_rate."""

    _prefix = "hr"

    def gain(self, ranks: tf.Tensor) -> tf.Tensor:
        return tf.cast(ranks <= self._k, tf.float64)


@keras.saving.register_keras_serializable("tf_fusedrec")
class NDCG(_MeanOfFirstRanks):
    """NDCG@K, one relevant item; see metrics.exact.ndcg."""

    _prefix = "ndcg"

    def gain(self, ranks: tf.Tensor) -> tf.Tensor:
        return tf.where(ranks <= self._k, np.log(2.0) / tf.math.log(ranks + 1), 0)


@keras.saving.register_keras_serializable("tf_fusedrec")
class MRR(_MeanOfRanks):
    """Mean reciprocal rank; see metrics.exact.mrr."""

    def __init__(self, name: str = "mrr"):
        super().__init__(name)

    def gain(self, ranks: tf.Tensor) -> tf.Tensor:
        return 1 / ranks


def _flat(labels: Any, logits: Any, weights: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Flattens all three to <float64>[n]. Weights of 1 take the place of None; weights [B] cover rows [B, ...]."""
    if isinstance(labels, tf.RaggedTensor):
        if isinstance(weights, tf.RaggedTensor):
            weights = weights.flat_values
        elif weights is not None:
            weights = tf.gather(tf.reshape(weights, [-1]), labels.value_rowids())
        labels, logits = labels.flat_values, logits.flat_values
    labels, logits = (tf.cast(values, tf.float64) for values in (labels, logits))
    weights = tf.ones_like(labels) if weights is None else tf.cast(weights, tf.float64)
    inner = labels.shape.rank - weights.shape.rank
    if inner > 0:
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), tf.ones([inner], tf.int32)], 0))
    if inner >= 0:
        weights = tf.broadcast_to(weights, tf.shape(labels))
    return tf.reshape(labels, [-1]), tf.reshape(logits, [-1]), tf.reshape(weights, [-1])


def _runs(begins: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns the run index <int32>[n] of each value; begins <bool>[n-1] marks which later values begin a run."""
    return tf.cumsum(tf.concat([tf.zeros_like(values[:1], tf.int32), tf.cast(begins, tf.int32)], axis=0))
