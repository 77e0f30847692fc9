"""Gradients that wait between steps: drains change nothing, and a load in the middle forgets them.

test_matrix.py has their staleness.
"""

import functools

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tf_fusedrec import keras, tf
from tf_fusedrec.schedules import Pipelined, SemiAsync

STEPS, SAMPLES = 12, 8


@functools.cache
def batches():
    return [clicks.batch(SAMPLES, 100 * step) for step in range(STEPS)]


def _data():
    joined = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches())
    return tf.data.Dataset.from_tensor_slices(joined).batch(SAMPLES)


@pytest.mark.slow
def test_drains_make_the_updates_that_wait_and_change_nothing_else():
    """A checkpoint or an evaluation drains. Every due update is then done."""
    states, updates = [], []
    for every in (STEPS + 1, 4):
        embedding = clicks.make_embedding("Adagrad")
        model = clicks.make_model(embedding, SemiAsync(), keras.optimizers.SGD(0.05))

        def drain(batch, _, model=model, table=embedding.internals.groups[0].table, every=every):
            if batch % every == every - 1:
                model.drain()
                updates.append((batch, int(table.optimizer.iterations)))

        clicks.fit(model, _data(), drain)
        states.append(clicks.state(model, embedding))
    plain, drained = states
    assert updates == [(batch, batch + 1) for batch in range(3, STEPS, 4)]
    clicks.assert_same(drained, plain, but=("last", "updated"))  # by the table's clock, which counts lookups


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SemiAsync(), Pipelined(6)], ids=str)
def test_a_load_in_the_middle_forgets_what_is_under_way(schedule, tmp_path):
    """Training goes on as that of a model that was loaded before its first step."""
    saved = clicks.make_model(clicks.make_embedding(), "sync")
    saved.train_on_batch(*batches()[9])
    fr.checkpoint.save(tmp_path, saved, saved.optimizer)

    def load(model):
        fr.checkpoint.load(tmp_path, model, model.optimizer)
        fr.checkpoint.warm_start(model, "item", np.arange(12), np.ones([12, clicks.DIM], np.float32))

    states = []
    for first, reload_after in ((0, 3), (4, STEPS)):
        embedding = clicks.make_embedding()
        model = clicks.make_model(embedding, schedule)
        if first:
            model.train_on_batch(*batches()[8])  # makes slots of the optimizer
            load(model)
        data = _data().skip(first).take(8 - first)
        clicks.fit(model, data, lambda batch, _, model=model, last=reload_after: load(model) if batch == last else None)
        states.append(clicks.state(model, embedding))
    clicks.assert_same(*states)


@pytest.mark.slow
def test_tables_of_tfra_train_up_to_depth_2():
    """docs/tfra.md says so, because larger depths look up ahead. No rule of fr.optimizers is Adamax."""
    states = []
    for schedule in ("sync", Pipelined(1), Pipelined(2)):
        table = {"optimizer": keras.optimizers.Adamax(0.1)}
        embedding = clicks.make_embedding(table=table, backend="tfra")
        model = clicks.make_model(embedding, schedule)
        model.fit(_data().take(5), verbose=0)
        states.append(clicks.state(model, embedding))
    for state in states[1:]:
        clicks.assert_same(state, states[0])
