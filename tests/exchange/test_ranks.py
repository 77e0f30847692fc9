"""Topologies on 2 and 4 real processes: weight_sync equals an oracle. test_gradient_sync.py has the other rule.

One launch for each number of processes serves all tests. Two processes are groups of one rank, four have shards.
"""

import dataclasses
import functools
import os
import pathlib

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.exchange import linear
from tests.oracles import weight_sync
from tests.support.ids import INT64_MIN
from tests.support.layers import merged
from tests.support.ranks import run_ranks
from tf_fusedrec import Limits, Storage, Tier, Topology, optimizers, tf
from tf_fusedrec.checkpoint.loading import read_tables

STEPS = 20
SHARED = Topology(2, replicas_together=True)
# Names to ranks, rule of the optimizer, its numbers, and the topology.
AVERAGED = {
    "rowwise": (4, "RowWiseAdagrad", {"epsilon": 1e-2}, Topology(2, "weight_sync", sync_every=4, moment_scale=1.0)),
    "rowwise_scaled": (2, "RowWiseAdagrad", {"epsilon": 1e-2}, Topology(2, "weight_sync", sync_every=1)),
    "adagrad_scaled": (2, "Adagrad", {"epsilon": 1e-2, "initial_accumulator_value": 0.5}, Topology(2, "weight_sync")),
    "adam": (2, "Adam", {"epsilon": 1e-2}, Topology(2, "weight_sync", sync_every=1, moment_scale=1.0)),
    "adam_scaled": (2, "Adam", {"epsilon": 1e-2}, Topology(2, "weight_sync", sync_every=4)),
    "rowwise_late": (2, "RowWiseAdagrad", {"epsilon": 1e-2}, Topology(2, "weight_sync", average_late=True)),
    "adam_late": (4, "Adam", {"epsilon": 1e-2, "beta_2": 0.5}, Topology(2, "weight_sync", average_late=True)),
    "adam_late_4": (2, "Adam", {"epsilon": 1e-2}, Topology(2, "weight_sync", sync_every=4, average_late=True)),
    "accumulated_late": (4, "Adam", {"epsilon": 1e-2}, Topology(2, "weight_sync", average_late=True)),
}
ACCUMULATED = {"accumulated_late": 2}  # steps that make one update, of the layers that have several
RATE = 0.05
# Rows of these tables leave, in each replica alone until the synchronisation after every second step.
LEAVING = {"limits": Limits(max_rows_per_rank=150, eviction="lru")}
EVICTING = {
    "averaged_lru": (4, LEAVING, Topology(2, "weight_sync", sync_every=2)),
    "averaged_lfu": (2, {"limits": Limits(150, "lfu"), "storage": Storage(dtype="bfloat16", stochastic_rounding=True)},
                     Topology(2, "weight_sync", sync_every=2)),
    "late_lru": (2, LEAVING, Topology(2, "weight_sync", sync_every=2, average_late=True)),
    "late_ttl": (4, {"limits": Limits(ttl=5), "storage": Storage(dtype="bfloat16", stochastic_rounding=True)},
                 Topology(2, "weight_sync", average_late=True)),
    "averaged_ttl": (2, {"limits": Limits(ttl=5), "tier": Tier(200 * 80)},
                     Topology(2, "weight_sync", sync_every=2)),
    "shared_lru": (2, {"limits": Limits(150, "lru", admission_count=2)}, SHARED),
}  # fmt: skip


def _resharded(embedding, folder):
    """Saves a layer, loads it into layers of other topologies, and returns the records of all of them."""
    fr.checkpoint.save(folder, embedding)
    found = {"saved": linear.records(embedding)}
    for name, topology in {"one": Topology(), "shared": SHARED}.items():
        other = linear.make(f"resharded_{name}", optimizers.RowWiseAdagrad(RATE), topology)
        fr.checkpoint.load(folder, other)
        found[name] = linear.records(other)
    fr.checkpoint.save(f"{folder}.again", other)
    return found


WIRES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
WIRE_IDS = [INT64_MIN, 2**62 + 1, -1, 5, 6, 7]
BEYOND = 1e6  # a gradient that float16 does not hold


def _wire_gradients(rank):
    """Returns the gradients <float32>[ids, DIM] of every rank's lookup of WIRE_IDS."""
    gradients = np.random.default_rng(rank).normal(size=[len(WIRE_IDS), linear.DIM])
    gradients[-1] = BEYOND
    return gradients.astype(np.float32)


def _over_wire(wire, topology, name):
    """Returns the rows in the model, and the table after a step of SGD whose update is the sum of all gradients."""
    embedding = linear.make(name, optimizers.SGD(1.0), topology, gradient_op="sum", wire_dtype=wire)
    with tf.GradientTape() as tape:
        rows = embedding({"item": tf.constant(WIRE_IDS, tf.int64)})["item"]
        loss = tf.reduce_sum(rows * _wire_gradients(fr.rank()))
    tape.gradient(loss, embedding.trainable_variables)
    return rows.numpy(), linear.records(embedding)


