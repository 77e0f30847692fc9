"""Groups that share gradients: a rank reads rows of its own group, and all replicas equal one process.

Gradients are small multiples of 1/8 and are added without rounding, so every float must be equal bit for bit.
"""

import dataclasses

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.exchange import linear
from tests.oracles.rank_partition import owner_oracle
from tests.support.graphs import ancestors
from tests.support.layers import merged
from tests.support.logs import logged
from tests.support.ranks import run_ranks
from tf_fusedrec import Limits, Storage, Topology, optimizers, tf
from tf_fusedrec.exchange.collectives import ALL_TO_ALLS

SHARES, STEPS, DIM = 4, 9, linear.DIM  # of the SHARES parts of a batch, ranks have equally many, or one more
GROUPS = Topology(2)
TABLES = {
    "plain": {},
    "zeros": {"unknown": "zeros"},
    "ttl": {"limits": Limits(ttl=3)},
    "admission": {"limits": Limits(admission_count=2, ttl=4)},
    "hot": {"storage": Storage(dtype="mixed", hot_after=3)},
    "cooling": {"storage": Storage(dtype="mixed", hot_after=2), "limits": Limits(frequency_decay_steps=5)},
    "evicting": {"limits": Limits(max_rows_per_rank=60, eviction="lfu")},  # over all shards
}
# A table evicts when its shard is full, so the times of evictions depend on the number of shards.
OF_ONE_SHARD = {"evicting"}
# By name, the lookups before the update of the first. "parts" sends every part's rows, "window" each row once.
MODES = {"sync": 1, "ahead": 1, "parts": 1, "window": 1, "window_ahead": 1, "stale": 2}


