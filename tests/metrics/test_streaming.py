"""Keras metrics over uneven batches and ranks, against the metrics of all the data at once."""

import numpy as np
import pytest

from tests.oracles.metrics import auc_oracle, gauc_oracle
from tf_fusedrec import schedules
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.metrics import exact, streaming

BATCHES = (30, 0, 1, 40, 25)


def predictions(seed=0, users=6):
    """Returns batches of (labels, logits, user) with every user in one batch. Some users have one class only."""
    generator = np.random.default_rng(seed)
    batches, first = [], 0
    for size in BATCHES:
        user = np.sort(generator.integers(first, first + users, size))
        first += users
        logits = np.round(generator.normal(size=size), 1)  # ties
        order = generator.permutation(size)
        labels = (generator.random(size) < 1 / (1 + np.exp(-logits))).astype(np.int64)
        batches.append((labels[order], logits[order], user[order]))
    return batches


def expectations(labels, logits, user):
    chance = 1 / (1 + np.exp(-logits))
    entropy = -np.mean(np.where(labels == 1, np.log(chance), np.log1p(-chance)))
    rate = labels.mean()
    return {
        "auc": auc_oracle(labels, logits),
        "gauc": gauc_oracle(user, labels, logits, "none"),
        "impressions": gauc_oracle(user, labels, logits, "impressions"),
        "ne": entropy / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)),
        "calibration": chance.sum() / labels.sum(),
    }


NAMES = ("auc", "gauc", "impressions", "ne", "calibration")


METRICS = {
    "auc": streaming.AUC,
    "ne": streaming.NormalizedEntropy,
    "calibration": streaming.Calibration,
    "gauc": streaming.GAUC,
    "impressions": lambda: streaming.GAUC("impressions", name="by_impressions"),
    "hr": lambda: streaming.HitRate(2),
    "ndcg": lambda: streaming.NDCG(3),
    "mrr": streaming.MRR,
}


def update(metric, labels, logits, user):
    further = [user] if isinstance(metric, streaming.GAUC) else []
    metric.update_state(labels, logits, *further)


@pytest.mark.parametrize("name", NAMES)
def test_uneven_batches_give_the_metric_of_all_data(name):
    metric, batches = METRICS[name](), predictions()
    graph = tf.function(lambda *batch: update(metric, *batch), reduce_retracing=True)
    assert np.isnan(metric.result())
    for batch in batches:
        graph(*map(tf.constant, batch))
    expected = expectations(*(np.concatenate(parts) for parts in zip(*batches)))[name]
    # Logits with one digit fall into separate bins, so the float64 AUC is exact too.
    assert float(metric.result()) == pytest.approx(expected, rel=1e-12)
    metric.reset_state()
    assert np.isnan(metric.result())


@pytest.mark.parametrize("name", NAMES)
def test_states_are_summed_over_ranks(name, monkeypatch):
    """Three ranks, one without data, give the metric of all data. The mean of their results differs from it."""
    batches = predictions(seed=1)
    ranks = [METRICS[name]() for _ in range(3)]
    for number, batch in enumerate(batches):
        update(ranks[0 if number < 3 else 2], *batch)
    sent = []
    monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, *, name: sent.append(tensor) or tensor)
    for rank in ranks:
        rank.across_ranks()
    total = tf.add_n(sent)
    monkeypatch.setattr(collectives, "all_reduce_sum", lambda tensor, *, name: total)
    expected = expectations(*(np.concatenate(parts) for parts in zip(*batches)))[name]
    assert [rank.across_ranks() for rank in ranks] == pytest.approx([expected] * 3, rel=1e-12)
    assert abs(np.mean([float(ranks[i].result()) for i in (0, 2)]) - expected) > 1e-3


def test_logits_beyond_the_bins_and_one_class():
    metric = streaming.AUC()
    metric.update_state([1, 1], [3.0, 1e9])
    assert np.isnan(metric.result())
    metric.update_state([0, 0], [-1e9, 2.0])
    assert float(metric.result()) == 1.0
    gauc = streaming.GAUC()
    gauc.update_state([1, 1, 0], [1.0, 2.0, 3.0], [5, 5, 6])
    assert np.isnan(gauc.result())
    ne = streaming.NormalizedEntropy()
    ne.update_state([1, 1], [1.0, 2.0])
    assert np.isnan(ne.result())


def test_ranking_metrics_are_those_of_all_ranks_together():
    ranks = np.random.default_rng(2).integers(1, 40, 60)
    ours = [streaming.HitRate(10), streaming.NDCG(10), streaming.MRR()]
    for part in np.split(ranks, [3, 3, 50]):
        for metric in ours:
            metric.update_state(part)
    theirs = [exact.hit_rate(ranks, 10), exact.ndcg(ranks, 10), exact.mrr(ranks)]
    assert [float(metric.result()) for metric in ours] == pytest.approx(theirs, rel=1e-12)
    assert [metric.name for metric in ours] == ["hr@10", "ndcg@10", "mrr"]


# Labels and scores of 4 lists of 5 candidates, with ties. WEIGHTS are repeats of the lists.
SCORES = np.array([[0.5, -1, 0.5, 2, 0], [1, 1, 1, 1, 1], [3, 2, 1, 0, -1], [0, 1, 2, 3, 4]], np.float32)
TARGETS, REPEATS = np.array([2, 4, 0, 0]), np.array([1, 2, 0, 3])
ONE_HOT = np.eye(5, dtype=np.int64)[TARGETS]


