"""The model section of an experiment: one frozen, checked record per model. See records.py."""

from __future__ import annotations

import dataclasses

from tf_fusedrec.config import ROW_DTYPES, SAMPLINGS, SHARINGS, TIME_ENCODINGS
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.experiment.yaml_records import check_at_least, check_choice, check_dropout, check_positive

ENCODERS = ("hstu", "fuxi_alpha", "fuxi_beta", "sasrec")


@dataclasses.dataclass(frozen=True)
class GRMConfig(RankingConfig):
    """GRM: HSTU blocks over [contextual | historical | exposed] tokens, then MMoE and a head per task."""

    kind: str = "grm"
    time_features: bool = False  # as in RankingConfig; the time bias of the blocks shows ages, but no hour
    num_blocks: int = 2
    num_heads: int = 2
    qk_dim: int = 16  # columns per head
    value_dim: int = 16
    time_buckets: int = 128  # buckets of the time bias; 0: no time bias
    group_norm: bool = False  # normalises context, history and exposed tokens by own weights before each block
    attention_dropout: float = 0.0  # share of the attention's weights that a training step sets to 0
    causal_context: bool = False  # context tokens see only those before them, so a kept user state takes new events
    cross_layers: int = 0  # DCN-V2's, before the experts, of a target's output and the columns beside it; 0: none
    cross_rank: int = 0  # rank of a cross layer's matrix; 0: a full matrix
    profiles: int = 2  # weighed sums of the history's item rows beside the output; for cross_layers only
    num_experts: int = 4
    expert_units: int = 32
    top_k: int = 2
    head_units: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("grm",))
        check_dropout("attention_dropout", self.attention_dropout)
        for name in ("num_blocks", "num_heads", "qk_dim", "value_dim", "num_experts", "expert_units", "head_units"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_at_least("model.time_buckets", self.time_buckets, 0)
        for name in ("cross_layers", "cross_rank", "profiles"):
            check_at_least(f"model.{name}", getattr(self, name), 0)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"model.top_k must be 1 .. num_experts = {self.num_experts}, got {self.top_k}.")

    @property
    def max_sequence_length(self) -> int:
        """N, the tokens of the longest row."""
        return self.context_tokens + self.max_history + self.max_exposures

    @property
    def context_tokens(self) -> int:
        """Context tokens of a row: one for each column of ids, and one for all columns of numbers."""
        return len(self.contextual_features) + bool(self.contextual_dense)


@dataclasses.dataclass(frozen=True)
class DLRMConfig(RankingConfig):
    """DLRM: products of all pairs of embeddings, with a pooled history, then one network with an output per task."""

    kind: str = "dlrm"
    bottom_units: tuple[int, ...] = (64,)  # hidden layers over the dense features
    top_units: tuple[int, ...] = (64, 32)  # hidden layers over the products

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("dlrm",))
        if not (self.time_features or any(self.dense_columns(role) for role in ("contextual", "history", "exposed"))):
            raise ValueError(
                "model.time_features is False and there are no dense columns, so the bottom network has no input. Set "
                "time_features to true, or name columns in exposed_dense."
            )
        _check_units(self, "bottom_units")
        _check_units(self, "top_units")


@dataclasses.dataclass(frozen=True)
class DINConfig(RankingConfig):
    """DIN: target attention of each exposure over the events of its user, then one network with an output per task."""

    kind: str = "din"
    attention_units: tuple[int, ...] = (32,)  # hidden layers of the activation unit, at least one
    top_units: tuple[int, ...] = (64, 32)  # hidden layers over the embeddings and the weighted history

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("din",))
        _check_units(self, "attention_units", at_least_one=True)
        _check_units(self, "top_units")


