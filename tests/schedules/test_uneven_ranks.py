"""Ranks whose data ends at different times, with and without a look-ahead: one job, many cases."""

import functools

import numpy as np
import pytest

from tests.schedules import clicks
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules.feed import concatenated

pytestmark = pytest.mark.legacy


def _data(batches, rank):
    """Returns `batches` of 4 samples of this rank; the last one has 3."""
    samples = max(4 * batches - 1, 0)
    return tf.data.Dataset.from_tensor_slices(clicks.batch(samples, seed=rank)).batch(4)


EVERY = ("item", "past", "user")


@functools.cache
def _made(schedule, steps_per_execution, features):
    """Returns a model with its embedding and its reset. Cases share them, because every trace costs more than a fit."""
    import tf_fusedrec as fr

    embedding = clicks.make_embedding()
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01))
    model = clicks.make_model(embedding, schedule, optimizer, features, steps_per_execution=steps_per_execution)
    return model, embedding, clicks.reset_function(model, embedding)


def _fitted(schedule, data, steps_per_execution=1, features=EVERY, **arguments):
    model, embedding, reset = _made(schedule, steps_per_execution, features)
    reset()
    history = model.fit(data, verbose=0, **arguments).history
    return clicks.state(model, embedding), len(history["loss"]), int(model.optimizer.iterations)


class Batches(keras.utils.Sequence):
    """The batches of _data, by number."""

    def __init__(self, batches, rank):
        self._batches = list(_data(batches, rank))

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, i):
        return self._batches[i]


def _arrays(rank, mine):
    """Returns the cases of arrays, which Keras repeats inside one data set for all epochs."""
    from tests.schedules.ahead import RouteAhead

    x, y, _ = clicks.batch([15, 4][rank % 2], seed=5 + rank)  # a quarter is for validation: 11 and 3 to train with
    x = {name: x[name].numpy() for name in ("item", "user")}
    every = {"features": ("item", "user"), "epochs": 2}
    batches = tf.data.Dataset.from_tensor_slices((x, y.numpy()))
    trained, validated = batches.take(4 * mine - 1).batch(4), batches.skip(4 * mine - 1).batch(4)
    nothing = trained.map(lambda *data: tf.nest.map_structure(lambda leaf: leaf[:0], data)).take(1)
    padded = _fitted("sync", trained.concatenate(nothing.repeat(3 - mine)), validation_data=validated, **every)
    split = {"y": y.numpy(), "validation_split": 0.25, "batch_size": 4, "shuffle": False, **every}
    lists = {"features": ("item",), "batch_size": 4, "shuffle": False, "epochs": 2}
    return {
        "arrays with a split": (_fitted("sync", x, **split), padded),
        "arrays with a split, ahead, two at once": (_fitted(RouteAhead(), x, 2, **split), padded),
        "lists": tuple(
            _fitted("sync", of(x["item"][: 4 * mine - 1]), y=of(y.numpy()[: 4 * mine - 1]), **lists)
            for of in (lambda part: part.tolist(), np.asarray)
        ),
    }


