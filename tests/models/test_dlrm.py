"""DLRM equals NumPy exposure by exposure; rare items; empty inputs."""

import numpy as np
import pytest

from models.dlrm import DLRM
from models.model_config import DLRMConfig
from tests.models.batches import ranking_batch
from tests.models.plain_embedding import PlainEmbedding
from tf_fusedrec import keras, tf

CONFIG = DLRMConfig(
    contextual=("user_id", "user_budget"), item_features=("genre",), other_labels=("conversion",), max_history=12,
    max_exposures=6, dim=8, bottom_units=(5,), top_units=(7, 6),
)  # fmt: skip
CATALOGUE = np.arange(1, 60)


def make_dlrm(config=CONFIG, popularity=CATALOGUE):
    keras.utils.set_random_seed(7)
    return DLRM(config, PlainEmbedding(config.table_of_feature, config.dim), CATALOGUE, popularity)


def batch_of(histories, exposures):
    batch = ranking_batch(histories=histories, exposures=exposures)
    for role in ("history", "exposed"):
        items = batch[f"{role}_item"]
        batch[f"{role}_genre"] = items.with_values(items.values % 5)
    return batch


def relu_network(x, layers, last=True):
    for number, layer in enumerate(layers):
        kernel, bias = (weight.numpy().astype(np.float64) for weight in layer.weights)
        x = x @ kernel + bias
        if last or number < len(layers) - 1:
            x = np.maximum(x, 0)
    return x


def test_logits_against_numpy():
    model, batch = make_dlrm(), batch_of([5, 0, 12], [3, 2, 1])
    outputs = model(batch)
    assert tuple(outputs) == ("ctr", "ctcvr", "conversion")
    tables = {name: table.numpy().astype(np.float64) for name, table in model.embedding.tables.items()}
    bottom, top = ([layer for layer in network.layers if layer.weights] for network in (model.bottom, model.top))
    lists = {name: column.to_list() for name, column in batch.items() if isinstance(column, tf.RaggedTensor)}
    expected = []
    for b in range(3):
        past = lists["history_time"][b]
        for e, item in enumerate(lists["exposed_item"][b]):
            time = lists["exposed_time"][b][e]
            hour = 2 * np.pi * (time % 86_400) / 86_400
            gap = np.log1p(time - past[-1]) / 10 if past else 0.0
            dense = np.array([np.log1p(len(past)), gap, np.sin(hour), np.cos(hour)])
            vectors = [relu_network(dense, bottom)]
            vectors += [tables[name][int(batch[name][b])] for name in CONFIG.contextual]
            vectors += [tables["item"][item], tables["genre"][item % 5]]
            for table, name in (("item", "history_item"), ("genre", "history_genre"), ("action", "history_action")):
                rows = tables[table][np.array(lists[name][b], int)]
                vectors.append(rows.mean(axis=0) if len(rows) else np.zeros(8))
            pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
            x = relu_network(np.concatenate([*vectors, pairs]), top)
            expected.append(relu_network(x, [model.head], last=False))
    # float32: sums of about a hundred terms near 1.
    np.testing.assert_allclose(tf.stack(list(outputs.values()), axis=1), expected, atol=2e-6)


def test_rare_items_share_a_row_and_are_told_from_frequent_ones():
    popularity = np.where(CATALOGUE % 2, 3, 1)
    model = make_dlrm(DLRMConfig(**{**vars(CONFIG), "min_item_count": 3}), popularity)
    known = model._frequent_or_rare(tf.constant([1, 2, 3, 58, 59, 60, 1000], tf.int64))
    np.testing.assert_array_equal(known, [1, -1, 3, -1, 59, -1, -1])
    none = make_dlrm(DLRMConfig(**{**vars(CONFIG), "min_item_count": 9}), popularity)
    np.testing.assert_array_equal(none._frequent_or_rare(tf.constant([1, 2], tf.int64)), [-1, -1])


def test_a_step_trains_every_task_and_counts():
    model, batch = make_dlrm(), batch_of([4, 2], [2, 3])
    model.compile(keras.optimizers.legacy.SGD(0.1))
    before = [weight.numpy() for weight in (model(batch), model.head.kernel)[1:]]
    logs = model.train_step(batch)
    assert (before[0] != model.head.kernel.numpy()).any(axis=0).all()  # a column for each task
    assert float(logs["samples"]) == 2 and float(logs["tokens"]) == 4 + 2 + 2 + 3
    vectors = 1 + 2 + 2 + 3
    bottom, top = 4 * 5 + 5 * 8, (vectors * 8 + vectors * (vectors - 1) // 2) * 7 + 7 * 6 + 6 * 3
    assert float(logs["gflops"]) * 1e9 == pytest.approx(3 * 5 * 2 * (bottom + top + vectors**2 * 8))


@pytest.mark.parametrize(("histories", "exposures"), [([], []), ([0, 3], [2, 1]), ([3, 2], [0, 0])])
def test_empty_inputs_have_finite_gradients(histories, exposures):
    model, batch = make_dlrm(), batch_of(histories, exposures)
    with tf.GradientTape() as tape:
        outputs = model(batch, training=True)
        loss = model.compute_loss(x=batch, y_pred=outputs)
    assert outputs["ctr"].shape == [sum(exposures)] and np.isfinite(float(loss))
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert gradient is None or np.isfinite(tf.convert_to_tensor(gradient)).all()