@dataclasses.dataclass(frozen=True)
class DCNConfig(RankingConfig):
    """DCN-V2: cross layers beside a deep network, with a pooled history, then one output per task."""

    kind: str = "dcn"
    cross_layers: int = 2
    cross_rank: int = 0  # rank of a cross layer's matrix; 0: a full matrix
    deep_units: tuple[int, ...] = (64, 32)  # hidden layers of the deep network, at least one

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("dcn",))
        check_at_least("model.cross_layers", self.cross_layers, 1)
        check_at_least("model.cross_rank", self.cross_rank, 0)
        _check_units(self, "deep_units", at_least_one=True)


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """Retrieval: next-item prediction with a sampled softmax, over blocks of one kind."""

    max_history: int = 200  # tokens; a longer history keeps its newest
    output_slots: int = 0  # N = max_history + output_slots; the public experiments use 11
    dim: int = 50
    num_blocks: int = 2
    num_heads: int = 1
    qk_dim: int = 50
    value_dim: int = 50
    dropout: float = 0.2
    attention_dropout: float = 0.0  # HSTU: share of the attention's weights that a training step sets to 0
    encoder: str = "hstu"  # one of ENCODERS
    ffn_multiple: int = 1  # hidden columns of FuXi's and SASRec's feed-forward network, in multiples of dim
    position_bias: bool = True  # HSTU: whether to have a bias by distance in the sequence
    time_encoding: str = "buckets"  # one of config.TIME_ENCODINGS
    time_buckets: int = 128  # buckets of the time encoding "buckets"; 0: no time bias
    num_negatives: int = 128
    sampling: str = "uniform"  # distribution of negatives, one of config.SAMPLINGS
    log_q: bool = False  # subtracts log sampling probabilities from the logits; not for "uniform"
    expansion: int = 1  # k: a position also uses other positions' negatives, k * num_negatives in all
    sharing: str = "negatives"  # form of the expansion, one of config.SHARINGS
    negatives_dtype: str = "float32"  # dtype of the negatives' rows in the all-to-all and in the loss
    share_negatives: bool = False  # one pool for all positions of a batch instead of one per position
    whole_catalogue: bool = False  # every step looks up all items: faster for few items, with the same loss
    temperature: float = 0.05

    def __post_init__(self) -> None:
        for name in ("max_history", "dim", "num_blocks", "num_heads", "qk_dim", "value_dim"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_at_least("model.time_buckets", self.time_buckets, 0)
        check_dropout("dropout", self.dropout)
        check_dropout("attention_dropout", self.attention_dropout)
        if self.attention_dropout and self.encoder != "hstu":
            raise ValueError(f"model.attention_dropout is for the encoder 'hstu', got {self.encoder!r}. Set it to 0.")
        check_at_least("model.num_negatives", self.num_negatives, 1)
        check_choice("model.encoder", self.encoder, ENCODERS)
        check_choice("model.time_encoding", self.time_encoding, TIME_ENCODINGS)
        check_at_least("model.ffn_multiple", self.ffn_multiple, 1)
        check_at_least("model.output_slots", self.output_slots, 0)
        check_choice("model.sampling", self.sampling, SAMPLINGS)
        check_choice("model.sharing", self.sharing, SHARINGS)
        check_at_least("model.expansion", self.expansion, 1)
        if self.log_q and self.sampling == "uniform":
            raise ValueError("model.log_q corrects nothing where model.sampling is 'uniform': set it to false.")
        check_choice("model.negatives_dtype", self.negatives_dtype, ROW_DTYPES)
        if self.negatives_dtype != "float32" and (self.whole_catalogue or self.sampling == "in_batch"):
            raise ValueError(
                f"model.negatives_dtype {self.negatives_dtype!r} needs a lookup of negatives alone; whole_catalogue "
                "and sampling 'in_batch' have none. Set it to 'float32'."
            )
        if self.share_negatives:
            own = {
                "whole_catalogue": self.whole_catalogue,
                "expansion": self.expansion > 1,
                "sampling": self.sampling == "in_batch",
            }
            for name in [name for name, used in own.items() if used]:
                raise ValueError(
                    f"model.{name} {getattr(self, name)!r} is for own negatives: set model.share_negatives to false."
                )
        check_positive("model.temperature", self.temperature)

    @property
    def table_of_feature(self) -> dict[str, str]:
        """The table that each looked-up feature reads, by feature name."""
        return {"item_id": "item", "negative": "item"}

    @property
    def max_sequence_length(self) -> int:
        """N, the rows of the position tables and the divisor of the attention."""
        return self.max_history + self.output_slots


ModelConfig = GRMConfig | DLRMConfig | DINConfig | DCNConfig | RetrievalConfig
RANKING_KINDS = {"grm": GRMConfig, "dlrm": DLRMConfig, "din": DINConfig, "dcn": DCNConfig}


def _check_units(config: RankingConfig, name: str, *, at_least_one: bool = False) -> None:
    if at_least_one and not getattr(config, name):
        raise ValueError(f"model.{name} must have a layer, got none. Give its units, such as [32].")
    for units in getattr(config, name):
        check_at_least(f"model.{name}", units, 1)
