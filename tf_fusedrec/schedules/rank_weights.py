"""The loss of `compile` as a mean over the samples of all ranks, however uneven their batches (MTGRBoost, section 5.1).

Keras computes the mean over the samples of one rank, and gradients are averaged over ranks. So rank r multiplies its
mean by R n_r / N, for n_r samples of N on R ranks. The average of these products is the mean over all N samples. The
sum N comes from the data alone, so its all-reduce runs beside the lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import embeddings_of
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.empty_batches import guarded
from tf_fusedrec.schedules.micro_batch import WHOLE, BatchWeight, num_samples

_SUMS = (keras.losses.Reduction.SUM, keras.losses.Reduction.NONE)


class MeanOverSamples:
    """Mixin of keras.Model: the loss of `compile`, and of add_loss, is the mean over the samples of all ranks.

    Losses with the reduction "sum" or "none" are sums over samples and stay as they are. Every call of compute_loss in
    training is collective. A subclass that overrides compute_loss without a call of super() decides by itself.
    """

    loss: Any
    name: str
    micro_batch = WHOLE

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for step in ("train_step", "test_step", "predict_step"):
            if step in vars(cls):  # of the package or of a user
                setattr(cls, step, guarded(vars(cls)[step]))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)  # type: ignore[misc]
        if collectives.size() == 1 or loss is None or self.__dict__.get("_evaluates") or are_sums(self):
            return loss
        batch = self.micro_batch.batch
        if batch is None:
            data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
            batch = BatchWeight(tf.reduce_sum(self.loss_weights([data])))
        if batch.factor is None:  # the first micro-batch
            batch.factor = _factor(self, batch.weight)
        return loss * tf.cast(batch.factor, loss.dtype)

    @guarded
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)  # type: ignore[misc]

    @guarded
    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)  # type: ignore[misc]

    @guarded
    def test_step(self, data: Any) -> Any:
        self.__dict__["_evaluates"] = True  # metrics weigh batches by themselves
        try:
            return super().test_step(data)  # type: ignore[misc]
        finally:
            del self.__dict__["_evaluates"]

    def loss_weights(self, pieces: Sequence[Any]) -> tf.Tensor:
        """The weight of each micro-batch in the loss: its number of samples. Override it for another weight.

        Loss of all ranks = sum of weight * loss of micro-batch / sum of weights, over the micro-batches of all ranks.
        Ones, for a whole batch, weigh ranks equally. A step calls it before anything computes. `micro_batch.weight` has
        the result, for a compute_loss that divides by it.

        Args:
          pieces: M micro-batches, or the whole batch alone, each as `data` of train_step.

        Returns:
          <float32>[M], >= 0.
        """
        return tf.cast(tf.stack([num_samples(piece) for piece in pieces]), tf.float32)


def weigh_by_samples(model: keras.Model) -> keras.Model:
    """Makes the loss of a Keras model the mean over the samples of all ranks. A PipelinedModel does so by itself.

    Every rank must make equally many training steps. A rank without samples takes part with an empty batch.

    Args:
      model: A keras.Model of any kind, compiled or not, whose optimizer averages gradients over ranks. It changes.

    Returns:
      The model. Its class gets the mixin MeanOverSamples. A saved and loaded model needs a new call.

    Raises:
      ValueError: some of the losses are sums over samples and others means.
    """
    are_sums(model)
    if not isinstance(model, MeanOverSamples):
        kind = type(model)
        # The name and module stay, so that Keras saves and loads the model as one of its own class.
        weighted = type(kind.__name__, (MeanOverSamples, kind), {"__module__": kind.__module__})
        object.__setattr__(model, "__class__", weighted)
        model.train_function = None  # a function that is traced already has the old loss
    return model


def _factor(model: Any, weight: tf.Tensor) -> tf.Tensor:
    """R * weight / (weight of all R ranks of the loss), <float32>[]; 1 where no rank has any."""
    sets = {embedding.layout.loss_ranks for embedding in embeddings_of(model)} or {collectives.world()}
    if len(sets) > 1:
        raise ValueError(
            f"FusedEmbeddings of {model.name!r} have topologies whose losses cover different ranks, "
            f"{[ranks.members for ranks in sets]}. Remedy: the same topology for all layers of a model."
        )
    (ranks,) = sets
    name = f"{model.name}.samples"
    if not tf.executing_eagerly():  # calls of one step must differ; eager calls run one after another
        name = tf.compat.v1.get_default_graph().unique_name(name)
    total = collectives.all_reduce_sum(weight, name=name, ranks=ranks)
    return tf.where(total > 0, ranks.size * tf.math.divide_no_nan(weight, total), 1.0)


def are_sums(model: Any) -> bool:
    """Returns whether the losses of `compile` are sums over samples. Raises ValueError: some are, others are means."""
    losses = [one for one in tf.nest.flatten(getattr(model, "loss", None)) if one is not None]
    sums = [one for one in losses if getattr(one, "reduction", None) in _SUMS]
    if sums and len(sums) < len(losses) and collectives.size() > 1:
        raise ValueError(
            f"Losses of {model.name!r} are sums over samples, {[one.name for one in sums]}, and means, which "
            "ranks weigh differently. Remedy: the reduction 'sum_over_batch_size' for all of them."
        )
    return bool(sums)
