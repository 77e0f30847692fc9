"""accumulate_steps=k: one update from k batches equals one of the joined batch, for every rule (MTGRBoost, 5.2)."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.oracles.optimizers import CASES, OF_EACH_RULE, OptimizerOracle
from tests.support.layers import layer_of, train
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.tables import places

DIM, START, STEPS_PER_UPDATE, UPDATES = 6, 0.25, 3, 4
RATE = 0.1


def layer(optimizer, accumulate_steps=1, gradient_op="average", backend="native", **table):
    config = fr.TableConfig("t", DIM, optimizer, fr.Constant(value=START), **table)
    return layer_of(config, accumulate_steps=accumulate_steps, gradient_op=gradient_op, backend=backend)


def step(emb, ids, grads):
    return train(emb, {"t": tf.constant(ids, tf.int64)}, lambda rows: tf.reduce_sum(rows * grads))["t"]


def batches(seed):
    """Returns UPDATES lists of STEPS_PER_UPDATE batches of repeated ids and gradients. One batch is empty."""
    random = np.random.default_rng(seed)
    for _ in range(UPDATES):
        sizes = random.permutation([7, 4, 0])
        yield [(random.integers(0, 9, n).tolist(), random.normal(size=(n, DIM))) for n in sizes]


@pytest.mark.parametrize(
    ("name", "clipnorm", "gradient_op"),
    [("adam", 0.0, "sum"), ("sgd", 0.5, "sum"), ("sgd", 0.5, "average"), ("momentum", 0.0, "average"),
     *((name, 0.0, "average") for name in OF_EACH_RULE)],
)  # fmt: skip
def test_k_batches_make_the_update_of_the_big_one(name, clipnorm, gradient_op):
    """Rows and slots equal a formula in float64, and a layer that gets the joined batch."""
    case = CASES[name]
    optimizer = getattr(optimizers, case.record)(RATE, clipnorm=clipnorm, **case.options)
    emb, big = layer(optimizer, STEPS_PER_UPDATE, gradient_op), layer(optimizer)
    share = 1 / STEPS_PER_UPDATE if gradient_op == "average" else 1.0
    oracle = OptimizerOracle(np.full(DIM, START), case.rule, clipnorm=clipnorm, **case.options)
    for parts in batches(len(name)):
        before = dict(zip(*map(list, emb.export_table("t"))))
        for ids, grads in parts:
            rows = step(emb, ids, grads)
            for i, row in zip(ids, rows):  # nothing moves before the last batch of an update
                np.testing.assert_array_equal(row, before.get(i, np.full(DIM, START)))
        ids = [i for part, _ in parts for i in part]
        grads = np.concatenate([grads for _, grads in parts]) * share
        step(big, ids, grads)
        oracle.step(ids, grads, RATE)
    ids, rows = emb.export_table("t")
    assert ids.tolist() == sorted(oracle.rows)
    # Sums of float32 in another order; Adam's quotients of small numbers multiply that.
    np.testing.assert_allclose(rows, [oracle.rows[i] for i in ids.tolist()], rtol=2e-5, atol=2e-6)
    records, wanted = (e.internals.groups[0].table.snapshot("t")[1] for e in (emb, big))
    for field in set(records.dtype.names) - {"last", "count", "updated", "pool"}:
        np.testing.assert_allclose(records[field], wanted[field], rtol=2e-5, atol=2e-6, err_msg=field)
    assert int(emb.optimizers["t"].iterations) == UPDATES


def test_in_a_graph_with_a_schedule_that_counts_updates():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    emb = layer(optimizers.SGD(schedule), accumulate_steps=2, gradient_op="sum")
    traced = tf.function(lambda: step(emb, [1, 1], np.ones((2, DIM))))
    moved = []
    for _ in range(6):
        traced()
        moved.append(START - float(emb.export_table("t")[1][0, 0]))
    np.testing.assert_allclose(moved, [0, 2, 2, 3, 3, 3.5], atol=1e-6)


def test_clear_forgets_what_waits():
    emb = layer(optimizers.SGD(1.0), accumulate_steps=2, gradient_op="sum")
    step(emb, [1], np.ones((1, DIM)))
    emb.internals.groups[0].table.clear()
    for moved in (0, 1):
        step(emb, [1], np.ones((1, DIM)))
        np.testing.assert_allclose(emb.export_table("t")[1], START - 2 * moved, atol=1e-6)


def test_host_rows_on_a_gpu_accumulate_no_steps(monkeypatch):
    monkeypatch.setattr(places, "on_gpu", lambda: True)
    layer(optimizers.SGD(1.0), accumulate_steps=2)
    layer(optimizers.SGD(1.0), tier=fr.Tier(host_rows=True))
    with pytest.raises(ValueError, match=r"with host_rows got accumulate_steps=2, and must have 1.*Use Frozen"):
        layer(optimizers.SGD(1.0), accumulate_steps=2, tier=fr.Tier(host_rows=True))


def test_bad_numbers_of_steps_are_refused():
    for steps in (0, -1, 2.0):
        with pytest.raises(ValueError, match="accumulate_steps must be an int >= 1"):
            layer(optimizers.SGD(1.0), accumulate_steps=steps)
    with pytest.raises(ValueError, match="accumulate_steps 2 needs backend='native'"):
        layer(keras.optimizers.SGD(1.0), accumulate_steps=2, backend="tfra")
