"""A native table with max_rows, TTL or admission keeps the rows of a dict."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.capacity import CapacityOracle
from tests.oracles.initial_rows import initial_row_oracle
from tests.support.ids import INT64_MAX, INT64_MIN
from tf_fusedrec import optimizers, tf
from tf_fusedrec.files.hash_order import table_seed

RATE = 0.5


def layer(*, names=("t",), accumulate_steps=1, **policy):
    tables = [fr.TableConfig(name=name, dim=3, optimizer=optimizers.SGD(RATE), **policy) for name in names]
    features = [fr.FeatureConfig(name=name, table=name) for name in names]
    return fr.FusedEmbedding(tables, features, accumulate_steps=accumulate_steps)


def step(emb, inputs):
    """One training step whose gradient is 1 everywhere. Returns the rows that the lookup gave."""
    inputs = inputs if isinstance(inputs, dict) else {"t": inputs}
    with tf.GradientTape() as tape:
        out = emb({name: tf.constant(ids, tf.int64) for name, ids in inputs.items()})
        loss = sum(tf.reduce_sum(rows) for rows in out.values())
    tape.gradient(loss, emb.trainable_variables)
    return {name: rows.numpy() for name, rows in out.items()}


def table_of(emb):
    return emb.internals.groups[0].table


def initial(i, name="t"):
    return initial_row_oracle("normal", 0.0, 0.05, table_seed(0, name) % 2**64, i, 3)


def assert_table_is(emb, oracle):
    ids, rows = emb.export_table("t")
    assert ids.tolist() == sorted(oracle.rows)
    want = [initial(i) - RATE * oracle.rows[i][2] for i in ids.tolist()]
    # One float32 rounding per update; an update that is lost or too many shows as 0.5.
    np.testing.assert_allclose(rows, np.reshape(want, [-1, 3]), rtol=0, atol=1e-4)
    _, records = table_of(emb).snapshot("t")
    order = np.argsort(table_of(emb).snapshot("t")[0])
    kept = [oracle.rows[i] for i in ids.tolist()]
    np.testing.assert_array_equal(records["last"][order], [row[0] for row in kept])
    np.testing.assert_array_equal(records["count"][order], [row[1] for row in kept])
    want = {
        "keys": len(oracle.rows), "hits": oracle.hits, "inserts": oracle.inserts, "evictions": oracle.evictions,
        "refused": oracle.refused, "candidates": len(oracle.seen), "left_out": 0,
    }  # fmt: skip
    assert table_of(emb).statistics == {"t": want}


# tests/ops/hash_table/test_properties.py draws all policies; these are the ways of a layer's options to the op.
POLICIES = {
    "lru": {"max_rows": 24, "eviction": "lru"},
    "lfu_ttl_admission": {"max_rows": 20, "eviction": "lfu", "ttl": 9, "admission_count": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_a_dict_after_every_step(policy):
    """Trains skewed ids, some new in every batch. Rows, ages, counts and statistics equal the dict's."""
    options = POLICIES[policy]
    emb, oracle = layer(record_tombstones=True, limits=fr.Limits(**options)), CapacityOracle(**options)
    random = np.random.default_rng(sum(map(ord, policy)))
    returned = False
    for _ in range(25):
        ids = (random.zipf(1.3, 14) % 60 - 5).tolist()
        before = set(oracle.gone)
        rows = step(emb, ids)["t"]
        trained = oracle.lookup(ids)
        value = {i: initial(i) - RATE * oracle.rows[i][2] if i in oracle.rows else initial(i) for i in ids}
        np.testing.assert_allclose(rows, [value[i] for i in ids], rtol=0, atol=1e-4)
        oracle.update(ids)
        returned |= bool(before & set(trained))
        assert_table_is(emb, oracle)
        assert table_of(emb).tombstones("t").tolist() == sorted(oracle.gone)
    assert oracle.evictions > 0 and returned, "the case is too easy"
    if "admission_count" in options:
        assert oracle.refused > 0 and oracle.inserts > 0


def test_a_returning_row_has_its_initial_value_and_fresh_slots():
    emb = fr.FusedEmbedding(
        [fr.TableConfig(name="t", dim=3, optimizer=optimizers.Adam(0.1), limits=fr.Limits(max_rows=2, eviction="lru"))],
        [fr.FeatureConfig(name="t", table="t")],
    )
    first = step(emb, [1])["t"]
    step(emb, [1])
    np.testing.assert_allclose(first, [initial(1)], rtol=1e-6)
    step(emb, [2, 3])
    assert emb.export_table("t")[0].tolist() == [2, 3]
    np.testing.assert_array_equal(step(emb, [1])["t"], first)
    ids, records = table_of(emb).snapshot("t")
    mine = records[ids.tolist().index(1)]
    assert mine["count"] == 1
    # Adam's moments after one gradient of ones, not after three.
    np.testing.assert_allclose(mine["m"], 0.1, rtol=1e-5)
    np.testing.assert_allclose(mine["v"], 0.001, rtol=1e-3)


