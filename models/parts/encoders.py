"""Builds the stack of sequence blocks of an experiment for grm.py and retrieval.py."""

from __future__ import annotations

from typing import Any, overload

from tf_fusedrec.layers import HSTU, FuXi, SASRec
from tf_fusedrec.models.experiment.model_config import GRMConfig, RetrievalConfig

Block = HSTU | FuXi | SASRec


@overload
def encoder_blocks(config: GRMConfig) -> list[HSTU]: ...
@overload
def encoder_blocks(config: RetrievalConfig) -> list[Block]: ...
def encoder_blocks(config: GRMConfig | RetrievalConfig) -> list[Any]:
    """Returns the blocks of a model, first to last."""
    return [_block(config, f"block_{number}") for number in range(config.num_blocks)]


def attends_by_time(config: GRMConfig | RetrievalConfig) -> bool:
    """Returns whether the blocks take timestamps."""
    if isinstance(config, RetrievalConfig) and config.encoder == "sasrec":
        return False
    return _time_encoding(config) != "none"


def _block(config: GRMConfig | RetrievalConfig, name: str) -> Block:
    common: dict[str, Any] = {
        "num_heads": config.num_heads,
        "max_sequence_length": config.max_sequence_length,
        "dropout": config.dropout,
        "name": name,
    }
    if isinstance(config, RetrievalConfig) and config.encoder == "sasrec":
        return SASRec(ffn_units=config.ffn_multiple * config.dim, **common)
    common |= {
        "qk_dim": config.qk_dim,
        "value_dim": config.value_dim,
        "time_encoding": _time_encoding(config),
        "time_buckets": config.time_buckets or 1,
    }
    if isinstance(config, GRMConfig):
        return HSTU(form="mtgrboost", attention_dropout=config.attention_dropout, **common)
    if config.encoder == "hstu":
        common |= {"position_bias": config.position_bias, "attention_dropout": config.attention_dropout}
        return HSTU(form="research", **common)
    return FuXi(form=config.encoder.removeprefix("fuxi_"), ffn_multiple=config.ffn_multiple, **common)


def _time_encoding(config: GRMConfig | RetrievalConfig) -> str:
    encoding = config.time_encoding if isinstance(config, RetrievalConfig) else "buckets"
    return "none" if encoding == "buckets" and not config.time_buckets else encoding