def _run_all(checkpoint):
    ids, size = linear.ids_of(STEPS, fr.rank()), fr.size()
    found = {"ids": ids, "initial": linear.initial_rows(np.unique(np.concatenate(ids)), optimizers.SGD(0.0))}
    found["threads"] = os.environ["TF_NUM_INTRAOP_THREADS"]
    if size == 4:
        for wire in (None, *WIRES):
            found["wire", wire] = _over_wire(wire, Topology(), f"wire_{wire}")
            found["shared_wire", wire] = _over_wire(wire, SHARED, f"shared_wire_{wire}")
    for name, (ranks, rule, numbers, topology) in AVERAGED.items():
        if ranks != size:
            continue
        accumulate = ACCUMULATED.get(name, 1)
        embedding = linear.train(
            ids, name, getattr(optimizers, rule)(RATE, **numbers), topology, accumulate_steps=accumulate
        )
        found[name] = linear.records(embedding)
        if topology.average_late:
            embedding.synchronize()
            found[name, "averaged"] = linear.records(embedding)
        if name == "rowwise":  # whose replicas differ after the last step
            found["checkpoint"] = _resharded(embedding, checkpoint)
    for name, (ranks, table, topology) in EVICTING.items():
        if ranks != size:
            continue
        if "tier" in table:
            tier = dataclasses.replace(table["tier"], folder=str(pathlib.Path(checkpoint).parent))
            table = {**table, "tier": tier}
        embedding = linear.train(ids, name, optimizers.Adam(RATE), topology, table=table)
        if topology.average_late:
            embedding.synchronize()
        found[name] = linear.records(embedding), embedding.internals.groups[0].table.statistics["item"]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoint") / "c")


@pytest.fixture(scope="module")
def results_of(checkpoint):
    """A function from a number of ranks to the results of each rank."""

    @functools.cache
    def of(ranks):
        topologies = (SHARED, *(topology for *_, topology in AVERAGED.values()))
        return run_ranks(_run_all, ranks, timeout_s=480, topologies=topologies, checkpoint=checkpoint)

    return of


def _start_of(results, name):
    """Returns a function from an id to its state before training, float64."""
    rows = {}
    for result in results:
        rows.update(zip(np.unique(np.concatenate(result["ids"])).tolist(), result["initial"].astype(np.float64)))
    return lambda i: {"row": rows[i], **SLOTS[AVERAGED[name][1]]}


SLOTS = {
    "Adagrad": {"accumulator": np.full(linear.DIM, 0.5)},
    "RowWiseAdagrad": {"accumulator": 0.0},
    "Adam": {"m": np.zeros(linear.DIM), "v": np.zeros(linear.DIM)},
}


def test_the_ranks_of_a_host_share_its_cores(results_of):
    assert {result["threads"] for result in results_of(2)} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}


@pytest.mark.parametrize("name", list(AVERAGED))
def test_weight_sync_is_algorithm_1(results_of, name):
    ranks, rule, numbers, topology = AVERAGED[name]
    results = results_of(ranks)
    groups, _ = topology.sets(len(results))
    batches = [
        [_joined([results[rank]["ids"][step] for rank in ranks], step) for ranks in groups] for step in range(STEPS)
    ]
    start = _start_of(results, name)
    oracles = {
        "Adagrad": weight_sync.adagrad, "RowWiseAdagrad": weight_sync.rowwise_adagrad, "Adam": weight_sync.adam
    }  # fmt: skip
    update = oracles[rule]
    scale = topology.groups if topology.moment_scale is None else topology.moment_scale
    update = functools.partial(update, lr=RATE, c=scale, **numbers)
    late, accumulate = topology.average_late, ACCUMULATED.get(name, 1)
    tables = weight_sync.train(batches, start, update, topology.sync_every, late=late, accumulate=accumulate)
    _assert_tables(groups, [result[name] for result in results], tables)
    if late:
        at_once = weight_sync.train(batches, start, update, topology.sync_every, accumulate=accumulate)
        pairs = [(one[i]["row"], two[i]["row"]) for one, two in zip(tables, at_once) for i in one.keys() & two.keys()]
        assert max(np.abs(one - two).max() for one, two in pairs) > 1e-3, "the oracle without delay would do as well"
        weight_sync.average(tables, start)
        _assert_tables(groups, [result[name, "averaged"] for result in results], tables)


def _assert_tables(groups, of_ranks, tables):
    for ranks, wanted in zip(groups, tables):
        got, records = (np.concatenate(parts) for parts in zip(*[of_ranks[rank] for rank in ranks]))
        assert set(got.tolist()) == set(wanted)
        for field in next(iter(wanted.values())):
            of_oracle = np.array([wanted[i][field] for i in got.tolist()])
            # float32 against float64 over 20 steps. A wrong rule differs by 1e-2.
            np.testing.assert_allclose(records[field], of_oracle, rtol=1e-4, atol=1e-5, err_msg=field)


def _joined(parts, step):
    ids = np.concatenate(parts)
    return (ids, *linear.samples(ids, step))


