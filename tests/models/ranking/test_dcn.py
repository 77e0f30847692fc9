"""DCN-V2 equals NumPy exposure by exposure, with full and with low-rank matrices; its FLOPs; empty inputs."""

import numpy as np
import pytest

from models.dcn import DCN
from models.experiment.model_config import DCNConfig
from tests.models.ranking import exposure_oracle as oracle
from tf_fusedrec import tf

COLUMNS = 4 + 8 * (4 + 3)
FULL = DCNConfig(**oracle.FIELDS, cross_layers=3, deep_units=(7, 6))
LOW_RANK = DCNConfig(**oracle.FIELDS, cross_layers=3, deep_units=(7, 6), cross_rank=5)


def expected_logits(model, exposure):
    x_0 = x = np.concatenate([exposure.dense, *exposure.own, *exposure.means])
    for cross in model.crosses:
        kernel, bias = oracle.float64(cross.wide)
        if model.config.cross_rank:
            kernel = oracle.float64(cross.narrow)[0] @ kernel
        assert kernel.shape == (COLUMNS, COLUMNS) and np.linalg.matrix_rank(kernel) <= (
            model.config.cross_rank or COLUMNS
        )
        x = x_0 * (x @ kernel + bias) + x
    return oracle.head(model, np.concatenate([x, oracle.relu_network(x_0, model.deep)]))


@pytest.mark.parametrize("config", [FULL, LOW_RANK], ids=["full", "low_rank"])
def test_logits_against_numpy(config):
    model, batch = oracle.make(DCN, config), oracle.batch_of([5, 0, 12], [3, 2, 1])
    model(batch)
    for cross in model.crosses:  # biases begin at 0, where a wrong one would not show
        cross.wide.bias.assign(tf.random.normal(cross.wide.bias.shape, stddev=0.3, seed=1))
    outputs = model(batch)
    assert tuple(outputs) == ("ctr", "ctcvr", "conversion")
    expected = [expected_logits(model, exposure) for exposure in oracle.exposures_of(model, batch)]
    # float32: three layers with sums of sixty terms near 1.
    np.testing.assert_allclose(tf.stack(list(outputs.values()), axis=1), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("config", [FULL, LOW_RANK], ids=["full", "low_rank"])
def test_flops_are_those_of_the_weights(config):
    model, batch = oracle.make(DCN, config), oracle.batch_of([4, 2], [2, 3])
    model(batch)
    of_kernels = sum(np.prod(weight.shape) for weight in model.trainable_weights if "kernel" in weight.name)
    assert float(model.forward_flops(batch)) == 5 * 2 * of_kernels


@pytest.mark.parametrize(("histories", "exposures"), [([], []), ([0, 3], [2, 1]), ([3, 2], [0, 0])])
def test_empty_inputs_have_finite_gradients(histories, exposures):
    oracle.check_empty_inputs(oracle.make(DCN, FULL), oracle.batch_of(histories, exposures), exposures)
