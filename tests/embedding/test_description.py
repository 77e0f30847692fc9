"""describe() and the row of model.summary() give numbers and names of the tables' contents."""

import re

import pytest

import tf_fusedrec as fr
from tests.support.ranks import run_ranks
from tf_fusedrec import keras, tf


def make_layer(**options):
    adagrad = fr.optimizers.Adagrad(0.5)
    return fr.FusedEmbedding(
        [
            fr.FeatureConfig("history", "item", "mean", padding_id=-1),
            fr.FeatureConfig("candidate", "item"),
            fr.FeatureConfig("user", "user"),
            fr.FeatureConfig("tag", "tag", "sum"),
        ],
        [
            fr.TableConfig("item", 4, adagrad),
            fr.TableConfig("user", 4, adagrad),
            fr.TableConfig(
                "tag", 2, fr.optimizers.SGD(0.1), fr.Zeros(), limits=fr.Limits(max_rows_per_rank=2000, eviction="lru")
            ),
        ],
        **options,
    )


def look_up(emb, first=0):
    ids = tf.range(first, first + 1200, dtype=tf.int64)
    emb({"history": tf.constant([[3, -1], [5, 3]]), "tag": ids, "user": tf.constant([7, 8])}, training=True)


# 16 bytes of counters, a row of float32 and as much of the accumulator.
WANTED = """\
fused_embedding: 3 tables, 2 groups (one exchange of rows each), 4 features, backend native; rows of rank 0 of 1

group adagrad-float32-4-X: dim 4, float32, Adagrad, learning rate 0.25, Normal(mean=0.0, stddev=0.05)
  table  rows  bytes  features                               options
  item      2     96  history (mean, padding -1), candidate
  user      2     96  user

group sgd-float32-2-X: dim 2, float32, SGD, learning rate 0.1, Zeros(value=0.0)
  table   rows   bytes  features   options
  tag    1,200  28,800  tag (sum)  limits.max_rows_per_rank=2000, limits.eviction='lru'"""


def test_a_layer_is_described():
    emb = make_layer()
    look_up(emb)
    emb.optimizers["item"].learning_rate = 0.25
    assert re.sub("-[0-9a-f]{6}:", "-X:", emb.describe()).splitlines() == WANTED.splitlines()


def test_other_backends_and_tables(tmp_path):
    emb = make_layer()
    look_up(emb)
    fr.checkpoint.save(tmp_path / "c", emb)
    tables = [
        fr.TableConfig("author", 4, external=fr.External(str(tmp_path / "c"), table="user")),
        fr.TableConfig("word", 4, keras.optimizers.legacy.Adam(0.1)),
        fr.TableConfig("old", 3, tf.compat.v1.train.GradientDescentOptimizer(0.1)),
    ]
    other = fr.FusedEmbedding([fr.FeatureConfig(t.name, t.name) for t in tables], tables, backend="tfra")
    text = other.describe()
    assert "dim 4, float32, read only\n" in text and f"author     2     64  author    external='{tmp_path}/c'" in text
    assert "Adam, learning rate 0.1, Normal(" in text and "GradientDescentOptimizer, Normal(" in text
    assert other.count_params() == 8


@pytest.mark.legacy  # Keras 3 prints another table
def test_summary_shows_shapes_and_the_numbers_in_rows():
    emb = make_layer()
    inputs = {"user": keras.Input([], dtype=tf.int64), "history": keras.Input([None], dtype=tf.int64)}
    rows = emb(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(rows["user"] + rows["history"]))
    lines = []
    for wanted in (0, 2 * 4 + 2 * 4 + 1200 * 2):
        lines.clear()
        model.summary(print_fn=lines.append)
        (row,) = [line for line in lines if "FusedEmbe" in line]
        assert int(re.search(r"'user': \(None, 4\),\s+(\d+)\s", row)[1]) == wanted
        assert emb.count_params() == wanted
        look_up(emb)


def described():
    emb = make_layer()
    look_up(emb, 600 * fr.rank())
    return emb.describe(), emb.describe(all_ranks=True)


def test_rows_of_all_ranks_are_summed():
    results = run_ranks(described, 2)
    texts = [(re.search(r"tag +([\d,]+)", mine)[1], re.search(r"tag +([\d,]+)", total)[1]) for mine, total in results]
    held = [int(mine.replace(",", "")) for mine, _ in texts]
    assert [total for _, total in texts] == ["1,800"] * 2 and sum(held) == 1800 and min(held) > 0
    assert "rows of rank 1 of 2" in results[1][0] and "rows of all 2 ranks" in results[1][1]