@pytest.mark.parametrize("second_pool", ["hot", "file"])
def test_rows_on_their_way_to_another_pool_never_leave(second_pool, tmp_path):
    """A moving row is the oldest of its new pool until it arrives, and another row needs room in the same lookup."""
    options = {"hot": {"storage": fr.Storage(dtype="mixed", hot_after=3)},
               "file": {"tier": fr.Tier(memory_budget=8 * 32, folder=str(tmp_path))}}[second_pool]  # fmt: skip
    emb = layer(limits=fr.Limits(max_rows=16, eviction="lru"), **options)
    for ids in ([1, 2], [1, 2], *([i] for i in range(3, 17))):
        step(emb, ids)
    assert table_of(emb).memory["second_rows"] >= 2
    step(emb, [1, 2, 100, 101])
    ids, rows = emb.export_table("t")
    assert {1, 2, 100, 101} <= set(ids.tolist()) and not {3, 4, 5} & set(ids.tolist())
    np.testing.assert_allclose(rows[:2], [initial(1) - 3 * RATE, initial(2) - 3 * RATE], rtol=0, atol=1e-2)


def test_rows_whose_gradients_wait_for_their_update_do_not_leave():
    """With accumulate_steps=3, the rows of three batches stay until their sums are applied."""
    emb = layer(limits=fr.Limits(max_rows=6, eviction="lru"), accumulate_steps=3)
    for ids in ([1, 2], [3, 4], [5, 6]):
        step(emb, ids)
    np.testing.assert_allclose(emb.export_table("t")[1], [initial(i) - RATE / 3 for i in range(1, 7)], atol=1e-5)
    step(emb, [7])
    assert 7 in emb.export_table("t")[0] and not {1, 2} <= set(emb.export_table("t")[0].tolist())
    step(emb, [8])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="rows whose gradients wait, may not leave"):
        step(emb, [9, 10, 11, 12, 13])


def test_a_batch_larger_than_max_rows_is_an_error_and_the_table_stays_readable():
    emb = layer(limits=fr.Limits(max_rows=8, eviction="lru"))
    step(emb, [1, 2, 3])
    for _ in range(2):
        with pytest.raises(tf.errors.ResourceExhaustedError) as error:
            step(emb, list(range(10, 22)))
        for words in ("max_rows", "is 8", "needs 4 rows more", "Remedy: a larger max_rows"):
            assert words in str(error.value)
    step(emb, [3, 4])
    ids, rows = emb.export_table("t")
    assert {3, 4} <= set(ids.tolist())
    np.testing.assert_allclose(rows[ids == 4], [initial(4) - RATE], rtol=0, atol=1e-5)


def test_without_a_policy_max_rows_is_an_error_that_says_so():
    emb = layer(limits=fr.Limits(max_rows=4))
    step(emb, [1, 2, 3, 4])
    with pytest.raises(tf.errors.ResourceExhaustedError, match="eviction is 'none'"):
        step(emb, [5])
    step(emb, [4])
    np.testing.assert_allclose(emb({"t": tf.constant([5])}, training=False)["t"], [initial(5)], rtol=1e-6)
    ids, rows = emb.export_table("t")
    assert ids.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(rows[3], initial(4) - 2 * RATE, rtol=0, atol=1e-5)


def test_limits_and_statistics_are_of_each_table_of_a_group():
    emb = layer(names=("a", "b"), limits=fr.Limits(max_rows=4, eviction="lru"), record_tombstones=True)
    assert len(emb.internals.groups) == 1
    for n in range(6):
        step(emb, {"a": [n, n], "b": [-1, INT64_MIN, INT64_MAX]})
    a, b = table_of(emb).statistics["a"], table_of(emb).statistics["b"]
    assert a == {"keys": 4, "hits": 0, "inserts": 6, "evictions": 2, "refused": 0, "candidates": 0, "left_out": 0}
    assert b == {"keys": 3, "hits": 15, "inserts": 3, "evictions": 0, "refused": 0, "candidates": 0, "left_out": 0}
    assert table_of(emb).tombstones("a").tolist() == [0, 1] and table_of(emb).tombstones("b").size == 0
    assert emb.export_table("b")[0].tolist() == [INT64_MIN, -1, INT64_MAX]
    assert table_of(emb).size("a") == 4


def test_tombstones_name_rows_that_left_and_did_not_return():
    emb = layer(limits=fr.Limits(max_rows=3, eviction="lru"), record_tombstones=True)
    table = table_of(emb)
    for i in range(5):
        step(emb, [i])
    assert table.tombstones("t").tolist() == [0, 1]
    step(emb, [0])  # 0 returns, 2 leaves
    assert table.tombstones("t").tolist() == [1, 2]
    table.remove("t", np.array([3, 77]))
    assert table.tombstones("t").tolist() == [1, 2, 3]
    assert table.evict("t", 1) == 1  # 0 was of the last batch: 4 leaves
    assert table.tombstones("t").tolist() == [1, 2, 3, 4]
    table.forget_tombstones()
    assert table.tombstones("t").size == 0
    step(emb, [5])
    assert table.tombstones("t").size == 0
    unrecorded = layer(limits=fr.Limits(max_rows=3, eviction="lru"))
    for i in range(5):
        step(unrecorded, [i])
    assert table_of(unrecorded).tombstones("t").size == 0


def test_candidates_are_bounded_and_frequent_ids_still_come_in():
    """6,000 rare ids do not keep out a frequent one, because halving forgets them."""
    emb = layer(limits=fr.Limits(admission_count=4, max_candidates=2048))
    for n in range(20):
        frequent = [5] if n >= 8 else []
        step(emb, frequent + list(range(1000 + 300 * n, 1300 + 300 * n)))
        assert table_of(emb).statistics["t"]["candidates"] <= 2048
    assert emb.export_table("t")[0].tolist() == [5]
