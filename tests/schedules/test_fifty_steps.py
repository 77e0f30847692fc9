"""GRM on a log of real skew, 50 steps, 2 and 4 processes, one job each. dual_buffer equals sync bit for bit, and nested
equals frozen_window. Both latter equal gradient accumulation over the same micro-batches. Except for rounding, their
losses equal the losses of whole batches. Their tables have equal counters.
"""

import contextlib

import numpy as np
import pytest

from tests.schedules import clicks
from tests.schedules.frozen_window.test_ranks import assert_equals_accumulation
from tests.schedules.frozen_window.test_sequence_models import COUNTED, KUAIRAND, M, _accumulated, _make
from tests.support import small_log
from tests.support.graphs import without_fusions
from tests.support.ranks import run_ranks
from tf_fusedrec.data.converters.kuairand import convert_kuairand

STEPS, DISTINCT = 50, 10
SMALL = {**KUAIRAND, "model": {**KUAIRAND["model"], "max_history": 30, "max_exposures": 16}}


def _data(folder, rank, ranks):
    from models.build import columns, length_columns
    from models.experiment import from_dict
    from tf_fusedrec.data import ParquetFolder, TokenBatches

    model = from_dict(SMALL).model
    data = ParquetFolder(folder, columns(model, "train"), rank=rank, world_size=ranks, shuffle_seed=0)
    return TokenBatches(data, length_columns=length_columns(model), target_tokens=128).dataset().repeat().take(DISTINCT)


@contextlib.contextmanager
def _without_refresh():
    """Takes rows as the look-ahead read them, so later updates are missing."""
    from tf_fusedrec import ops, tf

    refresh = ops.table_refresh

    def stale(table, message, splits, ahead, *, dim):
        found = refresh(table, message, splits, ahead._replace(rows=tf.identity(ahead.rows)), dim=dim)
        ids = tf.size(ahead.handles)
        rows = tf.where(ahead.handles[:, tf.newaxis] >= 0, ahead.rows[:ids], found.rows[:ids])
        return found._replace(rows=tf.concat([rows, found.rows[ids:]], 0))

    ops.table_refresh = stale
    try:
        yield
    finally:
        ops.table_refresh = refresh


def _trained(schedule, folder, ranks, steps=STEPS):
    """Returns the state after these steps of fit's function, and the losses."""
    import tf_fusedrec as fr
    from tf_fusedrec import keras

    model, embedding = _make(SMALL)
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.01)))
    data = _data(folder, fr.collectives.rank(), ranks)
    model(next(iter(data)), training=False)
    batches = iter(data.repeat())
    step, losses = model.make_train_function(), []
    for _ in range(steps):
        model.reset_metrics()
        losses.append(float(step(batches)["loss"]))
    return clicks.state(model, embedding), losses


def _all(folder, ranks):
    from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Sync

    without_fusions()
    found = {
        type(schedule).__name__: _trained(schedule, folder, ranks)
        for schedule in (Sync(), DualBuffer(), FrozenWindow(M), Nested(M))
    }
    batches = [list(_data(folder, rank, ranks)) * (STEPS // DISTINCT) for rank in range(ranks)]
    *_, trained = _accumulated(SMALL, batches, ranks)
    accumulated = clicks.state(*trained)
    if ranks > 2:
        return found, accumulated, None
    with _without_refresh():
        return found, accumulated, _trained(DualBuffer(), folder, ranks, steps=DISTINCT)


def _assert_same(state, wanted, what):
    assert state.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(state[name], wanted[name], err_msg=f"{what}: {name}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_fifty_steps_on_a_log_of_real_skew(world_size, monkeypatch, tmp_path):
    convert_kuairand(small_log.FOLDER, tmp_path / "out")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")  # see frozen_window/test_ranks.py
    results = run_ranks(_all, world_size, timeout_s=600, ranks=world_size, folder=str(tmp_path / "out/train"))
    for rank, (found, accumulated, stale) in enumerate(results):
        for name, reference in (("DualBuffer", "Sync"), ("Nested", "FrozenWindow")):
            assert found[name][1] == found[reference][1], (rank, name)
            _assert_same(found[name][0], found[reference][0], f"rank {rank}, {name}")
        assert_equals_accumulation(found["FrozenWindow"][0], accumulated, f"rank {rank}, accumulation")
        counted = [
            {what: state[what] for what in state if what.split()[-1] in COUNTED}
            for state in (found["FrozenWindow"][0], found["Sync"][0])
        ]
        assert counted[0]
        _assert_same(*counted, f"rank {rank}, counters of whole batches")
        # Sums in another order differ by 2e-7 of one loss, and little more after 50 updates.
        np.testing.assert_allclose(found["FrozenWindow"][1], found["Sync"][1], rtol=1e-5, err_msg=f"rank {rank}")
        if world_size == 2:  # The test above can fail, because rows without a refresh give other losses.
            (_, stale_losses), losses = stale, found["Sync"][1]
            assert stale_losses != losses[: len(stale_losses)], rank
            assert stale_losses[0] == losses[0], rank
