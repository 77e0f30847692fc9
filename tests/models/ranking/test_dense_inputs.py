"""Numbers, lists of ids and learned crosses: statistics, equal inputs of all ranking models, the export."""

import pathlib

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.models.batches import START, ragged
from tf_fusedrec import keras, tf
from tf_fusedrec.data.columns import check_features
from tf_fusedrec.data.rows import Ragged, Rows, splits_of
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.build import columns, extra_tokens, features, made_features, make_embedding, make_model
from tf_fusedrec.models.data_sets.layouts import write_dataset
from tf_fusedrec.models.experiment import from_dict, load
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.export import _RankingServer, trained_model
from tf_fusedrec.models.parts.dense_inputs import Normalize, Statistics, read_statistics

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
INPUTS = {
    "contextual": ["gender"], "contextual_lists": ["likes"], "contextual_dense": ["age"],
    "item_features": ["year"], "item_lists": ["genre"], "history_dense": ["count", "rating"],
    "exposed_dense": ["count"], "log1p": ["count"], "crosses": ["gender*year", "item*hour"], "time_features": True,
    "max_history": 4, "max_exposures": 4, "dim": 4,
}  # fmt: skip
SIZES = {
    "grm": {"num_blocks": 1, "num_heads": 1, "qk_dim": 4, "value_dim": 4, "expert_units": 4, "head_units": 4},
    "dlrm": {"bottom_units": [5], "top_units": [6]},
    "din": {"attention_units": [5], "top_units": [6]},
    "dcn": {"deep_units": [6]},
}
HISTORIES, EXPOSURES = [5, 0, 3], [2, 3, 1]
STATISTICS = {
    name: Statistics(9, mean, 2.0)
    for name, mean in {"age": 30.0, "history_count": 1.0, "history_rating": 3.0, "exposed_count": 1.0}.items()
}


def experiment_of(kind, **changed):
    model = {"kind": kind, **INPUTS, **SIZES[kind], **changed}
    # Rows as large as these make every input visible in the logits.
    fields = {"name": "x", "task": "ranking", "data": {"source": "synthetic-ranking"}, "model": model}
    tables = {"likes": {"dim": 3}, "gender_x_year": {"dim": 8}}
    return from_dict({**fields, "embedding": {"stddev": 0.5, "tables": tables}})


def full_batch(seed=0):
    """Returns three users with every column that a ranking model can read, and histories as the reader cuts them."""
    rng = np.random.default_rng(seed)
    batch = {name: tf.constant(rng.integers(1, 9, 3)) for name in ("user_id", "gender")}
    batch["age"] = tf.constant([31.0, np.nan, 18.0], tf.float32)
    batch["likes"] = ragged([2, 0, 1], rng.integers(1, 9, 3))
    for role, lengths in (("history", HISTORIES), ("exposed", EXPOSURES)):
        total = sum(lengths)
        several = np.resize([0, 2, 1], total)
        of_row = [several[end - n : end].sum() for n, end in zip(lengths, np.cumsum(lengths))]
        times = [START + 86_400 * 30 * (role == "exposed") + np.cumsum(rng.integers(30, 9000, n)) for n in lengths]
        batch |= {f"{role}_{name}": ragged(lengths, rng.integers(1, 9, total)) for name in ("item", "year", "action")}
        batch |= {
            f"{role}_time": ragged(lengths, np.concatenate([*times, []])),
            f"{role}_genre": ragged(of_row, rng.integers(1, 9, several.sum())),
            f"{role}_genre_count": ragged(lengths, several),
        }
        for name in ("count", "rating"):
            numbers = np.where(rng.random(total) < 0.3, np.nan, rng.integers(0, 9, total))
            batch[f"{role}_{name}"] = ragged(lengths, numbers, np.float32)
    labels = {name: ragged(EXPOSURES, rng.integers(0, 2, 6), np.float32) for name in ("click", "conversion")}
    return {**batch, **{f"exposed_{name}": label for name, label in labels.items()}}


def cut(batch):
    """Returns the batch as the reader gives it, with four events of history."""
    whole = ("history_genre", "history_genre_count")
    short = {name: jagged.last(x, 4) for name, x in batch.items() if name.startswith("history_") and name not in whole}
    return {**batch, **short, "history_genre_count": jagged.last(batch["history_genre_count"], 4)}


