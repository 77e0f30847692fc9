"""Native tables on 4 real processes equal one process: rows, ages, counts and statistics.

Initial rows, admission and TTL are functions of the id and the number of steps, which all ranks share. max_rows limits
each rank, so R ranks keep R times as many rows. Evictions depend on the owner's other rows, so test_capacity.py tests
them on one rank.
"""

import dataclasses

import numpy as np
import pytest

from tests.support.ids import INT64_MIN
from tests.support.ranks import run_ranks
from tf_fusedrec import Limits, Storage, Tier

WORLD_SIZE, STEPS, SAMPLES, DIM = 4, 6, 12, 4
# Names of rules of tf_fusedrec.optimizers with their options, of the layer, of the table.
SCENARIOS = {
    "adam": {"rule": "Adam"},
    "adagrad_sum": {"rule": "Adagrad", "layer": {"gradient_op": "sum"}},
    "any_int64": {"rule": "RowWiseAdagrad"},
    "a_rank_with_nothing": {"rule": "RowWiseAdagrad"},
    "admission_and_ttl": {
        "rule": "Adagrad",
        "table": {"limits": Limits(admission_count=2, ttl=2), "record_tombstones": True},
    },
    "accumulation": {"rule": "Adam", "layer": {"accumulate_steps": 3}},
    # Random bits are of the number, its column and the step: with gradients whose sums are exact, all bits are equal.
    "stochastic_rounding": {
        "rule": "SGD", "layer": {"gradient_op": "sum"},
        "table": {"storage": Storage(dtype="bfloat16", stochastic_rounding=True)},
    },
    "tier_with_look_ahead": {"rule": "Adam", "table": {"tier": Tier(memory_budget=40 * 80)}},
}  # fmt: skip
BITWISE = ("stochastic_rounding",)


def _batches(scenario):
    """Yields lists of samples, a pure function of the scenario. A sample is ids of feature "a" and two ids of feature
    "b".
    """
    random = np.random.default_rng(len(scenario))
    vocabulary = 200 if scenario == "tier_with_look_ahead" else 25

    def ids(n):
        if scenario == "any_int64":
            return np.where(random.random(n) < 0.3, INT64_MIN + random.integers(0, 9, n), random.integers(-9, 9, n))
        return random.integers(0, vocabulary, n)

    return [
        [(ids(random.integers(0, 5)).tolist(), ids(2).tolist()) for _ in range(SAMPLES)] for _ in range(STEPS)
    ]  # fmt: skip


def _mine(scenario, batch, rank, size):
    weights = np.arange(1, size + 1)
    if scenario == "a_rank_with_nothing" and size > 1:
        weights[-1] = 0
    bounds = np.round(np.concatenate([[0], np.cumsum(weights)]) / weights.sum() * SAMPLES).astype(int)
    return batch[bounds[rank] : bounds[rank + 1]]


def _train(scenario, folder):
    import tf_fusedrec as fr
    from tf_fusedrec import optimizers, tf

    options = SCENARIOS[scenario]
    rank, size = fr.rank(), fr.size()
    table = {"dim": DIM, "optimizer": getattr(optimizers, options["rule"])(0.125), **options.get("table", {})}
    if "tier" in table:
        table["tier"] = dataclasses.replace(table["tier"], folder=folder)
    emb = fr.FusedEmbedding(
        [fr.TableConfig(name=name, **table) for name in ("item", "user")],
        [fr.FeatureConfig(name="a", table="item"), fr.FeatureConfig(name="b", table="user", combiner="sum")],
        name=scenario, **options.get("layer", {}),
    )  # fmt: skip
    average = options.get("layer", {}).get("gradient_op", "average") == "average"

    def inputs(n):
        mine = _mine(scenario, _batches(scenario)[n], rank, size) if n < STEPS else []
        a = tf.ragged.constant([a for a, _ in mine], tf.int64, ragged_rank=1, row_splits_dtype=tf.int64)
        return {"a": a, "b": tf.constant(np.array([b for _, b in mine], np.int64).reshape(-1, 2))}

    @tf.function(reduce_retracing=True)
    def step(batch, coming):
        emb.prefetch(coming)
        with tf.GradientTape() as tape:
            out = emb(batch)
            if scenario in BITWISE:
                loss = tf.reduce_sum(out["a"].flat_values * 0.25) + tf.reduce_sum(out["b"] * 0.125)
            else:
                loss = tf.reduce_sum(out["a"].flat_values ** 2) + tf.reduce_sum(tf.sin(5 * out["b"]))
            loss *= size if average else 1  # losses are sums, so an average over ranks must be undone
        tape.gradient(loss, emb.trainable_variables)
        return out["a"].flat_values

    ids = inputs(0)["a"].flat_values.numpy()
    evaluated = emb(inputs(0), training=False)["a"].flat_values.numpy()
    for n in range(STEPS):
        rows = step(inputs(n), inputs(n + 2)).numpy()
        if n == 0:
            first = dict(zip(ids.tolist(), zip(evaluated, rows)))
    backend = emb.internals.groups[0].table
    return {
        "snapshots": {name: backend.snapshot(name) for name in ("item", "user")},
        "statistics": {name: backend.statistics[name] for name in ("item", "user")},
        "tombstones": backend.tombstones("item"),
        "first": first,
        "second_rows": backend.memory["second_rows"],
    }


