"""Nothing is padded between ids and loss: a training step's graph has no op that makes rows equally long."""

import numpy as np
import pytest

from tests.models.batches import ranking_batch, retrieval_batch
from tests.models.plain_embedding import PlainEmbedding
from tests.support.graphs import count_ops
from tf_fusedrec import keras, tf
from tf_fusedrec.models.experiment.model_config import GRMConfig, RetrievalConfig
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.retrieval import HSTURetrieval

# Ops that pad a RaggedTensor or multiply padded rows.
PADDING = {"RaggedTensorToTensor", "Pad", "PadV2", "BatchMatMulV2", "BatchMatMulV3"}
SIZES = {"num_blocks": 1, "dim": 8, "num_heads": 2, "qk_dim": 4, "value_dim": 4}


def ops_of_a_step(model, batch):
    model(batch)  # makes the weights
    model.compile(keras.optimizers.SGD(0.1))
    return count_ops(tf.function(model.train_step, autograph=False).get_concrete_function(batch))


def retrieval(**fields):
    config = RetrievalConfig(**SIZES, max_history=10, num_negatives=5, **fields)
    model = HSTURetrieval(config, PlainEmbedding(config.table_of_feature, 8), np.arange(1, 60))
    return ops_of_a_step(model, retrieval_batch([4, 0, 7]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "negatives"), [("hstu", "own"), ("fuxi_alpha", "share_negatives"), ("fuxi_beta", "whole_catalogue")]
)
def test_retrieval(encoder, negatives):
    ops = retrieval(encoder=encoder, **({} if negatives == "own" else {negatives: True}))
    # A segment's own negatives are [S, n, D]. Their product with the query is a batch of [n, D] x [D].
    allowed = {"BatchMatMulV2"} if negatives == "own" else set()
    assert not (PADDING - allowed) & set(ops)
    assert ops["Fusedrec>JaggedAttention" if encoder == "hstu" else "Fusedrec>JaggedBiasAttention"] == 1


@pytest.mark.slow
def test_ranking():
    config = GRMConfig(**SIZES, contextual=("user_id",), max_history=12, max_exposures=6)
    model = GRM(config, PlainEmbedding(config.table_of_feature, 8), np.arange(1, 60), np.ones(59))
    ops = ops_of_a_step(model, ranking_batch([5, 0, 12], [3, 2, 6]))
    assert not PADDING & set(ops)
    assert ops["Fusedrec>JaggedAttention"] == ops["Fusedrec>JaggedAttentionGrad"] == 1


@pytest.mark.slow
def test_the_softmax_of_sasrec_does_pad_and_the_check_sees_it():
    assert "RaggedTensorToTensor" in retrieval(encoder="sasrec", whole_catalogue=True)