def _ids(step, rank, size):
    parts = [np.random.default_rng([step, part]).integers(-60, 60, 7) // (1 + part % 2) for part in range(SHARES)]
    return np.array_split(parts, size)[rank].reshape(-1)


def _gradients(ids, step):
    return (((ids[:, np.newaxis] * 7 + step * 3 + np.arange(DIM)) % 5 - 2) / 8).astype(np.float32)


def _step(embedding, pieces, window=False, lookups_per_update=1):
    return linear.lookups_of(embedding, [{"item": ids} for ids in pieces], window, lookups_per_update)


def _train(mode, table, topology):
    """Body: returns this rank's rows by step, its records and its statistics."""
    rank, size = fr.rank(), fr.size()
    options = dict(TABLES[table])
    if table == "evicting":
        limits = options["limits"]
        options["limits"] = dataclasses.replace(
            limits, max_rows_per_rank=limits.max_rows_per_rank // (size // topology.groups)
        )
    embedding = linear.make(f"{mode}_{table}", optimizers.SGD(0.125), topology, options, gradient_op="sum")

    window = mode.startswith("window")

    def pieces(step):
        return np.array_split(_ids(step, rank, size), 3 if window else 2 if mode == "parts" else 1)

    def update(state, step, **options):
        gradients = {i: tf.constant(_gradients(ids, step)) for i, ids in enumerate(pieces(step))}
        state.update(state.send_gradients(gradients), **options)

    found, waiting, coming = [], None, _step(embedding, pieces(0), window, MODES[mode]).send_ids()
    for step in range(STEPS):
        current = coming.look_up()
        found.append(np.concatenate([rows.numpy() for rows in current.return_rows()]))
        if waiting is not None:
            update(waiting, step - 1, staleness=1)
        coming = _step(embedding, pieces(step + 1), window, MODES[mode]).send_ids()
        if mode.endswith("ahead"):
            coming = coming.look_ahead()
        if mode == "stale":
            waiting = current
        else:
            update(current, step)
    if waiting is not None:
        update(waiting, STEPS - 1, staleness=1)
    return found, linear.records(embedding), embedding.internals.groups[0].table.statistics["item"]


ALL = [(mode, table) for mode in MODES for table in TABLES]


def _third(number):
    """Returns every third case. Each mode and each table is in every third, with other partners."""
    return [(mode, table) for m, mode in enumerate(MODES) for t, table in enumerate(TABLES) if (m + t) % 3 == number]


FEW = [("sync", "plain"), ("ahead", "ttl"), ("parts", "admission"), ("window", "zeros"), ("stale", "hot")]
# Cases by ranks and groups. Two groups meet every mode with every table, two thirds of them as groups of one rank.
CASES = {(2, 2): _third(0) + _third(1), (4, 2): _third(2), (3, 3): FEW}


def _train_all(topology, cases=ALL):
    return {case: _train(*case, topology) for case in cases}


@pytest.fixture(scope="module")
def one_process():
    (result,) = run_ranks(_train_all, 1, topology=Topology())
    return result


@pytest.fixture(scope="module", params=CASES, ids=lambda it: f"{it[0]}_ranks_in_{it[1]}_groups")
def trained(request):
    ranks, groups = request.param
    topology = Topology(groups)
    return topology, run_ranks(_train_all, ranks, topologies=[topology], topology=topology, cases=CASES[request.param])


def test_replicas_hold_what_one_process_holds(trained, one_process):
    topology, results = trained
    for mode, table in results[0]:
        _check(topology, [result[mode, table] for result in results], table, one_process[mode, table])


def _check(topology, of_ranks, table, of_one_process):
    groups, shards = topology.sets(len(of_ranks))
    for ranks in shards:
        for rank in ranks[1:]:
            _assert_same_records(of_ranks[rank][1], of_ranks[ranks[0]][1])
            assert of_ranks[rank][2] == of_ranks[ranks[0]][2]
    if table in OF_ONE_SHARD and len(shards) > 1:
        assert all(statistics["evictions"] > 5 for _, _, statistics in of_ranks)
        return
    rows, records, statistics = of_one_process
    for step in range(STEPS):
        of_step = np.concatenate([found[step] for found, _, _ in of_ranks])
        np.testing.assert_array_equal(of_step, rows[step], err_msg=f"rows of step {step}")
    for ranks in groups:
        _assert_same_records(merged([of_ranks[rank][1] for rank in ranks]), records)
        assert {kind: sum(of_ranks[rank][2][kind] for rank in ranks) for kind in statistics} == statistics


def _assert_same_records(got, wanted):
    np.testing.assert_array_equal(got[0], wanted[0])
    for field in wanted[1].dtype.names:
        np.testing.assert_array_equal(got[1][field], wanted[1][field], err_msg=field)


def test_one_process_has_the_same_in_every_mode_whose_rows_are_fresh(one_process):
    """Micro-batches are one tick of the table's clock, so policies decide as for whole batches."""
    for mode, table in one_process:
        if MODES[mode] == 1:
            (_, records, statistics), (_, wanted, counts) = one_process[mode, table], one_process["sync", table]
            assert statistics == counts, (mode, table)
            _assert_same_records(records, wanted)


def test_the_tables_are_not_too_easy(one_process):
    for mode in MODES:
        assert one_process[mode, "admission"][2]["refused"] > 5
        for table in ("ttl", "admission", "evicting"):
            assert one_process[mode, table][2]["evictions"] > 5
        assert set(one_process[mode, "hot"][1][1]["pool"]) == {0, 1}
        cooling = one_process[mode, "cooling"][1][1]
        has_cooled = (cooling["pool"] == 1) & (cooling["count"] >= TABLES["cooling"]["storage"].hot_after)
        # Where two lookups hold rows, one may have been held when it got hot, and has never been float32.
        assert 0 in cooling["pool"] and (has_cooled.sum() > 3 or MODES[mode] > 1)


MANY = 6000
BY_GROUPS = [Topology(groups) for groups in (1, 2, 4)]


def _many_ids(rank):
    return np.random.default_rng(rank).integers(0, 4 * MANY, MANY)


def _volumes():
    """Body: returns received ids, bytes of read rows, keys and traffic of two micro-batches, by number of groups."""
    found = {}
    ids = _many_ids(fr.rank())
    for topology in BY_GROUPS:
        embedding = linear.make(f"volume_{topology.groups}", optimizers.SGD(0.1), topology)
        for _ in range(2):
            step = _step(embedding, np.array_split(ids, 2)).send_ids().look_up()
            step.return_rows()
        requests = [route.request for route in step.routes]
        asked = sum(int(message.shape[0] - len(splits)) for message, splits in requests)
        sizes = [answer.rows.shape.num_elements() * 4 for answer in step.answers]
        of_layer = embedding.internals.groups[0]
        found[topology.groups] = asked, sum(sizes), of_layer.table.statistics["item"]["keys"], of_layer.traffic.numpy()
    distinct = sum(len(np.unique(part)) for part in np.array_split(ids, 2))
    return distinct, found


def _collectives():
    """Body: returns, by groups, the calls of each kind in the traced step of a layer, and their dependencies."""
    return {topology.groups: _collectives_of(topology) for topology in BY_GROUPS[1:]}


def _collectives_of(topology):
    embedding = linear.make(f"in_{topology.groups}_traced", optimizers.SGD(0.1), topology)
    ops = linear.step_function(embedding).get_concrete_function().graph.get_operations()
    exchanges = [op for op in ops if op.type in ALL_TO_ALLS]
    kinds = {op.name.split("traced.")[-1].partition(".")[2].partition(".")[2]: op for op in exchanges}
    of_table = {op.type.partition(">")[2]: op for op in ops if op.type.startswith("Fusedrec>Table")}
    assert not any(op.get_attr("read_rows") for op in ops if op.type == "Fusedrec>TableLookup")
    found = {**kinds, **of_table}
    before = {kind: ancestors(op) for kind, op in found.items()}
    waits = {kind: {other for other, op in found.items() if op in before[kind]} for kind in found}
    return sorted(kinds), len(exchanges), waits


BAD_ID = 7


def _not_finite():
    """Body: returns records, statistics and messages after two updates. Rank 3 sends a NaN in the second."""
    ids = np.arange(20)
    embedding = linear.make("not_finite", optimizers.SGD(0.125), GROUPS, gradient_op="sum")
    records = []
    with logged("tables") as messages:
        for step in range(2):
            grads = np.ones([len(ids), DIM], np.float32)
            if fr.rank() == 3 and step == 1:
                grads[BAD_ID, 1] = np.nan
            state = _step(embedding, [ids]).send_ids().look_up()
            state.update(state.send_gradients({0: tf.constant(grads)}))
            records.append(linear.records(embedding))
    return records, embedding.internals.groups[0].table.statistics["item"], messages


def _of_four():
    return _volumes(), _collectives(), _not_finite()


@pytest.fixture(scope="module")
def of_four():
    return run_ranks(_of_four, 4, topologies=BY_GROUPS)


def test_a_rank_reads_as_many_rows_with_groups_as_without(of_four):
    volumes = [result[0] for result in of_four]
    distinct = sum(one for one, _ in volumes)
    for topology in BY_GROUPS:
        groups = topology.groups
        assert sum(found[groups][0] for _, found in volumes) == distinct
        bytes_of_rows = [found[groups][1] for _, found in volumes]
        without = max(found[1][1] for _, found in volumes)
        # Buffers have bucketed sizes: at most a quarter more.
        assert max(bytes_of_rows) <= 1.25 * without, f"{groups} groups"
        # Each replica has the ids of all groups, although it reads its own group's.
        assert sum(found[groups][2] for _, found in volumes) == groups * sum(found[1][2] for _, found in volumes)


def _bytes_of_a_step(topology, ranks):
    """Returns the bytes of ids, rows and gradients that all ranks send for two micro-batches, computed from the ids."""
    groups, shards, row_bytes, total = topology.groups, ranks // topology.groups, 4 * DIM, 0
    for part in range(2):
        ids = [np.unique(np.array_split(_many_ids(rank), 2)[part]).tolist() for rank in range(ranks)]
        shard = {i: owner_oracle(i, shards, "hash_range") for i in set().union(*ids)}
        replica = {i: owner_oracle(i, ranks, "hash_range") % groups for i in shard}
        for mine in topology.sets(ranks)[0]:
            for place, rank in enumerate(mine):
                away = sum(shard[i] != place for i in ids[rank])
                total += away * (8 + 2 * row_bytes) + 8 * (shards - 1)
        of_groups = [set().union(*[ids[rank] for rank in mine]) for mine in topology.sets(ranks)[0]]
        if groups == 2:  # copies
            total += sum(len(of_group) for of_group in of_groups) * (8 + row_bytes) + ranks * 8
        elif groups > 2:
            to_ranges = sum(replica[i] != group for group, of_group in enumerate(of_groups) for i in of_group)
            gathered = (groups - 1) * len(shard)
            total += (to_ranges + gathered) * (8 + row_bytes) + ranks * 2 * 8 * (groups - 1)
    return total


@pytest.mark.parametrize("topology", BY_GROUPS, ids=lambda topology: f"{topology.groups}_groups")
def test_the_bytes_that_are_counted_are_those_that_are_sent(of_four, topology):
    counted = [result[0][1][topology.groups][3] for result in of_four]
    assert sum(traffic[2] for traffic in counted) == 2 * _bytes_of_a_step(topology, len(of_four))


COLLECTIVES = {
    2: {"ids", "rows", "gradients", "replicas.ids", "replicas.gradients"},
    # A group of one rank has no exchange of its own.
    4: {"replicas.ids", "replicas.ranges", "replicas.gradients", "replicas.sums"},
}


@pytest.mark.parametrize("groups", COLLECTIVES)
def test_the_collectives_of_a_step_and_no_row_waits_for_replicas(of_four, groups):
    kinds, count, waits = of_four[0][1][groups]
    assert set(kinds) == COLLECTIVES[groups] and count == len(kinds)
    told = {"replicas.ids", "replicas.ranges"} & COLLECTIVES[groups]
    if "rows" in kinds:
        assert not {kind for kind in waits["rows"] if kind.startswith("replicas")} and "TableRead" in waits["rows"]
    for kind in told:  # so they may run under the rows and the dense compute
        assert not waits[kind] & {"rows", "gradients", "TableRead"}
    assert told <= waits["TableLookup"] and "TableLookup" in waits["TableApplyGradients"]
    assert not waits["TableLookup"] & {"rows", "gradients"}


def test_a_gradient_that_is_not_finite_leaves_its_row_out_on_all_replicas(of_four):
    results = [result[2] for result in of_four]
    holders = [rank for rank, (records, _, _) in enumerate(results) if BAD_ID in records[0][0]]
    assert holders in [list(ranks) for ranks in GROUPS.sets(4)[1]]
    for rank, (((ids, before), (again, after)), statistics, texts) in enumerate(results):
        np.testing.assert_array_equal(ids, again)
        is_same = np.all(before["row"] == after["row"], axis=1)
        np.testing.assert_array_equal(is_same, ids == BAD_ID)
        assert statistics["left_out"] == len(texts) == (rank in holders)
        for text in texts:
            assert text.startswith(f"the gradient of id {BAD_ID} of table 'item' (features 'item') from the sum over")
