"""One experiment: a YAML file of configs/ becomes a frozen, checked record.

The first thing that every entry point reads.

    task: ranking | retrieval        which model; decides what `model:` may hold
    data: / model: / embedding: / train: / evaluate:     one record each, below

Nothing is ignored: an unknown section or field, or a value of the wrong type, is refused by name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Union

import yaml

from models.yaml_records import make_record, override_field, plain
from tf_fusedrec.layers.bias_weights import TIME_ENCODINGS
from tf_fusedrec.negatives import SAMPLINGS, SHARINGS
from tf_fusedrec.topology import RULES, Topology

TASKS = ("ranking", "retrieval")
SOURCES = {
    "synthetic-ranking": "ranking",
    "synthetic-retrieval": "retrieval",
    "movielens": "retrieval",
    "kuairand": "ranking",
}
ENCODERS = ("hstu", "fuxi_alpha", "fuxi_beta", "sasrec")
TABLE_OPTIMIZERS = ("adagrad", "adam", "sgd")
WIRE_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ("users", "items", "clusters", "mean_history", "exposures")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the data come from. Sizes are of a synthetic set; 0: its default."""

    source: str  # one of SOURCES
    input: str = ""  # raw files (movielens, kuairand), or a converted folder
    users: int = 0
    items: int = 0
    clusters: int = 0
    mean_history: int = 0  # interactions per user
    exposures: int = 0  # per user and split

    def __post_init__(self) -> None:
        _check_choice("data.source", self.source, tuple(SOURCES))
        given = list(self.sizes())
        if given and not self.source.startswith("synthetic"):
            raise ValueError(
                f"data.{given[0]} is a size of a synthetic data set, but data.source is {self.source!r}. Remove it."
            )
        for name in given:
            _check_at_least(f"data.{name}", getattr(self, name), 1)

    def sizes(self) -> dict[str, int]:
        """The sizes that were given, by name."""
        return {name: getattr(self, name) for name in _SIZES if getattr(self, name)}


