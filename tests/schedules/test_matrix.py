"""Every schedule under every topology of groups, against references that have no ranks or no schedule.

Exact schedules equal their reference bit for bit, under the same topology. All are near a simulation without ranks and
schedules, with each schedule's staleness, and with separate groups where the topology has them. Ids are skewed:
neighbouring batches share most of them.
"""

import dataclasses
import functools

import numpy as np
import pytest

from tests.schedules import clicks, delayed
from tests.support.graphs import without_fusions
from tests.support.ranks import choose_exchange, run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import gloo
from tf_fusedrec.exchange.horovod import Horovod
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

STEPS, SAMPLES, RATE, DENSE_RATE, M = 10, 4, 0.1, 0.05, 2
FEATURES = ("item", "user")
# Each schedule's reference, which it equals bit for bit; itself where the simulation is the only reference.
SAME_AS = {
    Sync(): Sync(),
    DualBuffer(): Sync(),
    FrozenWindow(M): FrozenWindow(M),
    Nested(M): FrozenWindow(M),
    SemiAsync(): SemiAsync(),
    Pipelined(6): SemiAsync(),
}
OTHER_DEPTHS = {Pipelined(depth): Sync() if depth < 4 else SemiAsync() for depth in range(1, 6)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One topology, with the schedules that are trained under it.

    tolerance: of float32 against the simulation's float64. Another staleness differs 50 times as much.
    """

    ranks: int
    topology: Topology
    schedules: tuple = tuple(SAME_AS)
    tolerance: float = 2e-5


ROWS = {
    "one process": Row(1, Topology(), schedules=(Sync(), SemiAsync(), Pipelined(6), *OTHER_DEPTHS)),
    # Groups of one rank.
    "weight_sync": Row(2, Topology(2, "weight_sync", sync_every=2, moment_scale=1.0)),
    "gradient_sync": Row(4, Topology(2, "gradient_sync"), schedules=(Sync(), DualBuffer(), Nested(M), Pipelined(6))),
    "weight_sync, late": Row(
        4, Topology(2, "weight_sync", moment_scale=1.0, average_late=True), schedules=(Sync(), Pipelined(6))
    ),
}


def _batches(rank):
    """The batches of a rank."""
    batches = []
    for step in range(STEPS):
        ids = np.random.default_rng([step, rank]).zipf(1.5, SAMPLES) % 12
        x, *others = clicks.batch(SAMPLES, 10 * step + rank)
        batches.append(({"item": tf.constant(ids), "user": x["user"]}, *others))
    return batches


def _model(row, schedule):
    """Returns a compiled model with its embedding."""
    import tf_fusedrec as fr

    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.SGD(DENSE_RATE))
    two_groups = {"record_tombstones": True}
    embedding = clicks.make_embedding("Adagrad", user=two_groups, topology=row.topology)
    return clicks.make_model(embedding, schedule, optimizer, FEATURES), embedding


def _train(ranks):
    """Body: returns dense weights, trained state and losses by row and schedule."""
    gloo.Gloo.joined_from = 2  # so the rows of both groups share messages over Gloo
    if ranks > 2:  # engines add in other orders, and only two addends have one sum (test_gloo.py compares sums)
        gloo.Gloo.all_reduce, gloo.Gloo.average = Horovod.all_reduce, Horovod.average
        gloo.Gloo.joined_bytes = Horovod.joined_bytes
    import tf_fusedrec as fr

    without_fusions()
    found = {}
    batches = _batches(fr.rank())
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=clicks.signature(FEATURES))
    for name, row in ROWS.items():
        if row.ranks != ranks:
            continue
        for schedule in row.schedules:
            model, embedding = _model(row, schedule)
            losses = []
            clicks.fit(model, data, lambda _, logs, to=losses: to.append(logs["loss"]))
            dense = [weight.numpy() for weight in model.trainable_weights if weight.shape.rank]  # not the anchor
            found[name, schedule] = dense, clicks.state(model, embedding), losses
    return found


@pytest.fixture(scope="module")
def results():
    """A function from a number of ranks and an engine of the exchange to the results of each rank."""

    @functools.cache
    def of(ranks, exchange="horovod"):
        with pytest.MonkeyPatch.context() as patch:
            choose_exchange(exchange, patch)
            # A ring's order of additions depends on the place in the buffer, so tensors must not share one.
            patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
            topologies = [row.topology for row in ROWS.values() if row.ranks == ranks]
            return run_ranks(_train, ranks, timeout_s=480, topologies=topologies, ranks=ranks)

    return of


def _simulated(row):
    """Returns dense weights, rows and ids of the tables for staleness 0 and 1."""
    groups = row.topology.groups if row.topology.rule == "weight_sync" else 1
    of_ranks = [_batches(rank) for rank in range(row.ranks)]
    members = np.split(np.arange(row.ranks), groups)
    batches = [[_joined([of_ranks[rank][step] for rank in ranks]) for ranks in members] for step in range(STEPS)]
    tables = delayed.PlainTables(clicks.make_embedding("Adagrad"), {"item": np.arange(12), "user": np.arange(30)})
    model = clicks.make_model(tables, "sync", keras.optimizers.SGD(DENSE_RATE), FEATURES)
    gradients = delayed.gradients_of(model, tables)
    begin, when = model.get_weights(), (row.topology.sync_every, row.topology.average_late)
    found = []
    for staleness in (0, 1):
        model.set_weights(begin)
        rows = delayed.train(model, tables, gradients, batches, staleness, RATE, *when)
        found.append(([weight.numpy() for weight in model.trainable_weights], rows, tables.ids))
    return found


def _joined(batches):
    return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches)


def _error(dense, state, simulated):
    """The largest difference of dense weights and of this rank's rows."""
    wanted, rows, ids = simulated
    errors = [np.abs(weight - other).max() for weight, other in zip(dense, wanted, strict=True)]
    for table, of_table in rows.items():
        mine = of_table[np.searchsorted(ids[table], state[f"{table} ids"])]
        errors.append(np.abs(state[f"{table} row"] - mine).max(initial=0))
    return max(errors)


@pytest.mark.parametrize("name", ROWS)
def test_it_is_the_simulation_of_its_staleness(results, name):
    row = ROWS[name]
    simulated = _simulated(row)
    for rank, found in enumerate(results(row.ranks)):
        for schedule in row.schedules:
            dense, state, _ = found[name, schedule]
            assert sum(len(state[f"{table} ids"]) for table in simulated[0][1]) > 0
            errors = [_error(dense, state, of_staleness) for of_staleness in simulated]
            stale = schedule.stages.staleness
            assert errors[stale] < row.tolerance, f"{name}, {schedule}, rank {rank}: {errors}"
            assert errors[not stale] > 50 * row.tolerance, f"{name}, {schedule}: as well the other staleness, {errors}"


@pytest.mark.parametrize("name", ROWS)
def test_exact_schedules_are_exact(results, name):
    row = ROWS[name]
    for rank, found in enumerate(results(row.ranks)):
        for schedule in row.schedules:
            reference = {**SAME_AS, **OTHER_DEPTHS}[schedule]
            if reference not in row.schedules:
                continue
            (_, state, losses), (_, wanted, of_reference) = found[name, schedule], found[name, reference]
            where = f"{name}, {schedule}, rank {rank}"
            if not schedule.stages.staleness:
                np.testing.assert_array_equal(losses, of_reference, err_msg=where)
            for what in wanted:
                if what.split()[-1] not in ("last", "updated") or not schedule.stages.staleness:  # counted by lookup
                    np.testing.assert_array_equal(state[what], wanted[what], err_msg=f"{where}: {what}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_engines_of_the_exchange_give_the_same_bits(results, ranks):
    for found, wanted in zip(results(ranks, "gloo"), results(ranks), strict=True):
        np.testing.assert_equal(found, wanted)