def _read_external(checkpoint):
    """Looks up ids of all ranks. Returns the rows of the checkpoint, and the number of rows that this rank holds."""
    import tf_fusedrec as fr
    from tf_fusedrec import tf

    emb = fr.FusedEmbedding(
        [fr.TableConfig(name="author", dim=DIM, external=fr.External(checkpoint, table="user"))],
        [fr.FeatureConfig(name="author", table="author")], name="external",
    )  # fmt: skip
    ids = np.arange(-3, 60)[fr.rank() :: fr.size()]
    rows = emb({"author": tf.constant(ids)})["author"]
    return dict(zip(ids.tolist(), rows.numpy())), emb.export_table("author")[0]


def train_all(folder, checkpoint):
    """Body: trains every scenario, so one launch serves all."""
    results = {scenario: _train(scenario, folder) for scenario in SCENARIOS}
    return results, _read_external(checkpoint)


def write_checkpoint(folder):
    """Writes a source for external tables from one process: ids 0 to 49 with distinct rows."""
    import tf_fusedrec as fr
    from tf_fusedrec import optimizers, tf

    emb = fr.FusedEmbedding(
        [fr.TableConfig(name="user", dim=DIM, optimizer=optimizers.SGD(0.1))],
        [fr.FeatureConfig(name="user", table="user")], name="source",
    )  # fmt: skip
    rows = emb({"user": tf.range(50)})["user"].numpy()
    fr.checkpoint.save(folder, emb)
    return rows


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("source"))
    return folder, write_checkpoint(folder)


@pytest.fixture(scope="module")
def one_process(source, tmp_path_factory):
    return run_ranks(train_all, 1, folder=str(tmp_path_factory.mktemp("tier")), checkpoint=source[0])


def merged(results, scenario, table):
    """Returns the records of all ranks as one table by ascending id. No id may be on two ranks."""
    parts = [rank[0][scenario]["snapshots"][table] for rank in results]
    ids, records = (np.concatenate(column) for column in zip(*parts))
    assert len(np.unique(ids)) == len(ids), "an id lives on two ranks"
    order = np.argsort(ids)
    return ids[order], records[order]


def total(results, scenario, table):
    """Returns statistics summed over ranks. Only its owner counts an id."""
    parts = [rank[0][scenario]["statistics"][table] for rank in results]
    return {kind: sum(part[kind] for part in parts) for kind in parts[0]}


def test_all_ranks_together_equal_one_process(one_process, source, tmp_path):
    results = run_ranks(train_all, WORLD_SIZE, folder=str(tmp_path), checkpoint=source[0])
    for scenario in SCENARIOS:
        check_scenario(results, one_process, scenario)
    check_external(results, *source)


def check_scenario(results, one_process, scenario):
    for table in ("item", "user"):
        what = f"{scenario} {table}"
        ids, records = merged(results, scenario, table)
        want_ids, want = merged(one_process, scenario, table)
        np.testing.assert_array_equal(ids, want_ids, err_msg=what)
        for field in set(records.dtype.names) - {"pool"}:
            if records[field].dtype.kind == "u" or scenario in BITWISE:  # ages, counts, versions; bits of bfloat16
                np.testing.assert_array_equal(records[field], want[field], err_msg=f"{what} {field}")
            else:  # sums over ranks are added in another order than over samples; see test_ranks.py
                np.testing.assert_allclose(records[field], want[field], rtol=2e-5, atol=2e-6, err_msg=f"{what} {field}")
        assert total(results, scenario, table) == total(one_process, scenario, table), what
    gone = np.sort(np.concatenate([rank[0][scenario]["tombstones"] for rank in results]))
    np.testing.assert_array_equal(gone, one_process[0][0][scenario]["tombstones"])
    single = one_process[0][0][scenario]["first"]
    for rank in results:
        for i, (evaluated, trained) in rank[0][scenario]["first"].items():
            np.testing.assert_array_equal(evaluated, single[i][0], err_msg=f"{scenario} initial row of {i}")
            np.testing.assert_array_equal(trained, single[i][1], err_msg=f"{scenario} initial row of {i}")


def check_external(results, checkpoint, rows):
    held = np.concatenate([ids for _, (_, ids) in results])
    np.testing.assert_array_equal(np.sort(held), np.arange(50))
    answers = {i: row for _, (asked, _) in results for i, row in asked.items()}
    for i in range(-3, 60):
        np.testing.assert_array_equal(answers[i], rows[i] if 0 <= i < 50 else np.zeros(DIM))


def test_the_scenarios_are_not_too_easy(one_process, source):
    """In one process, rows were refused, expired and returned, and some lay in the file."""
    results = one_process[0][0]
    both = total(one_process, "admission_and_ttl", "item")
    assert both["refused"] > 10 and both["evictions"] > 3 and both["inserts"] > both["keys"] > 0
    assert len(results["admission_and_ttl"]["tombstones"]) > 0
    assert results["tier_with_look_ahead"]["second_rows"] > 20
    assert INT64_MIN in results["any_int64"]["snapshots"]["item"][0]
    check_external(one_process, *source)
