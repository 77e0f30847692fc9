"""The FLOPs of benchmarks/papers/sequence_batching equal a count over the mask and a count by hand."""

import numpy as np

from benchmarks.papers.sequence_batching import forward_flops
from models.experiment.model_config import GRMConfig
from tests.oracles.visible_pairs import visible_pairs

CONFIG = GRMConfig(
    contextual=("a", "b"), dim=8, num_blocks=3, num_heads=2, qk_dim=4, value_dim=5, num_experts=3,
    expert_units=6, head_units=7,
)  # fmt: skip


def test_attention_counts_the_pairs_that_the_mask_shows():
    history, exposed = np.array([4, 0, 7]), np.array([2, 3, 0])
    pairs = sum(int(visible_pairs(2 + h + e, e, contextual_length=2).sum()) for h, e in zip(history, exposed))
    # A pair costs products of 4 and of 5 columns, in 2 heads and 3 blocks. Multiply and add count as two.
    assert forward_flops(CONFIG, history, exposed).attention == pairs * 2 * (4 + 5) * 2 * 3


def test_matrix_products_by_hand():
    flops = forward_flops(CONFIG, np.array([4, 1]), np.array([2, 3]))
    assert flops.tokens == 4 + 1 + 2 + 3 + 2 * 2
    to_uqkv, back = 2 * 8 * (2 * 2 * (4 + 5)), 2 * (2 * 5) * 8
    assert flops.projections == 3 * 14 * (to_uqkv + back)
    # Two tasks that keep 2 experts each may need all 3.
    experts, gates, mixing, heads = 2 * 8 * 18, 2 * 2 * 8 * 3, 2 * 2 * 2 * 6, 2 * 2 * (6 * 7 + 7)
    assert flops.heads == 5 * (experts + gates + mixing + heads)


def test_no_rows_cost_nothing():
    assert forward_flops(CONFIG, np.empty(0, np.int64), np.empty(0, np.int64)).total == 0
