"""HSTU retrieval: positions, targets, query times and negatives equal NumPy's."""

import dataclasses

import numpy as np
import pytest

from tests.losses.test_losses import sampled_softmax_oracle
from tests.models.batches import START, ragged, retrieval_batch
from tests.models.plain_embedding import PlainEmbedding
from tf_fusedrec import keras, tf
from tf_fusedrec.models.experiment.model_config import RetrievalConfig
from tf_fusedrec.models.retrieval import HSTURetrieval

CONFIG = RetrievalConfig(max_history=10, dim=8, qk_dim=4, value_dim=4, dropout=0.0, num_negatives=5)
CATALOGUE = np.arange(1, 60)


def make_model(fields=None, **arguments):
    """Returns a model whose config has other values in some fields."""
    keras.utils.set_random_seed(7)
    config = dataclasses.replace(CONFIG, **(fields or {}))
    return HSTURetrieval(config, PlainEmbedding(config.table_of_feature, config.dim), CATALOGUE, **arguments)


def test_every_position_predicts_the_next_item():
    batch = retrieval_batch([4, 1, 0, 3])
    out = make_model()(batch)
    items = batch["item_id"].to_list()
    assert out.positive_ids.numpy().tolist() == [*items[0][1:], *items[3][1:]]
    assert out.query.shape == out.positive.shape == [5, 8]
    assert out.chosen.shape == [5, 5]
    assert out.negatives.shape == [len(np.unique(out.negative_ids)), 8]  # each item once


@pytest.mark.parametrize("share", [False, True])
def test_loss_is_the_sampled_softmax_of_normalised_vectors(share):
    model = make_model({"share_negatives": share})
    batch = retrieval_batch([6, 2, 9], seed=3)
    out = model(batch)
    vectors = (of.numpy().astype(np.float64) for of in (out.query, out.positive, out.negatives))
    ids = out.positive_ids.numpy(), out.negative_ids.numpy()
    expected = sampled_softmax_oracle(*vectors, *ids, 0.05, None if share else out.chosen.numpy())
    loss = float(model.compute_loss(x=batch, y_pred=out))
    # Scores reach 20 in float32, so their differences are good to about 1e-5.
    assert loss == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": "frequency", "log_q": True},
        {"sampling": "in_batch", "log_q": True},
        {"expansion": 3},
        {"expansion": 2, "sharing": "logits", "sampling": "in_batch"},
    ],
)
def test_the_whole_catalogue_equals_gathered_negatives(fields):
    batch, results = retrieval_batch([6, 1, 0, 9], seed=3), []
    for whole in (False, True):
        model = make_model({"whole_catalogue": whole, **fields}, popularity=np.arange(59))
        model(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.position_losses(batch, model(batch)))
        table = model.embedding.tables["item"]
        gradients = tape.gradient(loss, [table, *model.blocks[0].trainable_variables])
        results.append([loss, *map(tf.convert_to_tensor, gradients)])
    assert len(results[0]) == len(results[1]) > 3
    for gathered, whole in zip(*results):
        # float32 scores reach 20, and the two sides sum in different orders.
        np.testing.assert_allclose(whole, gathered, rtol=1e-4, atol=1e-5)


def test_in_batch_negatives_are_the_positives_of_the_batch_and_need_no_lookup():
    config = dataclasses.replace(CONFIG, sampling="in_batch")
    model = HSTURetrieval(config, PlainEmbedding({"item_id": "item"}, config.dim), CATALOGUE)
    out = model(retrieval_batch([6, 2], seed=3))
    assert out.negatives is out.positive and out.negative_ids is out.positive_ids
    assert out.chosen.shape == [6, 5] and out.chosen.numpy().max() < 6


def test_expansion_takes_negatives_of_other_positions_or_their_logits():
    batch = retrieval_batch([6, 2, 9], seed=3)
    alone = make_model()(batch)
    written = make_model({"expansion": 3})(batch)
    np.testing.assert_array_equal(written.chosen[:, :5], alone.chosen)
    assert written.chosen.shape == [14, 15] and written.negatives.shape == alone.negatives.shape
    for column in range(15):  # the same negatives, each shared twice
        assert sorted(written.chosen[:, column].numpy()) == sorted(alone.chosen[:, column % 5].numpy())
    reused = make_model({"expansion": 3, "sharing": "logits"})(batch)
    np.testing.assert_array_equal(reused.chosen, alone.chosen)
    assert reused.reused_from.shape == [14, 10]


