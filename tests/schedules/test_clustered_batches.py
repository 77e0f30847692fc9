"""Clustered batches train as plain ones, except for the order of sums: a step's loss, rows and dense weights."""

import numpy as np
import pytest

from tests.schedules import clicks
from tf_fusedrec import keras, tf
from tf_fusedrec.data import cluster_samples
from tf_fusedrec.schedules import FrozenWindow

# 24 samples' float32 gradients of size 1 are summed in another order.
TOLERANCE = 24 * np.finfo(np.float32).eps


def _trained(schedule, batch):
    """Returns the loss of one step and the state after it. With rates of 1, the state loses just the gradients."""
    embedding = clicks.make_embedding("SGD")
    model = clicks.make_model(embedding, schedule, keras.optimizers.legacy.SGD(1.0))
    return float(clicks.train_function(model)(*batch)["loss"]), clicks.state(model, embedding)


def _clustered(batch, micro_batches):
    tables = lambda x, y, weight: {"item": [x["item"], x["past"]], "user": x["user"]}  # noqa: E731
    (new,) = cluster_samples(tf.data.Dataset.from_tensors(batch), micro_batches, tables)
    return new


@pytest.mark.slow
def test_loss_and_gradients_do_not_change():
    batch = clicks.batch(24, seed=5)
    new = _clustered(batch, 4)
    assert (new[0]["user"].numpy() != batch[0]["user"].numpy()).any()
    loss, wanted = _trained("sync", batch)
    for schedule in (FrozenWindow(4), "sync"):
        got_loss, got = _trained(schedule, new)
        assert schedule != "sync" or np.isclose(got_loss, loss, rtol=TOLERANCE)  # elsewhere the last piece's log
        assert got.keys() == wanted.keys()
        for what in wanted:
            if what.split()[-1] not in ("last", "count", "updated", "pool"):  # counted by lookup, not by step
                np.testing.assert_allclose(got[what], wanted[what], rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def test_one_micro_batch_is_the_batch_as_it_was():
    batch = clicks.batch(24, seed=5)
    for before, after in zip(tf.nest.flatten(batch), tf.nest.flatten(_clustered(batch, 1))):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(getattr(after, "flat_values", after), getattr(before, "flat_values", before))
