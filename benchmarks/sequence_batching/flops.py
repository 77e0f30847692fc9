"""Forward floating point operations of GRM, from the lengths of its rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from models.experiment.model_config import GRMConfig


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward floating point operations of a data set in one layout."""

    tokens: int
    projections: int  # in the HSTU blocks
    attention: int
    heads: int  # experts, gates and task heads

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.heads


def forward_flops(config: GRMConfig, history: np.ndarray, exposed: np.ndarray) -> Flops:
    """Returns the FLOPs of rows with the given lengths.

    Args:
      config: Sizes of the model.
      history, exposed: <int64>[B], tokens of each row.
    """
    context = len(config.contextual)
    tokens = int((context + history + exposed).sum())
    inner_qk, inner_value = config.num_heads * config.qk_dim, config.num_heads * config.value_dim
    per_token = 2 * config.dim * 2 * (inner_qk + inner_value) + 2 * inner_value * config.dim
    # Context sees context and history. History sees context and its past. A target also sees itself.
    pairs = context * (context + history) + history * context + history * (history + 1) // 2
    pairs = pairs + exposed * (context + history + 1)
    computed = min(config.num_experts, 2 * config.top_k)  # where two tasks keep different experts
    per_exposure = 2 * config.dim * computed * config.expert_units  # experts
    per_exposure += 2 * 2 * config.dim * config.num_experts  # gates of two tasks
    per_exposure += 2 * 2 * config.top_k * config.expert_units  # mixing
    per_exposure += 2 * 2 * (config.expert_units + 1) * config.head_units  # heads
    return Flops(
        tokens,
        config.num_blocks * tokens * per_token,
        config.num_blocks * int(pairs.sum()) * 2 * (inner_qk + inner_value),
        int(exposed.sum()) * per_exposure,
    )
