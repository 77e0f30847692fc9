"""Ranks whose data ends at different times, with and without a look-ahead: one job, many cases."""

import numpy as np

from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules.equal_steps import concatenated


def _data(batches, rank):
    """Returns `batches` of 4 samples of this rank; the last one has 3."""
    samples = max(4 * batches - 1, 0)
    return tf.data.Dataset.from_tensor_slices(clicks.batch(samples, seed=rank)).batch(4)


def _fitted(schedule, data, steps_per_execution=1, **arguments):
    import tf_fusedrec as fr

    embedding = clicks.make_embedding()
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
    model = clicks.make_model(embedding, schedule, optimizer, steps_per_execution=steps_per_execution)
    history = model.fit(data, verbose=0, **arguments).history
    return clicks.state(model, embedding), len(history["loss"]), int(model.optimizer.iterations)


class Calls(keras.callbacks.Callback):
    """Records the batches after which evaluate and predict call."""

    def __init__(self):
        super().__init__()
        self.tested, self.predicted = [], []

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append(batch)

    def on_predict_batch_end(self, batch, logs=None):
        self.predicted.append(batch)


def _cases():
    """Body: returns the result of each case, and of an equal number of batches on all ranks, with empty ones."""
    import tf_fusedrec as fr
    from tests.schedules.feed.ahead import RouteAhead
    from tf_fusedrec.schedules import FrozenWindow, Nested

    rank = fr.collectives.rank()
    mine = [3, 1][rank % 2]
    data, unknown = _data(mine, rank), _data(mine, rank).filter(lambda *_: True)
    empty = _data(1, rank).map(lambda *data: tf.nest.map_structure(lambda leaf: leaf[:0], data))
    padded = _fitted("sync", data.concatenate(empty.repeat(3 - mine)), epochs=2)
    alone = _fitted("sync", empty.repeat(3) if rank else data, epochs=2)
    found = {
        "known": (_fitted("sync", data, epochs=2), padded),
        "unknown, ahead": (_fitted(RouteAhead(), unknown, epochs=2), padded),
        "one of each": (_fitted("sync", unknown if rank else data, epochs=2), padded),
        "never any, ahead": (_fitted(RouteAhead(), data.take(0) if rank else data, epochs=2), alone),
        "two at once, ahead": (_fitted(RouteAhead(), data, 2, epochs=2), padded),
    }
    found["more micro-batches than samples"] = tuple(
        _fitted(schedule, one, epochs=2)
        for schedule, one in (
            (Nested(5), data),
            (FrozenWindow(5), data.concatenate(empty.repeat(3 - mine))),
        )
    )
    steps = [
        _fitted(schedule, data, at_once, epochs=2, steps_per_epoch=3)[2]
        for schedule, at_once in ((RouteAhead(), 1), ("sync", 2))
    ]
    refused = []
    x, y, _ = clicks.batch(4 + 40 * rank, seed=rank)
    for one, arguments in (
        (data, {"steps_per_epoch": 1 + rank}),
        (x, {"y": y}),
        (data, {"steps_per_execution": "auto"}),
    ):
        try:
            _fitted("sync", one, **arguments)
        except ValueError as error:
            refused.append(str(error))
    embedding = clicks.make_embedding()
    adam = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
    model = clicks.make_model(embedding, "sync", adam)
    two_at_once = clicks.make_model(embedding, "sync", steps_per_execution=2)
    uneven, called = [], []
    for of, one, arguments in (
        (model, data, {}),
        (model, unknown, {}),
        (two_at_once, data, {}),
        (two_at_once, unknown, {"steps": 6}),  # those behind the third one are not there
        (model, data.concatenate(empty.repeat(3 - mine)), {}),
    ):
        calls = Calls()
        x = one.map(lambda x, y, weight: x)
        losses = of.evaluate(one, verbose=0, callbacks=[calls], **arguments)
        uneven.append((losses, of.predict(x, verbose=0, callbacks=[calls], **arguments)))
        called.append((calls.tested, calls.predicted, int(of._test_counter), int(of._predict_counter)))
    validated = model.fit(data, epochs=2, validation_data=data, verbose=0).history["val_loss"]
    return found, steps, refused, called, uneven, validated


def test_a_rank_whose_data_ends_first_takes_part_with_nothing():
    results = run_ranks(_cases, 2)
    for found, steps, (different_steps, different_lengths, auto), called, *_ in results:
        assert "steps_per_epoch must be the same on all ranks, got [1, 2]" in different_steps
        assert "give a tf.data.Dataset on every rank" in different_lengths
        assert "steps_per_execution 'auto' is chosen by every rank for itself" in auto
        # An epoch has three batches. Without data for a second epoch, training ends, as under Keras.
        assert steps == [3, 3]
        for case, ((state, *counts), (wanted, *wanted_counts)) in found.items():
            assert counts == wanted_counts == [2, 6], case
            for what in wanted:
                np.testing.assert_array_equal(state[what], wanted[what], err_msg=f"{case}: {what}")
        each, two, more = [0, 1, 2], [1, 2], [1, 3]
        assert called == [(of, of, 3, 3) for of in (each, each, two, more, each)]
    for rank, (*_, uneven, validated) in enumerate(results):
        # Evaluation and predictions of 3 batches here and 1 there equal ones where the other rank has empty batches.
        *found, (wanted, predictions) = uneven
        assert len(predictions) == 4 * [3, 1][rank] - 1 and len(validated) == 2
        for losses, predicted in found:
            np.testing.assert_allclose(losses, wanted, rtol=1e-6)  # sums over batches of other sizes
            np.testing.assert_allclose(predicted, predictions, rtol=1e-6)


def test_predictions_of_several_steps_are_put_together_as_keras_does():
    ragged = [tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[]], tf.int32)]
    parts = [{"dense": tf.fill([i, 2], i), "ragged": ragged[i - 1], "mean": tf.constant(i)} for i in (1, 2)]
    whole = concatenated(parts)
    np.testing.assert_array_equal(whole["dense"], [[1, 1], [2, 2], [2, 2]])
    np.testing.assert_array_equal(whole["mean"], [1, 2])
    assert whole["ragged"].to_list() == [[1], [2, 3], []]
    sparse = concatenated([tf.sparse.from_dense([[0, 1]]), tf.sparse.from_dense([[2, 0]])])
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), [[0, 1], [2, 0]])
