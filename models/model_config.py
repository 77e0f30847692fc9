"""The model section of an experiment: one frozen, checked record for each model. See experiment.py."""

from __future__ import annotations

import dataclasses
from typing import Union

from models.yaml_records import check_at_least, check_choice, check_positive
from tf_fusedrec.config import ROW_DTYPES
from tf_fusedrec.layers.bias_weights import TIME_ENCODINGS
from tf_fusedrec.losses.negatives import SAMPLINGS, SHARINGS

ENCODERS = ("hstu", "fuxi_alpha", "fuxi_beta", "sasrec")


@dataclasses.dataclass(frozen=True)
class RankingConfig:
    """What every model that ranks exposures reads, and what it learns of them."""

    contextual: tuple[str, ...] = ()  # scalar columns of ids
    item_features: tuple[str, ...] = ()  # of history_<name> and exposed_<name>, columns of ids beside the item's
    click_label: str = "exposed_click"
    conversion_label: str = "exposed_conversion"  # CTCVR = click and conversion
    other_labels: tuple[str, ...] = ()  # columns exposed_<name>, each a task of that name beside CTR and CTCVR
    max_history: int = 200  # events; a longer history keeps its newest
    max_exposures: int = 32  # a row with more keeps its last ones
    dim: int = 32  # columns of an embedding row
    dropout: float = 0.0
    min_item_count: int = 1  # items with fewer training interactions share one row, as unknown ones do
    item_dropout: float = 0.0  # share of exposures that train that row instead of their item's; with min_item_count > 1

    def __post_init__(self) -> None:
        for name in ("max_history", "max_exposures", "dim", "min_item_count"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        _check_dropout("dropout", self.dropout)
        _check_dropout("item_dropout", self.item_dropout)
        if self.item_dropout and self.min_item_count == 1:
            raise ValueError("model.item_dropout trains the row of unknown items: it needs model.min_item_count > 1.")
        for name in ("contextual", "item_features", "other_labels"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"model.{name} names a column twice: {list(getattr(self, name))}.")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of what is learnt, in the order of the heads."""
        return ("ctr", "ctcvr", *self.other_labels)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Columns of labels, each once."""
        others = [f"exposed_{name}" for name in self.other_labels]
        return tuple(dict.fromkeys([self.click_label, self.conversion_label, *others]))

    def columns_of(self, role: str) -> tuple[str, ...]:
        """Columns of ids of the role "history" or "exposed", the item's first."""
        return tuple(f"{role}_{name}" for name in ("item", *self.item_features))


@dataclasses.dataclass(frozen=True)
class GRMConfig(RankingConfig):
    """GRM: HSTU blocks over [contextual | historical | exposed] tokens, then MMoE and a head for each task."""

    kind: str = "grm"
    num_blocks: int = 2
    num_heads: int = 2
    qk_dim: int = 16  # columns per head
    value_dim: int = 16
    time_buckets: int = 128  # 0 leaves the time bias out
    num_experts: int = 4
    expert_units: int = 32
    top_k: int = 2
    head_units: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("grm",))
        for name in ("num_blocks", "num_heads", "qk_dim", "value_dim", "num_experts", "expert_units", "head_units"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_at_least("model.time_buckets", self.time_buckets, 0)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"model.top_k must be 1 .. num_experts = {self.num_experts}, got {self.top_k}.")

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest row, N."""
        return len(self.contextual) + self.max_history + self.max_exposures


@dataclasses.dataclass(frozen=True)
class DLRMConfig(RankingConfig):
    """DLRM: products of all pairs of embeddings, the history pooled, then one network with an output for each task."""

    kind: str = "dlrm"
    bottom_units: tuple[int, ...] = (64,)  # hidden layers over the dense features
    top_units: tuple[int, ...] = (64, 32)  # hidden layers over the products

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.kind", self.kind, ("dlrm",))
        for name in ("bottom_units", "top_units"):
            for units in getattr(self, name):
                check_at_least(f"model.{name}", units, 1)


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """Retrieval: next-item prediction with a sampled softmax, over blocks of one kind."""

    max_history: int = 200  # tokens; a longer history keeps its newest
    output_slots: int = 0  # N = max_history + output_slots; the public experiments have 11
    dim: int = 50
    num_blocks: int = 2
    num_heads: int = 1
    qk_dim: int = 50
    value_dim: int = 50
    dropout: float = 0.2
    encoder: str = "hstu"  # one of ENCODERS
    ffn_multiple: int = 1  # hidden columns of FuXi's and SASRec's feed-forward network, in multiples of dim
    position_bias: bool = True  # HSTU: by distance in the sequence
    time_encoding: str = "buckets"  # one of layers.bias_weights.TIME_ENCODINGS
    time_buckets: int = 128  # of "buckets"; 0 leaves the time bias out
    num_negatives: int = 128
    sampling: str = "uniform"  # of negatives, one of negatives.SAMPLINGS
    log_q: bool = False  # takes log sampling probabilities off the logits: for samplings other than uniform
    expansion: int = 1  # k: each position shares the negatives of others, k * num_negatives in all
    sharing: str = "negatives"  # what is shared, one of negatives.SHARINGS
    negatives_dtype: str = "float32"  # of negatives' rows as they travel and as the loss gets them
    share_negatives: bool = False  # one pool for all positions of a batch instead of one for each
    whole_catalogue: bool = False  # every step looks up all items: quicker while they are few; the loss is the same
    temperature: float = 0.05

    def __post_init__(self) -> None:
        for name in ("max_history", "dim", "num_blocks", "num_heads", "qk_dim", "value_dim"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_at_least("model.time_buckets", self.time_buckets, 0)
        _check_dropout("dropout", self.dropout)
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
                f"model.negatives_dtype {self.negatives_dtype!r} is for negatives that are looked up for themselves; "
                "with whole_catalogue, or sampling 'in_batch', none are."
            )
        if self.share_negatives:
            own = {
                "whole_catalogue": self.whole_catalogue,
                "expansion": self.expansion > 1,
                "sampling": self.sampling == "in_batch",
            }
            for name in [name for name, meant in own.items() if meant]:
                raise ValueError(
                    f"model.{name} {getattr(self, name)!r} is for own negatives: set model.share_negatives to false."
                )
        check_positive("model.temperature", self.temperature)

    @property
    def max_sequence_length(self) -> int:
        """N: rows of the position tables, and the divisor of the attention."""
        return self.max_history + self.output_slots


ModelConfig = Union[GRMConfig, DLRMConfig, RetrievalConfig]
RANKING_KINDS = {"grm": GRMConfig, "dlrm": DLRMConfig}


def _check_dropout(name: str, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"model.{name} must be 0 <= {name} < 1, got {dropout}.")
