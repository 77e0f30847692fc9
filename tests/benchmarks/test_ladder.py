"""benchmarks.ladder: its variants train the same rows, each with one technique more; its fields by hand."""

import itertools

import numpy as np
import pytest

from benchmarks.ladder import __main__ as ladder
from benchmarks.ladder import variants
from models.build import columns, make_embedding
from tf_fusedrec import ops, tf

TOKENS = np.array([5, 0, 12, 1] * 8)


def test_every_arm_has_one_technique_more():
    assert list(variants.VARIANTS) == ["apart", "merged", "deduplicated", "balanced"]
    for number, variant in enumerate(variants.VARIANTS.values()):
        assert list(variant) == [True] * number + [False] * (3 - number)


@pytest.mark.parametrize("balanced", [False, True])
def test_batches_have_every_row_once(balanced):
    tokens = variants.train_rows(steps=20, ranks=2)
    steps = variants.plan(tokens, 2, balanced)
    rows = [row for step in steps for row in step]
    assert sorted(itertools.chain(*rows)) == list(range(320)) and all(len(step) == 2 for step in steps)
    costs = np.array([[variants.COST.of(tokens)[part].sum() for part in step] for step in steps[:-1]])
    gap = (np.abs(costs[:, 0] - costs[:, 1]) / costs.mean(axis=1)).mean()
    assert gap < 0.3 if balanced else gap > 0.3


def test_rows_have_all_columns_of_the_model():
    rows, config = variants.make_rows(TOKENS), variants.experiment(merged=True).model
    assert set(rows.columns) == {column.name for column in columns(config, "train")}
    np.testing.assert_array_equal(rows.ragged("history_shop").lengths(), TOKENS)
    assert set(rows.ragged("exposed_click").values) == {0, 1}
    for times in (rows.ragged("history_time"), rows.ragged("exposed_time")):
        for begin, end in zip(times.row_splits, times.row_splits[1:]):
            assert (np.diff(times.values[begin:end]) > 0).all()
    assert rows.ragged("history_time").values.max() < rows.ragged("exposed_time").values.min()


def test_tables_are_merged_or_apart():
    assert [len(make_embedding(variants.experiment(merged)).lookups) for merged in (True, False)] == [1, 12]


def test_without_deduplication_every_occurrence_travels():
    ids, splits = tf.constant([7, 7, 3, 7], tf.int64), tf.constant([0, 3, 4], tf.int64)
    with variants._duplicates_travel():
        kept = ops.segment_unique(ids, splits)
    assert kept.ids.numpy().tolist() == [7, 7, 3, 7] and kept.splits.numpy().tolist() == [0, 3, 4]
    assert tf.gather(kept.ids, kept.inverse).numpy().tolist() == [7, 7, 3, 7]
    assert ops.segment_unique(ids, splits).ids.numpy().tolist() == [7, 3, 7]


def test_fields_by_hand():
    seconds = {"apart": np.array([4.0, 9.0, 5.0]), "merged": np.array([2.0, 2.5, 8.0])}
    fields = ladder.summary(seconds, 10, {"apart": 1.0}, {"apart": 36})
    assert fields == {
        "samples_per_s_apart": 2, "samples_per_s_merged": 4, "ratio_apart": 1, "ratio_merged": 2,
        "ids_sent_apart": 1, "alltoalls_apart": 36,
    }  # fmt: skip