def made(kind, **changed):
    keras.utils.set_random_seed(3)
    experiment = experiment_of(kind, **changed)
    return experiment, make_model(experiment, make_embedding(experiment), np.arange(9), np.arange(9), STATISTICS)


def changed_column(batch, name):
    """Returns the batch with other values in one column: of each event, or of the first user."""
    column = batch[name]
    if name.endswith("genre_count"):  # The sum of a row stays, as it must.
        rows = [row[::-1] for row in column.to_list()]
        return {**batch, name: ragged([len(row) for row in rows], np.concatenate(rows))}
    step = tf.cast(40_000 if name.endswith("_time") else 1, column.dtype)
    changed = column.with_values(column.values + step) if isinstance(column, tf.RaggedTensor) else column + step
    return {**batch, name: changed}


@pytest.fixture(scope="module")
def models():
    return {kind: made(kind) for kind in SIZES}


@pytest.mark.slow
def test_all_ranking_models_read_the_same_columns_and_use_each(models):
    batch = cut(full_batch())
    used = {}
    for kind, (experiment, model) in models.items():
        read = columns(experiment.model, "train")
        check_features(read, features(experiment.model), made=made_features(experiment.model))
        inputs = [c.name for c in read if c.name not in ("user_id", *experiment.model.label_columns)]
        before = model(batch)["ctr"].numpy()
        assert np.isfinite(before).all()
        used[kind] = {
            name for name in inputs if not np.allclose(model(changed_column(batch, name))["ctr"], before, atol=1e-7)
        }
        assert used[kind] == set(inputs), f"{kind} ignores {set(inputs) - used[kind]}"
    assert len(used["grm"]) == 17
    assert used["grm"] == used["dlrm"] == used["din"] == used["dcn"]


def test_the_configurations_of_movielens_read_the_same_columns():
    models = [load(CONFIGS / f"{kind}_ml1m_ranking.yaml").model for kind in SIZES]
    inputs = [{name: getattr(model, name) for name in (*INPUTS, "min_item_count", "other_labels")} for model in models]
    assert all(one == inputs[0] for one in inputs)
    assert all(columns(model, "test") == columns(models[0], "test") for model in models)


def test_tokens_of_grm_count_every_kind_of_context(models):
    experiment, model = models["grm"]
    assert extra_tokens(experiment.model) == 3  # gender, likes, and the numbers
    assert experiment.model.max_sequence_length == 3 + 4 + 4
    users, tokens = model.counts(cut(full_batch()))
    assert (int(users), int(tokens)) == (3, 3 * 3 + 7 + 6)
    assert float(model.forward_flops(cut(full_batch()))) > 0


def test_missing_numbers_are_zero_beside_an_indicator():
    layer = Normalize(("a", "b"), (False, True))
    layer.set_statistics({"a": Statistics(2, 3.0, 2.0), "b": Statistics(2, 1.0, 0.5)})
    out = layer([tf.constant([5.0, np.nan]), tf.constant([np.nan, -np.e + 1], tf.float32)])
    np.testing.assert_allclose(out, [[1, 0, 0, 1], [0, -4, 1, 0]], atol=1e-6)  # float32, log1p of about 1


def test_lists_and_crosses_against_plain_lookups(models):
    _, model = models["dlrm"]
    batch = cut(full_batch())
    rows = model.rows_of(batch, training=False)
    genres, counts = batch["history_genre"].to_list(), batch["history_genre_count"].to_list()
    row_of = model.embedding({"history_genre": tf.range(10, dtype=tf.int64)[:, tf.newaxis]})["history_genre"].numpy()
    for user, lengths in enumerate(counts):
        ids = np.array(genres[user][len(genres[user]) - sum(lengths) :], np.int64)
        parts = np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []
        for event, part in enumerate(parts):
            wanted = row_of[part].mean(axis=0) if len(part) else np.zeros(4)
            np.testing.assert_allclose(rows["history_genre"][user, event], wanted, atol=1e-6)  # a float32 mean


