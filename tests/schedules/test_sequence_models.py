"""Sequence models in micro-batches equal whole batches. test_rank_weights.py has weights of several ranks."""

import copy

import numpy as np
import pytest

from tests.models.batches import of_any_size, ranking_batch, retrieval_batch
from tests.models.experiments import RANKING, RETRIEVAL
from tests.schedules import clicks
from tests.support.graphs import reduced_in_between

M, STEPS = 2, 3
COUNTED = ("ids", "last", "count", "updated", "pool")


def _make(fields):
    """Returns (model, embedding) of a configuration without dropout. Dense weights are equal on every rank."""
    from tf_fusedrec import keras
    from tf_fusedrec.models.build import make_embedding, make_model
    from tf_fusedrec.models.experiment import from_dict

    fields = copy.deepcopy(fields)
    fields["model"]["dropout"] = 0.0
    experiment = from_dict(fields)
    embedding = make_embedding(experiment)
    keras.utils.set_random_seed(3)
    return make_model(experiment, embedding, np.arange(1, 60), np.ones(59, np.int64)), embedding


def _trained(schedule, fields, batches):
    """Returns the states after each of Keras' training steps, and the losses."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras, tf
    from tf_fusedrec._tf_compat import unconverted
    from tf_fusedrec.schedules.model import make_optimizer_slots

    model, embedding = _make(fields)
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(0.01)))
    model(batches[0], training=False)
    make_optimizer_slots(model)
    step = tf.function(unconverted(model.train_step), input_signature=[of_any_size(batches[0])])
    # Counts over ranks come from the data, so the backward pass does not wait for other ranks.
    assert not reduced_in_between(step.get_concrete_function(batches[0]).graph.get_operations())
    states, losses = [], []
    for batch in batches:
        model.reset_metrics()
        losses.append(float(step(batch)["loss"]))
        states.append(clicks.state(model, embedding))
    return states, losses


def assert_near(states, others, rtol):
    """Asserts equality except for rounding. Ids and counters of tables must be equal."""
    for got, wanted in zip(states, others):
        assert got.keys() == wanted.keys()
        for what in wanted:
            if what.split()[-1] in COUNTED:
                np.testing.assert_array_equal(got[what], wanted[what], err_msg=what)
            else:
                np.testing.assert_allclose(got[what], wanted[what], rtol=rtol, atol=rtol / 10, err_msg=what)


def _ranking_batches():
    """Uneven batches; one has fewer users than micro-batches."""
    for step, users in enumerate([6, 9, 1]):
        random = np.random.default_rng(step)
        yield ranking_batch(random.integers(0, 12, users).tolist(), random.integers(0, 5, users).tolist(), 100 * step)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ranking", "retrieval with shared negatives"])
def test_micro_batches_equal_whole_batches(task):
    from tf_fusedrec.schedules import FrozenWindow

    if task == "ranking":
        fields, batches = RANKING, list(_ranking_batches())
    else:
        fields, lengths = copy.deepcopy(RETRIEVAL), [[5, 2, 9, 1, 4], [3, 0, 7, 8], [2, 6, 5, 5]]
        fields["model"]["share_negatives"] = True
        batches = [retrieval_batch(of_users, seed) for seed, of_users in enumerate(lengths)]
    (states, losses), (whole, wanted) = (_trained(schedule, fields, batches) for schedule in (FrozenWindow(M), "sync"))
    assert_near(states, whole, rtol=1e-3)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)


def test_micro_batches_draw_negatives_of_their_own():
    from tf_fusedrec.schedules.uneven_batches import MicroBatch, working_on

    model, _ = _make(RETRIEVAL)
    batch = retrieval_batch([6, 4])

    def draw():
        predictions = model(batch)
        return predictions.negative_ids.numpy()[predictions.chosen]

    draws = []
    for number in (0, 1):
        with working_on(model, MicroBatch(number, 0.5)):
            draws.append(draw())
    np.testing.assert_array_equal(draws[0], draw())
    assert (draws[0] != draws[1]).any()
