"""Every schedule under every topology of groups, against references that have no ranks or no schedule.

Exact schedules equal their reference bit for bit, under the same topology. GRM's micro-batches also equal gradient
accumulation bit for bit, and whole batches except for rounding. All are near a simulation without ranks and schedules,
with each schedule's staleness, and with separate groups where the topology has them. Ids are skewed: neighbouring
batches share most of them.
"""

import dataclasses
import functools

import numpy as np
import pytest

from tests.models.batches import of_any_size
from tests.models.experiments import RANKING
from tests.schedules import clicks
from tests.schedules.frozen_window import test_sequence_models as sequence_models
from tests.schedules.frozen_window.test_ranks import assert_equals_accumulation
from tests.schedules.in_flight import delayed
from tests.support.graphs import reduced_in_between, without_fusions
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf
from tf_fusedrec._tf_compat import unconverted
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

STEPS, SAMPLES, RATE, DENSE_RATE, M = 10, 4, 0.1, 0.05, 2
FEATURES = ("item", "user")
GRM = {**RANKING, "embedding": {"optimizer": "adagrad", "learning_rate": RATE}}
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


@dataclasses.dataclass(frozen=True)
class Row:
    """One topology, with the schedules that are trained under it.

    tolerance: of float32 against the simulation's float64. Another staleness differs 50 times as much.
    """

    ranks: int
    topology: Topology
    schedules: tuple = tuple(SAME_AS)
    grm: bool = False
    tolerance: float = 2e-5


ROWS = {
    "one group, GRM": Row(2, Topology(), schedules=(Sync(), FrozenWindow(M), Nested(M), Pipelined(6)), grm=True),
    # Groups of one rank.
    "weight_sync": Row(2, Topology(2, "weight_sync", sync_every=2, moment_scale=1.0)),
    "gradient_sync": Row(4, Topology(2, "gradient_sync"), schedules=(Sync(), DualBuffer(), Nested(M), Pipelined(6))),
    "weight_sync, late": Row(
        4,
        Topology(2, "weight_sync", moment_scale=1.0, average_late=True),
        schedules=(Sync(), Nested(M), Pipelined(6)),
    ),
}


def _batches(row, rank):
    """The batches of a rank. GRM's have uneven numbers of users, once fewer than micro-batches and once none."""
    batches = []
    for step in range(STEPS):
        random = np.random.default_rng([step, rank])
        if row.grm:
            batch = sequence_models._ranking_batch(step, rank)
            for name in ("history_item", "exposed_item"):
                ids = random.zipf(1.3, batch[name].values.shape[0]) % 59 + 1
                batch[name] = batch[name].with_values(tf.constant(ids, tf.int64))
        else:
            x, *others = clicks.batch(SAMPLES, 10 * step + rank)
            batch = ({"item": tf.constant(random.zipf(1.5, SAMPLES) % 12), "user": x["user"]}, *others)
        batches.append(batch)
    return batches


def _model(row, schedule):
    """Returns a compiled model with its embedding."""
    import tf_fusedrec as fr

    optimizer = fr.collectives.distributed_optimizer(keras.optimizers.legacy.SGD(DENSE_RATE))
    if row.grm:
        model, embedding = sequence_models._make(GRM)
        model.schedule = schedule
        model.compile(optimizer)
        return model, embedding
    embedding = clicks.make_embedding("Adagrad", topology=row.topology)
    return clicks.make_model(embedding, schedule, optimizer, FEATURES), embedding


def _train(ranks):
    """Body: returns dense weights, trained state and losses by row and schedule, and the accumulated state of GRM."""
    import tf_fusedrec as fr

    without_fusions()
    found, accumulated = {}, None
    for name, row in ROWS.items():
        if row.ranks != ranks:
            continue
        batches = _batches(row, fr.rank())
        signature = of_any_size(batches[0]) if row.grm else clicks.signature(FEATURES)
        data = tf.data.Dataset.from_generator(lambda b=batches: iter(b), output_signature=signature)
        for schedule in row.schedules:
            model, embedding = _model(row, schedule)
            if row.grm:
                model(batches[0], training=False)  # makes weights, which would cost the first step a second trace
            losses = []
            keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs, to=losses: to.append(logs["loss"]))
            model.fit(data, verbose=0, callbacks=[keep])
            if row.grm:  # counts over ranks come from the data
                step = model.train_function._step.get_concrete_function(iter(data))
                assert not reduced_in_between(step.graph.get_operations()), schedule
            dense = [weight.numpy() for weight in model.trainable_weights if weight.shape.rank]  # not the anchor
            found[name, schedule] = dense, clicks.state(model, embedding), losses
        if row.grm:
            of_ranks = [_batches(row, rank) for rank in range(ranks)]
            *_, after = sequence_models.accumulated(GRM, of_ranks, ranks, keras.optimizers.legacy.SGD(DENSE_RATE))
            accumulated = clicks.state(*after)
    return found, accumulated