@dataclasses.dataclass(frozen=True)
class RankingConfig:
    """GRM: HSTU blocks over [contextual | historical | exposed] tokens, then MMoE and two heads."""

    contextual: tuple[str, ...] = ()  # scalar columns of ids; one token each
    click_label: str = "exposed_click"
    conversion_label: str = "exposed_conversion"  # CTCVR = click and conversion
    max_history: int = 200  # tokens; a longer history keeps its newest
    max_exposures: int = 32  # tokens; a row with more keeps its last ones
    dim: int = 32  # columns of a token
    num_blocks: int = 2
    num_heads: int = 2
    qk_dim: int = 16  # columns per head
    value_dim: int = 16
    dropout: float = 0.0
    time_buckets: int = 128  # 0 leaves the time bias out
    num_experts: int = 4
    expert_units: int = 32
    top_k: int = 2
    head_units: int = 16

    def __post_init__(self) -> None:
        _check_sizes_of_model(self)
        for name in ("max_exposures", "num_experts", "expert_units", "head_units"):
            _check_at_least(f"model.{name}", getattr(self, name), 1)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"model.top_k must be 1 .. num_experts = {self.num_experts}, got {self.top_k}.")
        if len(set(self.contextual)) != len(self.contextual):
            raise ValueError(f"model.contextual names a column twice: {list(self.contextual)}.")

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest row, N."""
        return len(self.contextual) + self.max_history + self.max_exposures


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
    share_negatives: bool = False  # one pool for all positions of a batch instead of one for each
    whole_catalogue: bool = False  # every step looks up all items: quicker while they are few; the loss is the same
    temperature: float = 0.05

    def __post_init__(self) -> None:
        _check_sizes_of_model(self)
        _check_at_least("model.num_negatives", self.num_negatives, 1)
        _check_choice("model.encoder", self.encoder, ENCODERS)
        _check_choice("model.time_encoding", self.time_encoding, TIME_ENCODINGS)
        _check_at_least("model.ffn_multiple", self.ffn_multiple, 1)
        _check_at_least("model.output_slots", self.output_slots, 0)
        _check_choice("model.sampling", self.sampling, SAMPLINGS)
        _check_choice("model.sharing", self.sharing, SHARINGS)
        _check_at_least("model.expansion", self.expansion, 1)
        if self.log_q and self.sampling == "uniform":
            raise ValueError("model.log_q corrects nothing where model.sampling is 'uniform': set it to false.")
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
        _check_positive("model.temperature", self.temperature)

    @property
    def max_sequence_length(self) -> int:
        """N: rows of the position tables, and the divisor of the attention."""
        return self.max_history + self.output_slots


ModelConfig = Union[RankingConfig, RetrievalConfig]


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """How the rows of the tables begin and are trained."""

    optimizer: str = "adagrad"  # one of TABLE_OPTIMIZERS, of tf_fusedrec.optimizers
    learning_rate: float = 0.05
    stddev: float = 0.02  # of a new row's truncated normal values
    beta_2: float = 0.999  # of Adam
    epsilon: float = 1e-7  # of Adam
    groups: int = 1  # of ranks, each with a replica of the tables; it must divide the ranks. See tf_fusedrec.Topology
    rule: str = "gradient_sync"  # what keeps replicas equal, one of topology.RULES
    sync_every: int = 1  # updates, of rule weight_sync
    moment_scale: float = 0.0  # of rule weight_sync; 0: groups
    replicas_together: bool = False  # consecutive ranks hold replicas of one shard, in place of one group
    wire_dtype: str = "float32"  # of rows and gradients on their way: float32, bfloat16 or float16

    @property
    def topology(self) -> Topology:
        return Topology(
            self.groups,
            self.rule,
            sync_every=self.sync_every,
            moment_scale=self.moment_scale or None,
            replicas_together=self.replicas_together,
        )

    def __post_init__(self) -> None:
        _check_at_least("embedding.groups", self.groups, 1)
        _check_choice("embedding.rule", self.rule, RULES)
        _check_at_least("embedding.sync_every", self.sync_every, 1)
        _check_choice("embedding.wire_dtype", self.wire_dtype, WIRE_DTYPES)
        try:
            _ = self.topology
        except ValueError as error:
            raise ValueError(f"embedding: {error}") from error
        _check_choice("embedding.optimizer", self.optimizer, TABLE_OPTIMIZERS)
        _check_positive("embedding.learning_rate", self.learning_rate)
        _check_positive("embedding.stddev", self.stddev)
        _check_positive("embedding.epsilon", self.epsilon)
        _check_fraction("embedding.beta_2", self.beta_2)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop. The dense weights are trained with Adam."""

    epochs: int = 1
    target_tokens: int = 4096  # of one batch of one rank
    learning_rate: float = 1e-3
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        _check_at_least("train.epochs", self.epochs, 1)
        _check_at_least("train.target_tokens", self.target_tokens, 1)
        _check_positive("train.learning_rate", self.learning_rate)
        _check_positive("train.epsilon", self.epsilon)
        _check_fraction("train.beta_2", self.beta_2)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """The held-out split."""

    target_tokens: int = 8192  # of one batch of one rank
    cutoffs: tuple[int, ...] = (10, 50)  # K of HR@K and NDCG@K, retrieval only

    def __post_init__(self) -> None:
        _check_at_least("evaluate.target_tokens", self.target_tokens, 1)
        if not self.cutoffs:
            raise ValueError("evaluate.cutoffs must name at least one K, got none.")
        for cutoff in self.cutoffs:
            _check_at_least("evaluate.cutoffs", cutoff, 1)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a run depends on, but for the number of ranks."""

    name: str
    task: str
    data: DataConfig
    model: ModelConfig
    embedding: EmbeddingConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    seed: int = 0

    def __post_init__(self) -> None:
        if SOURCES[self.data.source] != self.task:
            fitting = [source for source, task in SOURCES.items() if task == self.task]
            raise ValueError(
                f"data.source {self.data.source!r} is {SOURCES[self.data.source]} data, "
                f"but task is {self.task!r}. Choose one of {fitting}."
            )
        _check_at_least("seed", self.seed, 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts and lists, as YAML and JSON hold them; `from_dict` is the inverse."""
        return plain(dataclasses.asdict(self))


def load(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
      path: YAML file.
      overrides: "section.field=value" or "field=value"; the value is parsed as YAML.

    Raises:
      ValueError: no such file, not YAML, an unknown section or field, a wrong type, a value out
        of range.
    """
    if not os.path.isfile(path):
        raise ValueError(f"--config must be a YAML file, but there is no file {os.fspath(path)!r}.")
    with open(path, encoding="utf-8") as file:
        try:
            fields = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{os.fspath(path)} is not YAML: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{os.fspath(path)} must hold sections, got {type(fields).__name__}.")
    for override in overrides:
        override_field(fields, override)
    return from_dict(fields)


def from_dict(fields: Mapping[str, Any]) -> Experiment:
    """The experiment of nested dicts; refuses as `load` does."""
    fields = dict(fields)
    task = fields.get("task")
    _check_choice("task", task, TASKS)
    sections = {
        "data": DataConfig,
        "model": RankingConfig if task == "ranking" else RetrievalConfig,
        "embedding": EmbeddingConfig,
        "train": TrainConfig,
        "evaluate": EvaluateConfig,
    }
    for name, record in sections.items():
        fields[name] = make_record(record, fields.get(name), name)
    return make_record(Experiment, fields, "")


def _check_sizes_of_model(model: ModelConfig) -> None:
    for name in ("max_history", "dim", "num_blocks", "num_heads", "qk_dim", "value_dim"):
        _check_at_least(f"model.{name}", getattr(model, name), 1)
    _check_at_least("model.time_buckets", model.time_buckets, 0)
    if not 0 <= model.dropout < 1:
        raise ValueError(f"model.dropout must be 0 <= dropout < 1, got {model.dropout}.")


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}.")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}.")


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")
