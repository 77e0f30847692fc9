"""Micro-batches against frozen tables: exchanges of one run under the dense compute of another (NestPipe, section V).

ids, lookup       all                      ids in one all-to-all, then one lookup of each table
rows                  0   1   2   3        each when the rows before have arrived; a row with its first micro-batch
dense compute             0   1   2   3    each when the compute before is done
gradients                     0   1   2   3    each when its compute is done; a row's with its last micro-batch
update                            0   1   2 3  of a row when all ranks have sent its gradients; dense weights last

Exchanges run in the order of need, and three things fix it:

- Rows of a micro-batch leave when the rows before have arrived. Horovod does not keep the order of exchanges that wait
  together: one cycle begins with the exchanges in its response cache, least recently used first. One cycle of other
  exchanges would put micro-batch 0 after the others, in that step and in all later ones.
- Dense gradients leave when the last backward pass has made them, those of the last layers first. They travel under the
  rest of it, before the last gradients of rows exist.
- Lookups are not ordered by micro-batch. A table must see the ids of the whole batch before it evicts, admits or
  counts. So one op looks all of them up. Compute 0 waits for this op and its own rows, and for no other rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.data.batches import cut, known_num_samples, num_samples
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.planned_calls import RunningStep, plan_step, running, running_step
from tf_fusedrec.schedules.uneven_batches import BatchWeight, Guard, MicroBatch, mean_loss, working_on


def train_step(model: Any, data: Any, micro_batches: int) -> dict[str, tf.Tensor]:
    """One training step of one batch in M micro-batches, on frozen tables. Traced, collective.

    Raises:
      ValueError: see FrozenWindow.
    """
    for part in tf.nest.flatten(getattr(model, "loss", None)):
        if getattr(part, "reduction", None) == "sum":
            raise ValueError(
                f"loss {part.name!r} has the reduction 'sum', but losses of micro-batches are averaged over samples. "
                "Use the reduction 'sum_over_batch_size'."
            )
    pieces = cut(data, micro_batches)
    # `cut` refuses a known size below M. Ranks may know different sizes, and their all-reduces need equal names.
    may_be_empty = known_num_samples(data) is None or collectives.size() > 1
    weights = model.loss_weights(pieces)
    batch = BatchWeight(tf.reduce_sum(weights))
    shares = tf.math.divide_no_nan(weights, batch.weight)
    of_pieces = zip(tf.unstack(shares, len(pieces)), tf.unstack(weights, len(pieces)))
    parts = [MicroBatch(i, share, weight, batch) for i, (share, weight) in enumerate(of_pieces)]
    run = running_step(model)
    if run is not None:  # Nested has looked up the batch in the step before
        return _train(model, run, pieces, parts, may_be_empty)
    step = plan_step(model, pieces).send_ids().look_up()
    with running(model, step, step.return_rows()) as run:
        return _train(model, run, pieces, parts, may_be_empty)


def _train(
    model: Any, run: RunningStep, pieces: Sequence[Any], parts: Sequence[MicroBatch], may_be_empty: bool
) -> dict[str, tf.Tensor]:
    """Computes the micro-batches one after another on rows that are on their way, and updates once."""
    row_gradients = run.keep_gradients()
    dense: list[list[Any]] = []
    losses, logs = [], {}
    for piece, part in zip(pieces, parts):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
        first = len(row_gradients)
        with contextlib.ExitStack() as around:
            around.enter_context(working_on(model, part))
            guard = around.enter_context(Guard(model, piece)) if may_be_empty else None
            with tf.GradientTape() as tape:
                y_pred = keras_api.call_model(model, x)
                loss = model.compute_loss(x, y, y_pred, sample_weight)
                if loss is None:
                    raise ValueError(f"{model.name!r} has no loss to train with. Use compile(loss=...).")
                keras_api.track_loss(model, mean_loss(model, loss), functools.partial(num_samples, piece))
                loss = loss * tf.cast(part.share, loss.dtype)
            gradients = tape.gradient(loss, model.trainable_variables)
            if guard is not None:
                gradients = [guard.gradient(*pair) for pair in zip(gradients, model.trainable_variables)]
            dense.append(gradients)
            logs = model.compute_metrics(x, y, y_pred, sample_weight)
        logs = logs if guard is None else guard.logs(logs)
        losses.append(loss)
        # In eager mode ops run in program order, and the group is None.
        trained = tf.nest.flatten([gradient for gradient in gradients if gradient is not None], expand_composites=True)
        positions = list(row_gradients)[first:]
        run.gate = tf.group(loss, *trained, *(row_gradients[i] for i in positions))
    received = run.step.send_gradients(row_gradients)
    run.step.update(received)
    sums = [_sum(list(of_weight)) for of_weight in zip(*dense)]
    keras_api.apply_gradients(model.optimizer, tf.add_n(losses), sums, model.trainable_variables)
    return logs


def _sum(parts: list[Any]) -> Any:
    """The sum of one weight's gradients, in the order of micro-batches. Slices of an embedding are concatenated."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        values, indices = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    total = tf.convert_to_tensor(parts[0])
    for part in parts[1:]:
        total += tf.convert_to_tensor(part)
    return total