@pytest.fixture(scope="module")
def results():
    """A function from a number of ranks to the results of each rank."""

    @functools.cache
    def of(ranks):
        with pytest.MonkeyPatch.context() as patch:
            # A ring's order of additions depends on the place in the buffer, so tensors must not share one.
            patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
            topologies = [row.topology for row in ROWS.values() if row.ranks == ranks]
            return run_ranks(_train, ranks, timeout_s=480, topologies=topologies, ranks=ranks)

    return of


def _simulated(row):
    """Returns dense weights, rows and ids of the tables for staleness 0 and 1."""
    groups = row.topology.groups if row.topology.rule == "weight_sync" else 1
    of_ranks = [_batches(row, rank) for rank in range(row.ranks)]
    members = np.split(np.arange(row.ranks), groups)
    batches = [[_joined([of_ranks[rank][step] for rank in ranks]) for ranks in members] for step in range(STEPS)]
    model, tables, gradients = _without_tables(row, [batch for (batch, *_) in batches])
    begin, when = model.get_weights(), (row.topology.sync_every, row.topology.average_late)
    found = []
    for staleness in (0, 1):
        model.set_weights(begin)
        rows = delayed.train(model, tables, gradients, batches, staleness, RATE, *when)
        found.append(([weight.numpy() for weight in model.trainable_weights], rows, tables.ids))
    return found


def _joined(batches):
    return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches)


def _without_tables(row, batches):
    """Returns a row's model on plain variables, these, and the function of its gradients."""
    optimizer = keras.optimizers.legacy.SGD(DENSE_RATE)
    if not row.grm:
        tables = delayed.PlainTables(clicks.make_embedding("Adagrad"), {"item": np.arange(12), "user": np.arange(30)})
        model = clicks.make_model(tables, "sync", optimizer, FEATURES)
        return model, tables, delayed.gradients_of(model, tables)
    made = []

    def plain(embedding):
        ids = {}
        for name, feature in embedding.internals.features.items():
            columns = [batch[name] for batch in batches]
            ids.setdefault(feature.table, []).extend(np.ravel(getattr(c, "values", c)) for c in columns)
        made.append(delayed.PlainTables(embedding, {table: np.concatenate(parts) for table, parts in ids.items()}))
        return made[0]

    model, _ = sequence_models._make(GRM, plain=plain)
    (tables,) = made
    model.compile(optimizer)
    model(batches[0], training=False)

    def gradients(batch):
        with tf.GradientTape() as tape:
            tape.watch(list(tables.shown.values()))
            loss = model.compute_loss(batch, None, model(batch, training=True), None)
        return tape.gradient(loss, (model.trainable_variables, tables.shown))

    return model, tables, tf.function(unconverted(gradients), input_signature=[of_any_size(batches[0])])


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
    for rank, (found, _) in enumerate(results(row.ranks)):
        for schedule in row.schedules:
            dense, state, _ = found[name, schedule]
            assert sum(len(state[f"{table} ids"]) for table in simulated[0][1]) > 0
            errors = [_error(dense, state, of_staleness) for of_staleness in simulated]
            stale = schedule in STALE
            assert errors[stale] < row.tolerance, f"{name}, {schedule}, rank {rank}: {errors}"
            assert errors[not stale] > 50 * row.tolerance, f"{name}, {schedule}: as well the other staleness, {errors}"


@pytest.mark.parametrize("name", ROWS)
def test_exact_schedules_are_exact(results, name):
    row = ROWS[name]
    for rank, (found, _) in enumerate(results(row.ranks)):
        for schedule in row.schedules:
            if SAME_AS[schedule] not in row.schedules:
                continue
            (_, state, losses), (_, wanted, of_reference) = found[name, schedule], found[name, SAME_AS[schedule]]
            where = f"{name}, {schedule}, rank {rank}"
            if schedule not in STALE:
                np.testing.assert_array_equal(losses, of_reference, err_msg=where)
            for what in wanted:
                if what.split()[-1] not in ("last", "updated") or schedule not in STALE:  # counted by lookup
                    np.testing.assert_array_equal(state[what], wanted[what], err_msg=f"{where}: {what}")


def test_micro_batches_of_grm_are_accumulation_and_whole_batches(results):
    for rank, (found, accumulated) in enumerate(results(2)):
        (_, window, losses), (_, whole, of_whole) = (found["one group, GRM", of] for of in (FrozenWindow(M), Sync()))
        assert_equals_accumulation(window, accumulated, f"rank {rank}")
        counted = [what for what in whole if what.split()[-1] in sequence_models.COUNTED]
        assert counted
        for what in counted:
            np.testing.assert_array_equal(window[what], whole[what], err_msg=f"rank {rank}: {what}")
        # Sums in another order differ by 2e-7 of one loss.
        np.testing.assert_allclose(losses, of_whole, rtol=1e-5, err_msg=f"rank {rank}")
