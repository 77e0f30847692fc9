"""Rows with non-finite gradients stay unchanged, all others train, and one message names the first."""

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.support.logs import logged
from tests.support.ranks import run_ranks
from tf_fusedrec import optimizers, tf

DIM, STEPS, BAD_STEP, BAD_ID = 4, 4, 2, 77


def _layer(rule, **layer):
    tables = [fr.TableConfig(name, DIM, getattr(optimizers, rule)(0.1)) for name in ("item", "user")]
    features = [fr.FeatureConfig("item", "item"), fr.FeatureConfig("user", "user"), fr.FeatureConfig("seen", "item")]
    return fr.FusedEmbedding(features, tables, **layer)


def _run(rule, bad_label, **layer):
    """Returns rows by table, statistics and messages after some steps. One rank, or one process, has the label."""
    embedding, rank = _layer(rule, **layer), fr.rank()
    is_bad_rank = rank == fr.size() - 1

    @tf.function(reduce_retracing=True)
    def train(ids, labels):
        with tf.GradientTape() as tape:
            rows = embedding(ids)
            loss = sum(tf.reduce_mean((tf.reduce_sum(of_feature, 1) - labels) ** 2) for of_feature in rows.values())
        tape.gradient(loss, embedding.trainable_variables)

    with logged("tables") as messages:
        for step in range(STEPS):
            items = np.arange(6) + 3 * step + rank
            labels = np.linspace(0, 1, 6).astype(np.float32)
            if is_bad_rank and step in (BAD_STEP, BAD_STEP + 1):
                items[2], labels[2] = BAD_ID, bad_label
            train({"item": tf.constant(items), "user": tf.constant(items + 1000), "seen": tf.constant(items)}, labels)
    table = embedding.internals.groups[0].table
    return {name: embedding.export_table(name) for name in ("item", "user")}, table.statistics, messages


def _on_ranks():
    return _run("Adam", np.nan), _run("Adam", 0.5)


def test_one_bad_label_of_one_rank_harms_its_own_rows_alone():
    results = run_ranks(_on_ranks, 2)
    texts = [text for (_, _, texts), _ in results for text in texts]
    assert len(texts) == 2 and not any(texts for _, (_, _, texts) in results)
    for table, id_, features in (("item", BAD_ID, "'item', 'seen'"), ("user", BAD_ID + 1000, "'user'")):
        (text,) = [text for text in texts if f"table '{table}'" in text]
        assert text.startswith(f"the gradient of id {id_} of table '{table}' (features {features}) from rank 1")
        assert f"in update {BAD_STEP + 1} is not finite" in text and "Such rows of the table in this update: 1." in text
        assert sum(statistics[table]["left_out"] for (_, statistics, _), _ in results) == 2  # of both bad steps
        (bad_ids, bad_rows), (ids, rows) = (
            [np.concatenate(parts) for parts in zip(*(result[i][0][table] for result in results))] for i in (0, 1)
        )
        np.testing.assert_array_equal(bad_ids, ids)
        others = ids != id_
        np.testing.assert_array_equal(bad_rows[others], rows[others])
        assert np.isfinite(bad_rows).all() and (bad_rows[~others] != rows[~others]).all()


@pytest.mark.parametrize("rule", ["SGD", "Ftrl"])
def test_sums_that_wait_leave_the_row_out_of_their_update(rule):
    """Two steps make one update. The row is left out once, also if its second gradient is finite."""
    rows, statistics, texts = _run(rule, np.inf, accumulate_steps=2)
    untouched = _layer(rule)
    untouched({"item": tf.constant([BAD_ID])})
    ids, of_table = rows["item"]
    np.testing.assert_array_equal(of_table[ids == BAD_ID], untouched.export_table("item")[1])
    assert np.isfinite(of_table).all() and len(texts) == 2
    assert statistics["item"]["left_out"] == statistics["user"]["left_out"] == 1
