"""Reads an experiment: a YAML file of configs/ becomes a frozen, checked record.

Every entry point begins here.

    task: ranking | retrieval        the kind of model; it decides the fields of `model:`
    data: / model: / embedding: / train: / evaluate:     one record each, below

An unknown section or field, or a value of the wrong type, is refused by name.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tf_fusedrec.config import TableConfig, check_file_name
from tf_fusedrec.data.plan import SCOPES
from tf_fusedrec.exchange.topology import RULES, Topology
from tf_fusedrec.models.data_sets.interactions import LAST_HELD_OUT
from tf_fusedrec.models.data_sets.table import ColumnMap
from tf_fusedrec.models.experiment.data_config import SOURCES, WINDOWED, DataConfig
from tf_fusedrec.models.experiment.model_config import RANKING_KINDS, ModelConfig, RetrievalConfig
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.experiment.table_options import (
    LEARNING_RATES,
    TABLE_OPTIMIZERS,
    Defaults,
    make_rule,
    make_tables,
)
from tf_fusedrec.models.experiment.yaml_records import (
    check_at_least,
    check_choice,
    check_fraction,
    check_positive,
    did_you_mean,
    make_record,
    override_field,
    plain,
    read_yaml,
    with_place,
)
from tf_fusedrec.optimizers.rules import Rule
from tf_fusedrec.schedules import schedule

TASKS = ("ranking", "retrieval")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
TRACKERS = ("", "mlflow", "wandb")
WIRE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Options, update rule and replicas of the tables.

    Attributes:
      all_tables: Fields of TableConfig for all tables but external ones, such as {limits: {ttl: 100000}};
        no optimizer and no initializer, which the fields above name.
      tables: Fields of TableConfig by name of a table, such as {item: {limits: {max_rows_per_rank: 1000000, eviction:
        lru}}}. They replace fields of all_tables. `optimizer` is a name, or {name: adam, learning_rate: 0.001, beta_2:
        0.99} with any fields of that rule; the fields above replace what it leaves out. `initializer` is one of
        INITIALIZERS, or {name: uniform, minval: -0.1, maxval: 0.1}. Ranking models project rows of another `dim` to
        model.dim.
    """

    optimizer: str = "adagrad"  # one of TABLE_OPTIMIZERS, of tf_fusedrec.optimizers
    learning_rate: float = 0.0  # 0: 0.001 (Adam, RMSProp) or 0.05
    stddev: float = 0.02  # standard deviation of a new row's truncated normal values
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more arguments of the optimizer
    all_tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    groups: int = 1  # groups of ranks, each with a replica; a divisor of the number of ranks. See tf_fusedrec.Topology
    rule: str = "gradient_sync"  # rule that keeps replicas equal, one of topology.RULES
    sync_every: int = 1  # updates between two averages under the rule weight_sync
    moment_scale: float = 0.0  # moment scale under the rule weight_sync; 0: the number of groups
    replicas_together: bool = False  # consecutive ranks hold replicas of one shard instead of shards of one replica
    average_late: bool = False  # merges the mean of weight_sync one update late, exchanged while that batch computes
    wire_dtype: str = "float32"  # dtype of rows and gradients in the all-to-alls: float32, bfloat16 or float16

    @property
    def rule_of_tables(self) -> Rule:
        """The record of the optimizer. Raises ValueError: an argument is unknown or out of its range."""
        rate = self.learning_rate or LEARNING_RATES[self.optimizer]
        return make_rule("embedding.arguments", self.optimizer, rate, self.arguments)

    @property
    def topology(self) -> Topology:
        return Topology(
            self.groups,
            self.rule,
            sync_every=self.sync_every,
            moment_scale=self.moment_scale or None,
            replicas_together=self.replicas_together,
            average_late=self.average_late,
        )

    def __post_init__(self) -> None:
        check_at_least("embedding.groups", self.groups, 1)
        check_choice("embedding.rule", self.rule, RULES)
        check_at_least("embedding.sync_every", self.sync_every, 1)
        check_choice("embedding.wire_dtype", self.wire_dtype, WIRE_DTYPES)
        try:
            _ = self.topology
        except ValueError as error:
            raise ValueError(f"embedding: {error}") from error
        check_choice("embedding.optimizer", self.optimizer, tuple(TABLE_OPTIMIZERS))
        check_at_least("embedding.learning_rate", self.learning_rate, 0)
        check_positive("embedding.stddev", self.stddev)
        _ = self.rule_of_tables


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop. Adam trains the dense weights."""

    epochs: int = 1
    target_tokens_per_rank: int = 4096  # tokens of one batch on one rank
    balance: str = "rank"  # or "global", which deals out the rows of all ranks' batches, longest first
    quadratic_cost: float = 0.0  # c > 0 balances L + c L^2 instead of L, for rows of L tokens
    stochastic_length: float = 0.0  # alpha of tf_fusedrec.data.StochasticLength, 1 < alpha <= 2; 0: whole histories
    schedule: str = "sync"  # or dual_buffer(lead=1), semi_async, frozen_window(M), nested(M, lead=1), pipelined(depth)
    cluster_samples: bool = False  # frozen_window(M), nested(M): orders a batch so that micro-batches share few ids
    accumulate_steps: int = 1  # batches whose mean gradient makes one update of the tables and of the dense weights
    precision: str = "float32"  # Keras' policy, one of PRECISIONS
    learning_rate: float = 1e-3
    beta_2: float = 0.999
    epsilon: float = 1e-7
    progressive_steps: int = 0  # ranking: steps in a window of progressive AUC and NE; 0: no progressive metrics
    embedding_metrics: bool = False  # reports tables and exchanges after every epoch (EmbeddingMetrics)
    patience: int = (
        0  # epochs without a better val_loss (retrieval: HR; no validation: loss) that end training; 0: none
    )
    keep_best: str = ""  # metric whose best epoch ends the job; "": with a validation split, the first AUC or HR
    tracker: str = ""  # "mlflow" (metrics have _at_ for @) or "wandb": rank 0 sends it settings and epochs
    timeline_steps: int = 0  # steps to record into the output folder, see fr.callbacks.Timeline; slows ranks; 0: none

    def __post_init__(self) -> None:
        check_at_least("train.epochs", self.epochs, 1)
        check_at_least("train.progressive_steps", self.progressive_steps, 0)
        check_at_least("train.patience", self.patience, 0)
        check_at_least("train.timeline_steps", self.timeline_steps, 0)
        check_choice("train.tracker", self.tracker, TRACKERS)
        check_at_least("train.target_tokens_per_rank", self.target_tokens_per_rank, 1)
        check_choice("train.balance", self.balance, SCOPES)
        check_at_least("train.accumulate_steps", self.accumulate_steps, 1)
        check_choice("train.precision", self.precision, PRECISIONS)
        if self.stochastic_length and not 1 < self.stochastic_length <= 2:
            raise ValueError(
                f"train.stochastic_length must be > 1 and <= 2, or 0 for whole histories, got {self.stochastic_length}."
            )
        if not self.quadratic_cost >= 0:
            raise ValueError(f"train.quadratic_cost must be >= 0, got {self.quadratic_cost}.")
        try:
            stages = schedule.get(self.schedule).stages
        except ValueError as error:
            raise ValueError(f"train.schedule: {error}") from error
        if self.cluster_samples and stages.micro_batches < 2:
            raise ValueError(
                f"train.cluster_samples is True, but train.schedule {self.schedule!r} has no micro-batches that could "
                "share ids. Use frozen_window(M) or nested(M) with M >= 2, or remove it."
            )
        # The scale of the loss is taken off at once, so gradients can wait for nothing.
        waits = self.accumulate_steps > 1 or stages.micro_batches or stages.return_rows
        if self.precision == "mixed_float16" and waits:
            raise ValueError(
                f"train.precision is 'mixed_float16', but train.schedule {self.schedule!r} or train.accumulate_steps "
                f"{self.accumulate_steps} lets gradients wait, without the scale of their loss. Set train.precision to "
                "'mixed_bfloat16', or the schedule to sync or dual_buffer and accumulate_steps to 1."
            )
        check_positive("train.learning_rate", self.learning_rate)
        check_positive("train.epsilon", self.epsilon)
        check_fraction("train.beta_2", self.beta_2)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation on the held-out split."""

    target_tokens_per_rank: int = 8192  # tokens of one batch on one rank
    cutoffs: tuple[int, ...] = (10, 50)  # retrieval: values K of HR@K and NDCG@K

    def __post_init__(self) -> None:
        check_at_least("evaluate.target_tokens_per_rank", self.target_tokens_per_rank, 1)
        if not self.cutoffs:
            raise ValueError("evaluate.cutoffs must name at least one K, got none.")
        for cutoff in self.cutoffs:
            check_at_least("evaluate.cutoffs", cutoff, 1)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of a run except the number of ranks."""

    name: str
    task: str
    data: DataConfig
    model: ModelConfig
    embedding: EmbeddingConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in SOURCES[self.data.source]:
            fitting = [source for source, tasks in SOURCES.items() if self.task in tasks]
            raise ValueError(
                f"data.source {self.data.source!r} is {SOURCES[self.data.source][0]} data, "
                f"but task is {self.task!r}. Choose one of {fitting}."
            )
        if self.data.follow and self.train.epochs != 1:
            raise ValueError(
                f"data.follow trains every partition once, so train.epochs must be 1, got {self.train.epochs}."
            )
        if isinstance(self.model, RankingConfig) and self.data.source in WINDOWED:
            longest = self.model.max_exposures
            if longest < self.data.window:
                raise ValueError(
                    f"data.window is {self.data.window}, but model.max_exposures is {longest}, so a row would lose "
                    "exposures. Raise model.max_exposures, or lower data.window."
                )
        if self.data.source == "table":
            self.data.column_map.check_task(self.task)
            if isinstance(self.model, RankingConfig):
                _check_mapped(self.model, self.data.column_map)
        if self.task == "retrieval":
            check_choice("data.held_out", self.data.held_out, LAST_HELD_OUT)
            for name, value in (("earlier", self.data.earlier), ("follow", self.data.follows_table)):
                if value:
                    raise ValueError(f"data.{name} of a table is for the task 'ranking', got {value!r}. Remove it.")
        if self.train.stochastic_length and isinstance(self.model, RankingConfig) and self.model.item_lists:
            raise ValueError(
                f"train.stochastic_length is {self.train.stochastic_length}, but model.item_lists "
                f"{list(self.model.item_lists)} have several ids of an event, which are not cut. Set one of them only."
            )
        if self.train.progressive_steps and self.task != "ranking":
            raise ValueError(f"train.progressive_steps is for ranking only, but task is {self.task!r}. Remove it.")
        check_file_name("name", self.name)
        if self.train.keep_best:
            check_choice("train.keep_best", self.train.keep_best, self.metrics)
        check_at_least("seed", self.seed, 0)
        for table in self.tables:
            self.embedding.topology.check_table(table)
            if isinstance(self.model, RetrievalConfig) and table.dim != self.model.dim:
                raise ValueError(
                    f"embedding.tables.{table.name}.dim is {table.dim}, but model.dim is {self.model.dim}, and a "
                    "retrieval model compares its vectors with the rows themselves. Set model.dim."
                )

    @property
    def metrics(self) -> list[str]:
        """Names of the results of an evaluation that can choose the best epoch."""
        if isinstance(self.model, RankingConfig):
            return [f"{task}_{name}" for task in self.model.tasks for name in ("auc", "gauc", "ne")]
        return [*(f"{name}@{cutoff}" for cutoff in self.evaluate.cutoffs for name in ("hr", "ndcg")), "mrr", "ne"]

    @property
    def tables(self) -> list[TableConfig]:
        """The record of each table. Raises ValueError: a table or option is unknown, or a value does not fit."""
        config = self.embedding
        defaults = Defaults(
            dim=self.model.dim,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            arguments=config.arguments,
            stddev=config.stddev,
            fields=config.all_tables,
        )
        return make_tables(self.model.table_of_feature.values(), defaults, config.tables)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts and lists for YAML and JSON. `from_dict` is the inverse."""
        return plain(dataclasses.asdict(self))


