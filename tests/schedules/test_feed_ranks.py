"""Ranks whose data ends at different times, with and without a look ahead: one job, many cases."""

import numpy as np

from tests.schedules import clicks
from tests.support.ranks import run_ranks


def _data(batches, rank):
    """`batches` of 4 samples of this rank; the last one has 3."""
    from tf_fusedrec import tf

    samples = max(4 * batches - 1, 0)
    return tf.data.Dataset.from_tensor_slices(clicks.batch(samples, seed=rank)).batch(4)


def _fitted(schedule, data, **arguments):
    import tf_fusedrec as fr
    from tf_fusedrec import keras

    embedding = clicks.make_embedding()
    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01))
    model = clicks.make_model(embedding, schedule, optimizer)
    history = model.fit(data, verbose=0, **arguments).history
    return clicks.state(model, embedding), len(history["loss"]), int(model.optimizer.iterations)


def _cases():
    """By case: what it gives, and what the same number of batches gives everywhere, empty ones among them."""
    import tf_fusedrec as fr
    from tests.schedules.ahead import RouteAhead
    from tf_fusedrec import tf
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
    }
    found["more micro-batches than samples"] = tuple(
        _fitted(schedule, one, epochs=2)
        for schedule, one in (
            (Nested(5), data),
            (FrozenWindow(5), data.concatenate(empty.repeat(3 - mine))),
        )
    )
    steps = _fitted(RouteAhead(), data, epochs=2, steps_per_epoch=3)[2]
    refused = []
    x, y, _ = clicks.batch(4 + 40 * rank, seed=rank)
    for one, arguments in ((data, {"steps_per_epoch": 1 + rank}), (x, {"y": y})):
        try:
            _fitted("sync", one, **arguments)
        except ValueError as error:
            refused.append(str(error))
    model = clicks.make_model(clicks.make_embedding(), "sync")
    uneven = []
    for one in (data, unknown, data.concatenate(empty.repeat(3 - mine))):
        x = one.map(lambda x, y, weight: x)
        uneven.append((model.evaluate(one, verbose=0), model.predict(x, verbose=0)))
    validated = model.fit(data, epochs=2, validation_data=data, verbose=0).history["val_loss"]
    return found, steps, refused, uneven, validated


def test_a_rank_whose_data_ends_first_takes_part_with_nothing():
    results = run_ranks(_cases, 2)
    for found, steps, (different_steps, different_lengths), *_ in results:
        assert "steps_per_epoch must be the same on all ranks, got [1, 2]" in different_steps
        assert "give a tf.data.Dataset on every rank" in different_lengths
        assert steps == 3  # an epoch of three; there is no data for a second one, and training ends, as under Keras
        for case, ((state, *counts), (wanted, *wanted_counts)) in found.items():
            assert counts == wanted_counts == [2, 6], case
            for what in wanted:
                np.testing.assert_array_equal(state[what], wanted[what], err_msg=f"{case}: {what}")
    for rank, (*_, uneven, validated) in enumerate(results):
        # Evaluation and predictions of 3 batches here and 1 there: as if the other rank had empty ones.
        *found, (wanted, predictions) = uneven
        assert len(predictions) == 4 * [3, 1][rank] - 1 and len(validated) == 2
        for losses, predicted in found:
            np.testing.assert_allclose(losses, wanted, rtol=1e-6)  # of sums over batches of other sizes
            np.testing.assert_allclose(predicted, predictions, rtol=1e-6)