def test_equal_pairs_alone_share_the_row_of_a_cross(models):
    _, model = models["dlrm"]
    batch = cut(full_batch())
    rows = model.rows_of(batch, training=False)["history_gender_x_year"].values.numpy()
    genders = tf.gather(batch["gender"], batch["history_item"].value_rowids()).numpy()
    pairs = list(zip(genders.tolist(), batch["history_year"].values.numpy().tolist()))
    assert len(set(pairs)) == len(np.unique(rows, axis=0)) > 3
    for pair, row in zip(pairs, rows):
        np.testing.assert_array_equal(row, rows[pairs.index(pair)])


def statistics_of(folder, **numbers):
    lengths = np.array([2, 0, 3])
    lists = {name: Ragged(np.array(values, np.float32), splits_of(lengths)) for name, values in numbers.items()}
    rows = Rows({"user_id": np.arange(3), "exposed_item": Ragged(np.arange(5), splits_of(lengths)), **lists}, 3)
    none = np.zeros(0, np.int64)
    facts = {"task": "ranking", "source": "x", "split": "x", "users": 3, "item_ids": np.arange(5)}
    write_dataset(folder, train=rows, test=rows, train_items=none, **facts)
    names = [name.removeprefix("exposed_") for name in numbers]
    config = RankingConfig(exposed_dense=tuple(names), log1p=tuple(name for name in names if name == "b"))
    return read_statistics(config, folder)


def test_statistics_are_those_of_numpy_without_missing_values(tmp_path):
    a, b = [1e6, 1e6 + 3, np.nan, 1e6 + 9, np.nan], [0.0, -5.0, 100.0, 2.0, 7.0]
    found = statistics_of(tmp_path / "d", exposed_a=a, exposed_b=b)
    known, logs = np.array(a)[[0, 1, 3]], np.sign(b) * np.log1p(np.abs(b))
    assert found["exposed_a"] == pytest.approx((3, known.mean(), known.std()))
    assert found["exposed_b"] == pytest.approx((5, logs.mean(), logs.std()))
    assert read_statistics(RankingConfig(), tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([np.nan] * 5, "d/train: column 'exposed_a' has no number, all of its values are missing"),
        ([0.1] * 5, "d/train: column 'exposed_a' has the same number everywhere, 0.1"),
        ([1.0, np.inf, 2.0, 3.0, 4.0], "d/train: column 'exposed_a' has infinite numbers, want finite ones or NaN"),
    ],
)
def test_columns_that_tell_nothing_are_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        statistics_of(tmp_path / "d", exposed_a=values)


def test_a_model_without_statistics_is_refused():
    experiment = experiment_of("grm")
    with pytest.raises(ValueError, match=r"no statistics for \['contextual', 'history', 'exposed'\] columns of num"):
        make_model(experiment, keras.layers.Layer(), np.arange(9), np.arange(9))


def test_a_checkpoint_holds_the_statistics_and_a_server_cuts_long_histories(tmp_path, models):
    experiment, model = models["grm"]
    batch = full_batch()
    model(cut(batch))
    fr.checkpoint.save(tmp_path, model, extra={"experiment": experiment.to_dict(), "items": 9})
    restored = trained_model(tmp_path)
    np.testing.assert_array_equal(restored.normalizers["history"].mean, [1.0, 3.0])
    inputs = {name: batch[name] for name in ("gender", "age")}
    inputs |= {"likes": batch["likes"].values, "likes_row_splits": batch["likes"].row_splits}
    for role, further in (("history", ("action", "count", "rating")), ("exposed", ("count",))):
        names = ("item", "time", "year", "genre", "genre_count", *further)
        inputs |= {f"{role}_{name}": batch[f"{role}_{name}"].values for name in names}
        inputs[f"{role}_row_splits"] = batch[f"{role}_item"].row_splits
    server = _RankingServer(restored)
    assert set(server.signatures()["serving_default"].inputs) == set(inputs)
    # The float32 weights are equal, so only the order of summation may differ.
    np.testing.assert_allclose(server.scores(inputs)["ctr"], tf.sigmoid(model(cut(batch))["ctr"]), atol=1e-6)