def load(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment.

    Args:
      path: YAML file.
      overrides: Replacements "section.field=value" with values in YAML. The path names fields at any depth.

    Raises:
      ValueError: The file is missing or not YAML, or it has an unknown section or field, or a value of the wrong type
        or out of range.
    """
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise ValueError(f"CONFIG must be a YAML file, but there is no file {name!r}.")
    try:
        with open(path, encoding="utf-8") as file:
            fields = read_yaml(file)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(fields, dict):
        got = "an empty file" if fields is None else type(fields).__name__
        raise ValueError(f"{name} must hold sections, got {got}. configs/ has examples.")
    replaced = [override.partition("=")[0] for override in overrides]
    try:
        return from_dict(fields, overrides)
    except ValueError as error:
        message = str(error)
        if any(field and field in message for field in replaced):
            raise
        raise ValueError(with_place(name, pathlib.Path(path).read_text(encoding="utf-8"), message)) from None


def from_dict(fields: Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
    """Builds the experiment from nested dicts. Raises ValueError like `load`."""
    fields = dict(fields)
    for override in overrides:
        override_field(fields, override)
    task = fields.get("task")
    check_choice("task", task, TASKS)
    sections = {
        "data": DataConfig,
        "model": _ranking_record(fields.get("model")) if task == "ranking" else RetrievalConfig,
        "embedding": EmbeddingConfig,
        "train": TrainConfig,
        "evaluate": EvaluateConfig,
    }
    for name, record in sections.items():
        fields[name] = make_record(record, fields.get(name), name)
    return make_record(Experiment, fields, "")


def _check_mapped(model: RankingConfig, columns: ColumnMap) -> None:
    """Raises ValueError: an input of the model is no name of the column map, or has another role there."""
    numbers = [*columns.numbers]
    roles = {
        "contextual": ["user_id", *columns.context],
        "contextual_dense": [*columns.context_numbers],
        "item_features": [*columns.features],
        "item_lists": [*columns.lists],
        "history_dense": [*numbers, *columns.outcomes],
        "exposed_dense": numbers,
    }
    for field, mapped in roles.items():
        for name in getattr(model, field):
            if name not in mapped and not name.startswith("past_"):
                raise ValueError(
                    f"model.{field} names {name!r}, which data.columns does not map for it."
                    f"{did_you_mean(name, mapped)} Mapped: {mapped}."
                )


def _ranking_record(fields: Any) -> type:
    """Returns the record class of the model section's `kind`, by default "grm"."""
    kind = fields.get("kind", "grm") if isinstance(fields, Mapping) else "grm"
    check_choice("model.kind", kind, tuple(RANKING_KINDS))
    return RANKING_KINDS[kind]