def test_items_that_the_catalogue_lacks_are_refused():
    model = make_model({"whole_catalogue": True})
    batch = {"item_id": ragged([2], [5, 63]), "timestamp": ragged([2], [START, START + 1])}
    with pytest.raises(tf.errors.InvalidArgumentError, match="item_id holds an item that the catalogue lacks"):
        model(batch)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["hstu", "fuxi_alpha", "fuxi_beta", "sasrec"])
def test_every_encoder_trains_and_answers_from_the_past_only(encoder):
    model = make_model({"encoder": encoder, "time_encoding": "stretched"})
    batch = retrieval_batch([4, 0, 7], seed=2)
    out = model(batch)
    later = {**batch, "item_id": ragged([4, 0, 7], [*batch["item_id"].values.numpy()[:10], 1])}
    np.testing.assert_allclose(model(later).query[:9], out.query[:9], atol=1e-6)  # the last item is only predicted
    model.compile(keras.optimizers.SGD(0.1))
    logs = model.train_step(batch)
    assert np.isfinite(float(logs["loss"]))
    assert float(logs["gflops"]) * 1e9 == pytest.approx(3 * float(model.forward_flops(batch)))


def test_flops_by_hand():
    model, batch = make_model(), retrieval_batch([4, 1, 3])
    tokens, pairs = 3 + 2, 6 + 3
    blocks = 2 * (tokens * (8 * 4 * 4 + 4 * 8) + pairs * 2 * 4) * CONFIG.num_blocks
    assert float(model.forward_flops(batch)) == blocks + 2 * tokens * (1 + 5) * 8


def test_negatives_are_a_function_of_seed_step_and_rank():
    batch = retrieval_batch([4, 4])

    def negatives(step=3, **arguments):
        model = make_model(**arguments)
        model.step.assign(step)
        out = model(batch)
        return out.negative_ids.numpy()[out.chosen]

    first = negatives(seed=1, rank=0)
    assert np.isin(first, CATALOGUE).all()
    np.testing.assert_array_equal(first, negatives(seed=1, rank=0))
    for other in (negatives(seed=2, rank=0), negatives(seed=1, rank=1), negatives(step=4, seed=1)):
        assert (first != other).any()


def test_serving_answers_as_the_last_training_position():
    model = make_model()
    batch = retrieval_batch([5, 3], seed=1)
    out = model(batch)
    last_query = out.query.numpy()[[3, 5]]
    lengths = batch["item_id"].row_lengths()
    past = {name: column[:, :-1] for name, column in batch.items()}
    query_time = tf.stack([batch["timestamp"][row][-1] for row in range(2)])
    users = model.embed_users(past["item_id"], past["timestamp"], query_time)
    expected = last_query / np.linalg.norm(last_query, axis=1, keepdims=True)
    # Other padding, other order of summation, in float32.
    np.testing.assert_allclose(users, expected, atol=2e-6)
    assert lengths.numpy().tolist() == [5, 3]


def test_the_query_time_matters_and_an_empty_history_gives_zeros():
    model = make_model()
    items, times = ragged([2, 0], [5, 6]), ragged([2, 0], [START, START + 60])
    soon = model.embed_users(items, times, tf.constant([START + 90, START], tf.int64)).numpy()
    late = model.embed_users(items, times, tf.constant([START + 9_000_000, START], tf.int64)).numpy()
    assert (soon[0] != late[0]).any()
    assert not soon[1].any()


def test_users_and_items_of_a_mixed_precision_meet_in_float32():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model, one = make_model(), ragged([1], [5])
        users = model.embed_users(one, ragged([1], [START]), tf.constant([START + 9], tf.int64))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert users.dtype == model.embed_items(tf.constant([5], tf.int64)).dtype == tf.float32


@pytest.mark.parametrize("lengths", [[], [0, 1], [1], [2, 0]])
def test_empty_inputs_train(lengths):
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1))
    logs = model.train_step(retrieval_batch(lengths))
    assert np.isfinite(float(logs["loss"]))
    assert float(logs["tokens"]) == sum(max(length - 1, 0) for length in lengths)


def test_a_step_without_positions_leaves_the_mean_loss():
    """Epochs of all ranks have equal numbers of steps, so that the last one may have no data on any rank."""
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1))
    first = float(model.train_step(retrieval_batch([4, 6]))["loss"])
    assert float(model.train_step(retrieval_batch([]))["loss"]) == first > 0


def test_an_empty_catalogue_and_repeated_ids_are_refused():
    for catalogue in (np.array([], np.int64), np.array([1, 2, 2])):
        with pytest.raises(ValueError, match="catalogue must hold at least one id, each once"):
            HSTURetrieval(CONFIG, PlainEmbedding(CONFIG.table_of_feature, 8), catalogue)