def exactly(name, repeats):
    """The metric over lists that are repeated, each time as a user of its own."""
    order = np.repeat(np.arange(4), repeats)
    labels, scores = ONE_HOT[order], SCORES[order].astype(np.float64)
    if name in ("gauc", "impressions"):
        users = np.repeat(np.arange(len(order)), 5)
        return exact.gauc(users, labels.ravel(), scores.ravel(), "none" if name == "gauc" else name)
    if name in ("auc", "ne", "calibration"):
        return getattr(exact, "normalized_entropy" if name == "ne" else name)(labels.ravel(), scores.ravel())
    own = np.take_along_axis(scores, TARGETS[order][:, None], 1)
    ranks = 1 + np.sum((scores > own) | ((scores == own) & (np.arange(5) < TARGETS[order][:, None])), 1)
    return {"hr": exact.hit_rate(ranks, 2), "ndcg": exact.ndcg(ranks, 3), "mrr": exact.mrr(ranks)}[name]


@pytest.mark.parametrize("kind", [keras.Model, schedules.PipelinedModel])
@pytest.mark.parametrize("form", ["one-hot", "column"])
def test_every_metric_stands_in_compile(kind, form):
    names = list(METRICS) if form == "one-hot" else ["hr", "ndcg", "mrr"]
    made = {argument: [METRICS[name]() for name in names] for argument in ("metrics", "weighted_metrics")}
    for argument, again in made.items():  # also after a round trip through Keras' configs
        made[argument] = [keras.metrics.deserialize(keras.metrics.serialize(metric)) for metric in again]
    symbol = keras.Input([5])
    model = kind(symbol, keras.layers.Activation("linear")(symbol))
    model.compile(loss="mse" if form == "one-hot" else keras.losses.SparseCategoricalCrossentropy(True), **made)
    targets = ONE_HOT if form == "one-hot" else TARGETS
    found = model.evaluate(
        SCORES, targets, sample_weight=REPEATS.astype(np.float32), batch_size=3, verbose=0, return_dict=True
    )
    wanted = {"loss": found["loss"]}
    for prefix, repeats in (("", np.ones(4, int)), ("weighted_", REPEATS)):
        wanted |= {prefix + METRICS[name]().name: exactly(name, repeats) for name in names}
    assert found == pytest.approx(wanted, rel=1e-6)


def test_lists_without_a_target_and_scores_that_are_nan():
    rank = streaming.MRR()
    rank.update_state([[0, 0], [0, 1]], [[1.0, 2.0], [3.0, 2.0]])
    assert float(rank.result()) == 0.5
    rank.update_state([0], [[np.nan, 1.0]])
    assert float(rank.result()) == pytest.approx((1 / 2 + 1 / 3) / 2)
    of_lists = streaming.GAUC()
    ragged = [
        tf.ragged.constant(rows) for rows in ([[1.0, 0.0], [], [0.0, 1.0, 0.0]], [[1.0, 0.0], [], [2.0, 1.0, 3.0]])
    ]
    of_lists.update_state(*ragged, sample_weight=[1.0, 1.0, 3.0])
    assert float(of_lists.result()) == 0.25


@pytest.mark.parametrize("name", ["gauc", "mrr"])
def test_predictions_that_are_no_lists_are_refused(name):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=[METRICS[name]()])
    with pytest.raises(ValueError, match=rf"'{name}' got predictions \((None|4), 1\).*Use .*(update_state|GAUC)\("):
        model.fit(SCORES, TARGETS.astype(np.float32), verbose=0)


@pytest.mark.parametrize("form", ["dict", "list", "lacking"])
def test_gauc_of_an_input_by_its_name(form):
    drawn = np.random.default_rng(0)
    x = {"score": drawn.normal(size=(40, 1)).astype(np.float32), "user": drawn.integers(0, 5, 40)}
    labels = drawn.integers(0, 2, (40, 1))
    inputs = {"score": keras.Input([1], name="score"), "user": keras.Input([], dtype="int64", name="user")}
    x, inputs = (x, inputs) if form != "list" else ([*x.values()], [*inputs.values()])
    score = keras.layers.Activation("linear")(inputs["score"] if form != "list" else inputs[0])
    model = schedules.PipelinedModel(inputs, score)
    model.compile(loss="mse", metrics=[streaming.GAUC(group="user" if form != "lacking" else "usr")])
    if form == "lacking":
        with pytest.raises(ValueError, match=r"input 'usr', got the inputs \['score', 'user'\]. Use a PipelinedModel"):
            model.evaluate(x, labels, verbose=0)
        return
    users, scores = (x["user"], x["score"]) if form == "dict" else (x[1], x[0])
    found = model.evaluate(x, labels, batch_size=40, verbose=0, return_dict=True)["gauc"]
    assert found == pytest.approx(exact.gauc(users, labels[:, 0], scores[:, 0]))


@pytest.mark.parametrize("kind", [streaming.AUC, streaming.NormalizedEntropy, streaming.Calibration])
def test_probabilities_are_taken_where_the_metric_says_so(kind):
    labels, logits = np.array([0, 1, 1, 0]), np.array([-3.0, 0.5, -0.2, 0.1], np.float32)
    metrics = kind(), kind.from_config(kind(from_logits=False).get_config())
    for metric, scores in zip(metrics, (logits, 1 / (1 + np.exp(-logits)))):
        metric.update_state(labels, scores)
    assert float(metrics[1].result()) == pytest.approx(float(metrics[0].result()), rel=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="k must be an int >= 1, got 0"):
        streaming.HitRate(0)
    with pytest.raises(ValueError, match="weight must be 'none' or 'impressions', got 'users'"):
        streaming.GAUC("users")
