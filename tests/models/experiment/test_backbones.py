"""The papers' configurations have the published numbers of parameters and the stated work."""

import pathlib

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.models.experiment import load
from tf_fusedrec.models.parts.encoders import encoder_blocks

CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs"
# Millions of parameters: TurboGR, table 1 (rows of "long" have longer position tables than those of "large").
PUBLISHED = {
    "turbogr_hstu_tiny": 0.17, "turbogr_hstu_small": 1.33, "turbogr_hstu_medium": 10.52, "turbogr_hstu_large": 83.97,
    "turbogr_hstu_long": 83.97, "turbogr_fuxi_tiny": 0.41, "turbogr_fuxi_small": 3.18, "turbogr_fuxi_medium": 25.22,
    "turbogr_fuxi_large": 201.55, "turbogr_fuxi_long": 201.55,
}  # fmt: skip


def built_blocks(name):
    """Builds the blocks of a configuration in a graph, where weights have shapes but take no memory."""
    config = load(CONFIGS / f"{name}.yaml").model
    with tf.Graph().as_default():
        blocks = encoder_blocks(config)
        for block in blocks:
            block.build(tf.TensorShape([None, None, config.dim]))
    return config, blocks


def millions(blocks):
    return sum(int(np.prod(weight.shape)) for block in blocks for weight in block.trainable_weights) / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_backbones_have_the_published_number_of_parameters(name):
    """The paper prints two digits. It counts the blocks alone: no rows and no position embedding of the input."""
    config, blocks = built_blocks(name)
    lacking = (PUBLISHED[name] - millions(blocks)) * 1e6 / len(blocks)
    rounding = 5_000 / len(blocks)
    if "fuxi" in name:
        # The paper has up to 8,850 weights more in a block, in no proportion to its columns or its length. That is less
        # than one of the block's 12 matrices of dim x dim, the smallest of which has 16,384.
        assert -rounding <= lacking <= 8_850 + rounding
    else:
        # Both long models print the figure of the large ones, whose position tables are shorter.
        further = 2 * (config.max_history - 2048)
        assert lacking + further == pytest.approx(0, abs=rounding)


@pytest.mark.parametrize(("name", "linear", "with_attention"), [("grm_4g", 4, 5.8), ("grm_110g", 110, 154)])
def test_grm_has_the_published_complexity_at_the_mean_length(name, linear, with_attention):
    config, blocks = built_blocks(name)
    assert config.max_sequence_length == 3000
    assert 4 * config.dim**2 * config.num_blocks * 2 * 600 / 1e9 == pytest.approx(linear, rel=0.06)
    flops = sum(float(block.forward_flops(tf.constant([0, 600], tf.int64), config.dim)) for block in blocks)
    assert flops / 1e9 == pytest.approx(with_attention, rel=0.01)
