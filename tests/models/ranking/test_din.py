"""DIN equals NumPy, which weighs one event after the other; its FLOPs; empty inputs."""

import numpy as np
import pytest

from models.din import DIN
from models.experiment.model_config import DINConfig
from tests.models.ranking import exposure_oracle as oracle
from tf_fusedrec import tf

CONFIG = DINConfig(**oracle.FIELDS, attention_units=(5, 3), top_units=(7, 6))


def expected_weight(attention, event, candidate, since):
    """The activation unit of Zhou et al. as one network over [event, candidate, event * candidate, since]."""
    kernel, bias = attention.kernel.numpy().astype(np.float64), attention.bias.numpy()
    x = np.concatenate([event, candidate, event[: len(candidate)] * candidate, [since]])
    x = np.maximum(x @ kernel + bias, 0)
    hidden, last = map(oracle.float64, attention.others)
    return (np.maximum(x @ hidden[0] + hidden[1], 0) @ last[0] + last[1])[0]


def expected_logits(model, exposure):
    interest = np.zeros(24)
    for event, since in zip(exposure.events, exposure.since):
        interest += expected_weight(model.attention, event, exposure.candidate, since) * event
    x = np.concatenate([exposure.dense, *exposure.own, interest])
    return oracle.head(model, oracle.relu_network(x, model.top))


def test_logits_against_numpy():
    model, batch = oracle.make(DIN, CONFIG), oracle.batch_of([5, 0, 12], [3, 2, 1])
    model(batch)
    for weight in model.attention.trainable_weights:  # larger weights and biases, so that each event counts otherwise
        weight.assign(tf.random.normal(weight.shape, stddev=0.7, seed=1))
    outputs = model(batch)
    assert tuple(outputs) == ("ctr", "ctcvr", "conversion")
    expected = [expected_logits(model, exposure) for exposure in oracle.exposures_of(model, batch)]
    # float32: a sum over twelve events of products of a few dozen terms near 1.
    np.testing.assert_allclose(tf.stack(list(outputs.values()), axis=1), expected, rtol=1e-5, atol=5e-6)
    assert np.std(expected, axis=0).min() > 1e-3


def test_flops_count_events_exposures_and_pairs():
    model, batch = oracle.make(DIN, CONFIG), oracle.batch_of([4, 0, 2], [2, 2, 3])
    events, exposures, joined = 4 + 2, 2 + 2 + 3, 4 * 2 + 2 * 3
    top = (4 + 8 * 4 + 24) * 7 + 7 * 6 + 6 * 3
    of_pair = 17 * 5 + 5 * 3 + 3 * 1 + 24  # with the product of the weight and the event
    expected = 2 * (events * 24 * 5 + exposures * (16 * 5 + top) + joined * of_pair)
    assert float(model.forward_flops(batch)) == expected


@pytest.mark.parametrize(("histories", "exposures"), [([], []), ([0, 3], [2, 1]), ([3, 2], [0, 0])])
def test_empty_inputs_have_finite_gradients(histories, exposures):
    oracle.check_empty_inputs(oracle.make(DIN, CONFIG), oracle.batch_of(histories, exposures), exposures)