def _cases():
    """Body: returns the result of each case, and of an equal number of batches on all ranks, with empty ones."""
    import tf_fusedrec as fr
    from tests.schedules.ahead import RouteAhead
    from tf_fusedrec.schedules import FrozenWindow, Nested, PipelinedModel

    rank = fr.rank()
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
    single = data.map(lambda *data: tf.nest.map_structure(lambda leaf: leaf[:1], data))
    found["more micro-batches than samples"] = (
        _fitted(Nested(2), single, epochs=2),
        _fitted(FrozenWindow(2), single.concatenate(empty.repeat(3 - mine)), epochs=2),
    )
    steps = [
        _fitted(schedule, data, at_once, epochs=2, steps_per_epoch=3)[2]
        for schedule, at_once in ((RouteAhead(), 1), ("sync", 2))
    ]
    refused = []
    for one, arguments in (
        (data, {"steps_per_epoch": 1 + rank}),
        (data, {"steps_per_execution": "auto"}),
        (data if rank else Batches(mine, rank), {}),
        (Batches(1 - rank, rank), {}),
        ((batch for batch in Batches(rank, rank)), {}),
        (data.repeat() if rank else data, {}),
    ):
        try:
            _fitted("sync", one, **arguments)
        except ValueError as error:
            refused.append(str(error))
    x, y, weights = clicks.batch(4 * mine - 1, seed=rank)
    found |= {
        "arrays with ragged ones": (
            _fitted("sync", x, y=y, sample_weight=weights, batch_size=4, shuffle=False, epochs=2),
            padded,
        ),
        "sequence": (_fitted("sync", Batches(mine, rank), shuffle=False, epochs=2), padded),
        "sequence, workers": (_fitted(RouteAhead(), Batches(mine, rank), shuffle=False, workers=2, epochs=2), padded),
    }
    found |= _arrays(rank, mine)
    (model, _, reset), (two_at_once, _, reset_two) = (_made("sync", at_once, EVERY) for at_once in (1, 2))
    reset()
    reset_two()
    uneven, called = [], []
    for of, one, arguments in (
        (model, data, {}),
        (model, unknown, {}),
        (two_at_once, data, {}),
        (two_at_once, unknown, {"steps": 6}),  # those behind the third one are not there
        (model, data.concatenate(empty.repeat(3 - mine)), {}),
    ):
        tested, forecast = [], []  # the batches that callbacks see
        calls = keras.callbacks.LambdaCallback(
            on_test_batch_end=lambda batch, logs, to=tested: to.append(batch),
            on_predict_batch_end=lambda batch, logs, to=forecast: to.append(batch),
        )
        x = one.map(lambda x, y, weight: x)
        losses = of.evaluate(one, verbose=0, callbacks=[calls], **arguments)
        uneven.append((losses, of.predict(x, verbose=0, callbacks=[calls], **arguments)))
        called.append((tested, forecast, int(of._test_counter), int(of._predict_counter)))
    validated = model.fit(data, epochs=2, validation_data=data, verbose=0).history["val_loss"]
    some = keras.Input([None])
    doubled = PipelinedModel(some, 2.0 * some)
    rows = tf.data.Dataset.from_generator(
        lambda: iter(np.ones([mine, 4, 3], np.float32)), output_signature=tf.TensorSpec([None, None])
    )
    predicted = doubled.predict(rows, verbose=0)
    return found, steps, refused, called, uneven, validated, predicted


def test_a_rank_whose_data_ends_first_takes_part_with_nothing():
    results = run_ranks(_cases, 2)
    for rank, (found, steps, refused, called, *_) in enumerate(results):
        for error, words in zip(
            refused,
            (
                "steps_per_epoch must be the same on all ranks, got [1, 2]",
                "steps_per_execution 'auto' is chosen by every rank for itself",
                "different kinds: ['keras.utils.Sequence', 'tf.data.Dataset'] by rank",
                "the keras.utils.Sequence is empty",
                "the generator is empty",
                "rank 1 cannot read its input: ValueError: When providing an infinite dataset"
                if rank == 0
                else "infinite dataset",
            ),
            strict=True,
        ):
            assert words in error
        # An epoch has three batches. Without data for a second epoch, training ends, as under Keras.
        assert steps == [3, 3]
        for case, ((state, *counts), (wanted, *wanted_counts)) in found.items():
            assert counts == wanted_counts == [2, 6], case
            clicks.assert_same(state, wanted, where=case)
        each, two, more = [0, 1, 2], [1, 2], [1, 3]
        assert called == [(of, of, 3, 3) for of in (each, each, two, more, each)]
    for rank, (*_, uneven, validated, of_unstated_size) in enumerate(results):
        # Evaluation and predictions of 3 batches here and 1 there equal ones where the other rank has empty batches.
        *found, (wanted, predictions) = uneven
        assert len(predictions) == 4 * [3, 1][rank] - 1 and len(validated) == 2
        np.testing.assert_array_equal(of_unstated_size, np.full([4 * [3, 1][rank], 3], 2.0, np.float32), strict=True)
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