@pytest.mark.parametrize(
    "name", [name for name, (*_, topology) in AVERAGED.items() if topology.sync_every == 1 or topology.average_late]
)
def test_replicas_are_equal_bit_by_bit_after_a_synchronisation(results_of, name):
    world_size, *_, topology = AVERAGED[name]
    results, late = results_of(world_size), topology.average_late
    for ranks in topology.sets(world_size)[1]:
        assert_equal_replicas([results[rank][(name, "averaged") if late else name] for rank in ranks])


@pytest.mark.parametrize("name", ["rowwise_late", "adam_late"])
def test_a_late_mean_leaves_replicas_apart_by_their_last_changes_alone(results_of, name):
    """Rows that no replica has trained in the last step are equal bit by bit; others are not."""
    world_size, *_, topology = AVERAGED[name]
    results = results_of(world_size)
    for ranks in topology.sets(world_size)[1]:
        (ids, one), (others, two) = (results[rank][name] for rank in ranks)
        last = {i for result in results for i in result["ids"][-1].tolist()}
        both = np.intersect1d(ids, others)
        assert set(ids.tolist()) ^ set(others.tolist()) <= last
        one, two = one[np.isin(ids, both)], two[np.isin(others, both)]
        trained = np.isin(both, list(last))
        np.testing.assert_array_equal(one[~trained], two[~trained])
        assert np.sum(~trained) > 10
        assert trained.sum() == 0 or (one["row"] != two["row"])[trained].any()


def assert_equal_replicas(replicas):
    for replica in replicas[1:]:
        for got, wanted in zip(replica, replicas[0]):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", list(EVICTING))
def test_a_row_that_leaves_one_replica_leaves_all(results_of, name):
    world_size, table, topology = EVICTING[name]
    results = results_of(world_size)
    for ranks in topology.sets(world_size)[1]:
        replicas = [results[rank][name] for rank in ranks]
        assert_equal_replicas([(ids, _without_pool(records)) for (ids, records), _ in replicas])
        for (ids, _), statistics in replicas:
            assert 0 < len(ids) <= (table["limits"].max_rows_per_rank or len(ids))
            assert statistics["evictions"] > 10


def _without_pool(records):
    """Drops the pool: each replica keeps its own recent rows in memory."""
    return records[[field for field in records.dtype.names if field != "pool"]]


def test_a_checkpoint_has_each_shard_once_and_goes_into_any_topology(results_of, checkpoint):
    world_size, *_, topology = AVERAGED["rowwise"]
    found = [result["checkpoint"] for result in results_of(world_size)]
    groups, shards = topology.sets(world_size)
    for ranks in shards:
        assert_equal_replicas([found[rank]["saved"] for rank in ranks])  # a save synchronises
    saved = merged([found[rank]["saved"] for rank in groups[0]])
    for ranks, name in [(range(world_size), "one"), *((ranks, "shared") for ranks in SHARED.sets(world_size)[0])]:
        assert_equal_replicas([saved, merged([found[rank][name] for rank in ranks])])
    for folder in (checkpoint, f"{checkpoint}.again"):
        ids, rows, *_ = read_tables(folder)["item"]
        assert len(np.unique(ids)) == len(ids)
        np.testing.assert_array_equal(ids, saved[0])
        np.testing.assert_array_equal(rows, saved[1]["row"])


@pytest.mark.parametrize("wire", list(WIRES))
def test_rows_and_gradients_travel_narrow_and_ids_do_not(results_of, wire):
    world_size, results = 4, results_of(4)
    for kind, ranks_of_replicas in (("wire", [range(world_size)]), ("shared_wire", SHARED.sets(world_size)[0])):
        for result in results:
            rows, exact = result[kind, wire][0], result[kind, None][0]
            assert np.all(np.abs(rows - exact) <= WIRES[wire] * np.abs(exact))
            assert (rows != exact).any()
        tables = [merged([results[rank][kind, wire][1] for rank in ranks]) for ranks in ranks_of_replicas]
        assert_equal_replicas(tables)
        start = merged([results[rank][kind, None][1] for rank in ranks_of_replicas[0]])
        assert set(tables[0][0].tolist()) == set(WIRE_IDS)
        np.testing.assert_array_equal(tables[0][0], start[0])
        order = np.argsort(WIRE_IDS)
        sizes = sum(np.abs(_wire_gradients(rank)) for rank in range(world_size))[order]
        error = np.abs(tables[0][1]["row"] - start[1]["row"])
        last = np.array(WIRE_IDS)[order] == WIRE_IDS[-1]
        # Values are rounded once on each way, and sums of groups once more. float32 sums of the two runs differ far
        # less.
        assert np.all(error[~last] <= (WIRES[wire] * (1 if kind == "wire" else 2.01) * sizes + 1e-5)[~last])
        assert (error[~last] > 1e-5).any()
        if wire == "float16" and kind == "wire":
            beyond = np.abs(tables[0][1]["row"][last])
            np.testing.assert_allclose(beyond, world_size * 65504.0, rtol=1e-3)
