"""DLRM equals NumPy exposure by exposure; rare items; a step trains every task and counts."""

import numpy as np
import pytest

from models.dlrm import DLRM
from models.experiment.model_config import DLRMConfig
from tests.models.ranking import exposure_oracle as oracle
from tf_fusedrec import keras, tf

CONFIG = DLRMConfig(**oracle.FIELDS, bottom_units=(5,), top_units=(7, 6))


def expected_logits(model, exposure):
    vectors = [oracle.relu_network(exposure.dense, model.bottom), *exposure.own, *exposure.means]
    pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
    return oracle.head(model, oracle.relu_network(np.concatenate([*vectors, pairs]), model.top))


def test_logits_against_numpy():
    model, batch = oracle.make(DLRM, CONFIG), oracle.batch_of([5, 0, 12], [3, 2, 1])
    outputs = model(batch)
    assert tuple(outputs) == ("ctr", "ctcvr", "conversion")
    expected = [expected_logits(model, exposure) for exposure in oracle.exposures_of(model, batch)]
    # float32: sums of about a hundred terms near 1.
    np.testing.assert_allclose(tf.stack(list(outputs.values()), axis=1), expected, atol=2e-6)


def test_rare_items_share_a_row_and_are_told_from_frequent_ones():
    popularity = np.where(oracle.CATALOGUE % 2, 3, 1)
    model = oracle.make(DLRM, DLRMConfig(**{**vars(CONFIG), "min_item_count": 3}), popularity)
    known = model._frequent_or_rare(tf.constant([1, 2, 3, 58, 59, 60, 1000], tf.int64))
    np.testing.assert_array_equal(known, [1, -1, 3, -1, 59, -1, -1])
    none = oracle.make(DLRM, DLRMConfig(**{**vars(CONFIG), "min_item_count": 9}), popularity)
    np.testing.assert_array_equal(none._frequent_or_rare(tf.constant([1, 2], tf.int64)), [-1, -1])


def test_a_step_trains_every_task_and_counts():
    model, batch = oracle.make(DLRM, CONFIG), oracle.batch_of([4, 2], [2, 3])
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
    oracle.check_empty_inputs(oracle.make(DLRM, CONFIG), oracle.batch_of(histories, exposures), exposures)
