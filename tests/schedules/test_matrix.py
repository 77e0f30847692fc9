"""Every schedule under both topologies of groups, 4 processes. One group: test_fifty_steps.py, in_flight/test_grm.py.

Exact schedules equal their reference bit for bit, under the same topology. Micro-batches equal whole batches except for
rounding. All are near a simulation without ranks and schedules, with each schedule's staleness and with separate groups
where the topology has them.
"""

import numpy as np
import pytest

from tests.schedules import clicks
from tests.schedules.in_flight import delayed
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

RANKS, STEPS, SAMPLES, RATE, M = 4, 6, 4, 0.1, 2
FEATURES = ("item", "user")
TOPOLOGIES = {
    "gradient_sync": Topology(2, "gradient_sync"),
    "weight_sync": Topology(2, "weight_sync", sync_every=2, moment_scale=1.0),
    "weight_sync, late": Topology(2, "weight_sync", moment_scale=1.0, average_late=True),
}
# Each schedule's reference, which it equals bit for bit; itself where the simulation is the only reference.
SAME_AS = {
    Sync(): Sync(),
    DualBuffer(): Sync(),
    FrozenWindow(M): FrozenWindow(M),
    Nested(M): FrozenWindow(M),
    SemiAsync(): SemiAsync(),
    Pipelined(6): SemiAsync(),  # test_in_flight.py has all depths
}
STALE = {SemiAsync(), Pipelined(6)}
# float32 against float64, after a few steps. Another staleness differs far more.
TOLERANCE = 2e-5


def _batch(rank, step):
    x, y, weight = clicks.batch(SAMPLES, 10 * step + rank)
    return {name: x[name] for name in FEATURES}, y, weight


def _joined(batches):
    return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches)


def _all():
    """Body: returns dense weights and the trained state, by topology and schedule."""
    import tf_fusedrec as fr

    rank, found = fr.collectives.rank(), {}
    data = tf.data.Dataset.from_tensor_slices(_joined([_batch(rank, step) for step in range(STEPS)])).batch(SAMPLES)
    for name, topology in TOPOLOGIES.items():
        for schedule in SAME_AS:
            embedding = clicks.make_embedding("Adagrad", topology=topology)
            optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(0.05))
            model = clicks.make_model(embedding, schedule, optimizer, FEATURES)
            model.fit(data, verbose=0)
            dense = [weight.numpy() for weight in model.trainable_weights if weight.shape.rank]  # not the anchor
            found[name, schedule] = dense, clicks.state(model, embedding)
    return found


def _simulated(topology, staleness):
    tables = delayed.PlainTables(clicks.make_embedding("Adagrad"), {"item": np.arange(12), "user": np.arange(30)})
    model = clicks.make_model(tables, "sync", keras.optimizers.legacy.SGD(0.05), FEATURES)

    groups = topology.groups if topology.rule == "weight_sync" else 1
    share = RANKS // groups
    batches = [
        [_joined([_batch(rank, step) for rank in range(g * share, (g + 1) * share)]) for g in range(groups)]
        for step in range(STEPS)
    ]
    gradients, when = delayed.gradients_of(model, tables), (topology.sync_every, topology.average_late)
    rows = delayed.train(model, tables, gradients, batches, staleness, RATE, *when)
    return [weight.numpy() for weight in model.trainable_weights], rows


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        # A ring's order of additions depends on the place in the buffer, so tensors must not share one.
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        return run_ranks(_all, RANKS, timeout_s=480, topologies=list(TOPOLOGIES.values()))


def _error(dense, state, wanted, rows):
    errors = [np.abs(weight - other).max() for weight, other in zip(dense, wanted)]
    for table, of_table in rows.items():
        errors.append(np.abs(state[f"{table} row"] - of_table[state[f"{table} ids"]]).max(initial=0))
    return max(errors)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_is_the_simulation_of_its_staleness(results, topology):
    simulated = [_simulated(TOPOLOGIES[topology], staleness) for staleness in (0, 1)]
    for rank, result in enumerate(results):
        for schedule in SAME_AS:
            stale = schedule in STALE
            dense, state = result[topology, schedule]
            assert sum(len(state[f"{table} ids"]) for table in ("item", "user")) > 0
            errors = [_error(dense, state, *of_staleness) for of_staleness in simulated]
            assert errors[stale] < TOLERANCE, f"{topology}, {schedule}, rank {rank}: {errors}"
            assert errors[not stale] > 50 * TOLERANCE, f"{topology}, {schedule}: as well the other staleness, {errors}"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_exact_schedules_are_exact(results, topology):
    for rank, result in enumerate(results):
        for schedule, same in SAME_AS.items():
            (_, state), (_, wanted) = result[topology, schedule], result[topology, same]
            for what in wanted:
                if what.split()[-1] not in ("last", "updated") or schedule not in STALE:  # counted by lookup
                    message = f"{topology}, {schedule}, rank {rank}: {what}"
                    np.testing.assert_array_equal(state[what], wanted[what], err_msg=message)
