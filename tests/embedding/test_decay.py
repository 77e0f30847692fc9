"""Rows of a mixed table that cool, through checkpoints: full, delta, of a run without decay, and resumed."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tf_fusedrec import tf

DIM, HOT_AFTER, STEPS = 3, 3, 8


def layer(decay=STEPS, rounding=True):
    config = fr.TableConfig(
        "t", DIM, fr.optimizers.Adagrad(0.1), storage=fr.Storage("mixed", rounding, HOT_AFTER),
        limits=fr.Limits(frequency_decay_steps=decay), record_tombstones=True,
    )  # fmt: skip
    return fr.FusedEmbedding([config], [fr.FeatureConfig("f", "t")])


def train(emb, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((emb({"f": tf.constant(ids, tf.int64)})["f"] - 1 / 3) ** 2)
    tape.gradient(loss, emb.trainable_variables)


def table_of(emb):
    return emb.internals.groups[0].table


def state_of(emb):
    ids, records = table_of(emb).snapshot("t")
    return table_of(emb).clock, ids.tolist(), records.tobytes()


def hot(emb):
    ids, records = table_of(emb).snapshot("t")
    return set(ids[records["pool"] == 0].tolist())


def batches(count):
    """Batches of a set of popular ids that changes every 12 steps."""
    random = np.random.default_rng(5)
    return [(step // 12 * 10 + random.geometric(0.2, 6)).tolist() for step in range(count)]


def test_a_delta_holds_the_rows_that_were_demoted(tmp_path):
    emb = layer()
    for _ in range(4):
        train(emb, range(20))
    checkpointer = fr.checkpoint.Checkpointer(tmp_path, emb, full_every=8)
    checkpointer.save()
    for _ in range(2 * STEPS):
        train(emb, [99])
    assert hot(emb) == {99}, "no row but this was looked up since the full save"
    checkpointer.save()
    checkpointer.wait()
    loaded = layer()
    fr.checkpoint.load(tmp_path, loaded)
    assert state_of(loaded) == state_of(emb)
    assert table_of(loaded).memory["rows"] == table_of(emb).memory["rows"] == 1
    ids, rows = loaded.export_table("t")
    of_emb, records = table_of(emb).snapshot("t")
    np.testing.assert_array_equal(rows[np.argsort(ids)], records["row"][np.argsort(of_emb)])
    np.testing.assert_array_equal(rows, loaded({"f": tf.constant(ids)}, training=False)["f"])


@pytest.mark.parametrize("stop", [13, 21, 24, 31])
def test_a_run_that_is_resumed_demotes_as_one_that_goes_through(stop, tmp_path):
    through, before, after = layer(), layer(), layer()
    demoted = 0
    for step, ids in enumerate(batches(44)):
        if step == stop:
            fr.checkpoint.save(tmp_path, before)
            fr.checkpoint.load(tmp_path, after)
        was_hot = hot(through)
        train(through, ids)
        train(before if step < stop else after, ids)
        demoted += len(was_hot - hot(through))
    assert demoted > 5
    assert state_of(after) == state_of(through)


def test_a_checkpoint_of_a_run_without_decay_loads(tmp_path):
    emb, loaded = layer(decay=0), layer()
    for _ in range(HOT_AFTER * 4):
        train(emb, range(20))
    for _ in range(STEPS * 3):
        train(emb, [99])
    assert hot(emb) == {*range(20), 99}
    fr.checkpoint.save(tmp_path, emb)
    fr.checkpoint.load(tmp_path, loaded)
    assert state_of(loaded) == state_of(emb)
    for _ in range(STEPS):
        train(loaded, [99])
    assert hot(loaded) == {99}
    ids, records = table_of(loaded).snapshot("t")
    _, old = table_of(emb).snapshot("t")
    cold = ids != 99
    np.testing.assert_array_equal(records["count"][cold], old["count"][cold])
    # float16 has steps of at most 2**-11 of a number below 1 and above 2**-14, and stochastic rounding errs by one.
    np.testing.assert_allclose(records["row"][cold], old["row"][cold], rtol=2**-10, atol=2**-24)
    assert (records["row"][cold] == records["row"][cold].astype(np.float16)).all()
