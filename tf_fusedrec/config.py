"""Configs of tables, features and initial rows: frozen records that check their fields on construction.

Functions here import TensorFlow where they need it, so that settings can be read before it is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import numbers
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from tf_fusedrec.optimizers.rules import Rule, from_dict

COMBINERS = (None, "sum", "mean", "sqrtn")
ROW_DTYPES = ("float32", "float16", "bfloat16")
# Names that options of layers and losses take.
TIME_ENCODINGS = ("none", "buckets", "power", "exponential", "stretched")
SAMPLINGS = ("uniform", "frequency", "in_batch")  # distributions of negatives
SHARINGS = ("negatives", "logits")  # forms of the expansion of negatives
_INPUT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MOST_BYTES = 200  # Linux allows 255, and a writer appends up to 55.


@dataclasses.dataclass(frozen=True)
class Initializer:
    """Distribution of a new row's values, a pure function of (seed, table, id). Equal by value, so tables can be fused.

    The ops take the fields, in their order, as parameters `a` and `b`.
    """

    distribution: ClassVar[str]

    @property
    def a(self) -> float:
        """First parameter."""
        return dataclasses.astuple(self)[0]

    @property
    def b(self) -> float:
        """Second parameter; 0 for distributions with one parameter."""
        return (*dataclasses.astuple(self), 0.0)[1]


@dataclasses.dataclass(frozen=True)
class Constant(Initializer):
    """Every column is `value`.

    Examples:
      >>> values = [fr.Constant(0.1), fr.Zeros(), fr.Uniform(-0.1, 0.1), fr.Normal(), fr.TruncatedNormal()]
      >>> tables = [fr.TableConfig(f"table{i}", 4, fr.optimizers.SGD(0.1), value) for i, value in enumerate(values)]
    """

    distribution: ClassVar[str] = "constant"
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class Zeros(Constant):
    """Every column is 0."""

    def __post_init__(self) -> None:
        if self.value != 0.0:
            raise ValueError(f"Zeros.value must be 0, got {self.value}. Use Constant(value={self.value}).")


@dataclasses.dataclass(frozen=True)
class Uniform(Initializer):
    """Columns are uniform on [minval, maxval)."""

    distribution: ClassVar[str] = "uniform"
    minval: float = -0.05
    maxval: float = 0.05

    def __post_init__(self) -> None:
        if not self.minval < self.maxval:
            raise ValueError(f"Uniform.minval must be below maxval, got {self.minval} and {self.maxval}.")


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Columns are normal with `mean` and `stddev`."""

    distribution: ClassVar[str] = "normal"
    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        if not self.stddev >= 0:
            raise ValueError(f"{type(self).__name__}.stddev must be >= 0, got {self.stddev}.")


@dataclasses.dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Normal distribution, truncated at two standard deviations from the mean."""

    distribution: ClassVar[str] = "truncated_normal"


_INITIALIZERS = {record.__name__: record for record in (Constant, Zeros, Uniform, Normal, TruncatedNormal)}


def _uniform(low: float, high: float) -> Initializer:
    return Constant(low) if low == high else Uniform(low, high)


def initializer_record(initializer: Any) -> Initializer | None:
    """The record of an initializer, or of Keras' object, class, config or name. None if it has none by element."""
    if isinstance(initializer, Initializer):
        return initializer
    from tf_fusedrec._tf_compat import keras

    kinds = keras.initializers
    if initializer in ("constant", "Constant"):  # Keras 3 cannot make it from its name
        return Constant()
    if isinstance(initializer, (str, Mapping, type)):
        try:
            initializer = kinds.get(initializer)
        except (ValueError, TypeError):  # no initializer of Keras
            return None
    numbers_of = initializer.get_config() if isinstance(initializer, kinds.Initializer) else {}
    records = {
        kinds.Zeros: lambda: Zeros(),
        kinds.Ones: lambda: Constant(1.0),
        kinds.Constant: lambda: Constant(float(numbers_of["value"])) if np.ndim(numbers_of["value"]) == 0 else None,
        kinds.RandomUniform: lambda: _uniform(float(numbers_of["minval"]), float(numbers_of["maxval"])),
        kinds.RandomNormal: lambda: Normal(float(numbers_of["mean"]), float(numbers_of["stddev"])),
        kinds.TruncatedNormal: lambda: TruncatedNormal(float(numbers_of["mean"]), float(numbers_of["stddev"])),
    }
    make = records.get(type(initializer))  # a subclass may draw from another distribution
    return None if make is None else make()


def check_file_name(what: str, name: Any) -> None:
    """Raises ValueError unless files and folders can be named after `name`, with what a writer appends."""
    text = isinstance(name, str) and not any(letter in name for letter in "/\\") and name not in ("", ".", "..")
    if not text or not name.isprintable() or len(name.encode()) > _MOST_BYTES:
        raise ValueError(
            f"{what} must be a non-empty string without '/', '\\' and control characters, other than '.' and '..', of "
            f"at most {_MOST_BYTES} bytes, because files have that name, got {name!r}."
        )


def check_input_name(what: str, name: Any) -> None:
    """Raises ValueError unless the input of a SavedModel can have this name. TensorFlow fails or renames others."""
    if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name) or keyword.iskeyword(name) or name == "self":
        raise ValueError(
            f"{what} must be a non-empty string of the letters a to z and A to Z, digits and '_' that begins with a "
            "letter and is no word of Python, such as 'class' or 'self', because inputs of exports have that name, got "
            f"{name!r}. Rename it."
        )


class _Record:
    """Its text has the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value != default:
                text = repr(value)
                shown.append(f"{field.name}={type(value).__name__ if text.startswith('<') else text}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Storage(_Record):
    """How a table of backend "native" stores its rows. Tables of one group store them alike.

    Attributes:
      dtype: dtype of rows in memory; None: that of the table. "mixed" keeps rows looked up by at least hot_after steps
        in float32 and the others in float16 (MTGRBoost, section 5.2). Slots of 16-bit rows are bfloat16. A row that was
        looked up so often returns to float16 only with limits.frequency_decay_steps.
      stochastic_rounding: True if updated 16-bit rows are rounded stochastically, so that small updates survive on
        average.
      hot_after: Number of training steps, see dtype.
    """

    dtype: Literal["float32", "float16", "bfloat16", "mixed"] | None = None
    stochastic_rounding: bool = False
    hot_after: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Limits(_Record):
    """Rows that one table of backend "native" keeps. Tables of one group may differ in them.

    Counts are per rank, because they protect the memory of a rank. Twice the ranks keep twice the rows.

    Attributes:
      max_rows_per_rank: Maximum number of rows, enforced by `eviction`; 0 for no limit.
      eviction: "lru" (least recently looked up), "lfu" (least frequently looked up), or None: reaching
        max_rows_per_rank is an error.
      exact_eviction: True to evict exactly the rows that rank lowest, which stops a training step for seconds in a
        table of ten million rows. False to evict without a pause: a step ranks the rows of some of 1,024 parts of the
        table, other parts each time, and evicts the lowest sixteenth of them. A table on a GPU, or with a
        max_rows_per_rank of at most 65,536, is always exact.
      ttl: Number of training steps without a lookup after which a row is removed, or up to a sixteenth more; 0 for
        never.
      ttl_minutes: Minutes of wall time without a training lookup after which a row is removed; 0 for never. A lookup
        removes it up to a minute later. A loaded row counts as looked up by the first training lookup after the load.
        The clock of the rank that owns the row decides, so the table has one copy over all ranks, in host memory.
      admission_count: Number of training steps that must look up an id before it gets a row. Until then the id has its
        initial row and is not trained. Counts are exact. A step counts an id once, across all its micro-batches.
      max_candidates_per_rank: Maximum number of ids counted for admission; beyond it all counts are halved. 0 for no
        limit.
      frequency_decay_steps: Number of training steps after which the counts for "lfu" and storage.hot_after are
        halved; 0 for never. So a row that was popular once does not stay so for ever. A row of a "mixed" table has its
        turn once in that many steps. If its count is below hot_after by then, it returns to float16, unless its
        gradients are under way. Needs Storage(dtype="mixed") or eviction "lfu".
    """

    max_rows_per_rank: int = 0
    eviction: Literal["lru", "lfu"] | None = None
    exact_eviction: bool = False
    ttl: int = 0
    ttl_minutes: int = 0
    admission_count: int = 1
    max_candidates_per_rank: int = 0
    frequency_decay_steps: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Tier(_Record):
    """Where a rank keeps rows of a table of backend "native" that do not fit. A group has the sum of its amounts.

    Attributes:
      memory_budget_per_rank: Bytes of rows in memory; the other rows go to a file in `folder`. Tables of one group
        share the sum of their budgets. 0 for no limit.
      folder: Folder on a local disk.
      host_rows: True if a table larger than its GPU keeps rows in host memory, with the rows of two batches on the
        device (NestPipe, section IV-B). It allows every option except limits.admission_count and storage.dtype "mixed",
        and the gradients of one step per update. Applies to device tables only.
      hot_rows_per_rank: Number of additional rows on the device, in addition to those of two batches: the rows that
        lookups requested most often (FusedRec, section 4, has rows in device memory, host memory and files). They do
        not travel with every batch, and return to host memory when others are more frequent or a call needs host
        memory up to date. Their memory on the device is taken when the layer is made. Tables of one group share
        the sum of their hot_rows_per_rank. Needs host_rows; 0 for none. The rows are the same for any number.
    """

    memory_budget_per_rank: int = 0
    folder: str = ""
    host_rows: bool = False
    hot_rows_per_rank: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class External(_Record):
    """Rows of another model, which are never trained (FusedRec, section 2). Works with any backend.

    Attributes:
      folder: Folder of a checkpoint of tf_fusedrec.checkpoint with the rows. Every rank reads its own rows when the
        layer is made, and no checkpoint of this model has them. Unknown ids have zeros. Such a table has a name, dim
        and dtype in addition, and no other option.
      table: Name of the table in that checkpoint; None: the name of this one.
    """

    folder: str
    table: str | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class TableConfig(_Record):
    """One embedding table.

    Attributes:
      name: Name of the table in messages, checkpoints and the seed of initial rows, of at most 200 bytes. Unique.
      dim: Columns of a row, D.
      optimizer: Description of the optimizer: a record of tf_fusedrec.optimizers, or a Keras optimizer with a
        counterpart there, or the name of one, such as "adagrad", with Keras' learning rate. Backend "tfra" takes any
        optimizer that TFRA's DynamicEmbeddingOptimizer accepts. Every group trains with its own state.
      initializer: Distribution of a new row's values: a record such as Normal(), or a Keras initializer or its name,
        such as "zeros". A Keras initializer's seed has no effect; FusedEmbedding has the seed.
      dtype: dtype of the rows that the model gets and the exchange sends: "float32", "float16" or "bfloat16".
      unknown: Row of an unknown id in lookups that do not train (evaluation, prediction, exports). "initial": the row
        with which its training would begin. "zeros": zeros.
      trainable: False freezes this table of a layer: its rows stay as they are, and unknown ids get no row.
      storage: How rows are stored in memory.
      limits: Which rows stay.
      tier: Where rows are that do not fit the memory.
      record_tombstones: True to record removed ids, for delta checkpoints and delta exports. Needs backend "native".
      external: The rows are those of another model.

    Examples:
      >>> storage = fr.Storage(dtype="bfloat16", stochastic_rounding=True)
      >>> limits = fr.Limits(max_rows_per_rank=1_000_000, eviction="lru")
      >>> item = fr.TableConfig("item", 16, fr.optimizers.RowWiseAdagrad(0.1), storage=storage, limits=limits)
      >>> item.options["limits.max_rows_per_rank"]
      1000000
      >>> tier = fr.Tier(memory_budget_per_rank=1 << 30, folder="user_rows")
      >>> user = fr.TableConfig("user", 16, item.optimizer, tier=tier)
      >>> words = fr.TableConfig("word", 16, external=fr.External("runs/words/checkpoint"))
    """

    name: str
    dim: int
    optimizer: Any = None
    initializer: Any = Normal()
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    unknown: Literal["initial", "zeros"] = "initial"
    trainable: bool = True
    storage: Storage = Storage()
    limits: Limits = Limits()
    tier: Tier = Tier()
    record_tombstones: bool = False
    external: External | None = None

    def __post_init__(self) -> None:
        check_file_name("TableConfig.name", self.name)
        initializer = initializer_record(self.initializer)
        if initializer is None:
            raise ValueError(
                f"TableConfig.initializer must be a record (Normal, TruncatedNormal, Uniform, Constant, Zeros), or a "
                f"Keras initializer or name with the same distribution for each number, got {self.initializer!r} for "
                f"table {self.name!r}. Use fr.Uniform(-limit, limit) in place of one that scales by the shape."
            )
        object.__setattr__(self, "initializer", initializer)
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", self._keras_optimizer(self.optimizer))
        self._check_values(self)
        if self.external is not None:
            self._check_external(self.external)
        elif (
            isinstance(self.optimizer, type)
            or not isinstance(self.optimizer, Rule)
            and not hasattr(self.optimizer, "apply_gradients")
        ):
            raise ValueError(
                f"TableConfig.optimizer must be an optimizer, got {self.optimizer!r} for table {self.name!r}. "
                "Example: tf_fusedrec.optimizers.Adagrad(0.1)."
            )
        if "tensorflow" in sys.modules:  # else the table, which loads it, refuses what the op refuses
            from tf_fusedrec.ops.table import check_tables

            refusal = check_tables([self.record()])
            if refusal:
                raise ValueError(f"TableConfig.{refusal}")

    @property
    def options(self) -> dict[str, Any]:
        """The options that need backend "native" and differ from their defaults, by path, such as "limits.ttl"."""
        paths = {"record_tombstones": self.record_tombstones} if self.record_tombstones else {}
        for name in ("storage", "limits", "tier"):
            record = getattr(self, name)
            changed = {key: value for key, value in vars(record).items() if value != getattr(type(record), key)}
            paths.update({f"{name}.{key}": value for key, value in changed.items()})
        return paths

    def _check_values(self, record: Any, prefix: str = "") -> None:
        """Raises ValueError unless every field of a record, and of the records in it, has a value of its type."""
        hints = _hints(type(record))
        for field in dataclasses.fields(record):
            value, path = getattr(record, field.name), prefix + field.name
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            choices = [choice for kind in kinds for choice in typing.get_args(kind) or (kind,)]
            if Any in kinds:
                continue
            if dataclasses.is_dataclass(value) and type(value) in kinds:
                self._check_values(value, f"{path}.")
            elif (int in kinds and isinstance(value, bool)) or not any(
                isinstance(value, kind) if isinstance(kind, type) else isinstance(value, str) and value == kind
                for kind in choices
            ):
                names = ["None" if kind is type(None) else getattr(kind, "__name__", repr(kind)) for kind in choices]
                self._refuse(path, "one of " * (len(names) > 1) + ", ".join(names), value)

    def _keras_optimizer(self, name: str) -> Any:
        from tf_fusedrec._tf_compat import keras

        try:
            return keras.optimizers.get(name)
        except ValueError:
            raise ValueError(
                f"TableConfig.optimizer must be a record, a Keras optimizer or its name, got {name!r} for table "
                f"{self.name!r}. Example: 'adagrad', or fr.optimizers.RowWiseAdagrad(0.1)."
            ) from None

    def _refuse(self, path: str, wanted: str, got: Any) -> typing.NoReturn:
        raise ValueError(f"TableConfig.{path} must be {wanted}, got {got!r} for table {self.name!r}.")

    def _check_external(self, external: External) -> None:
        if not external.folder:
            self._refuse("external.folder", "the folder of a checkpoint", external.folder)
        is_set = {
            "optimizer": self.optimizer is not None, "initializer": self.initializer != Normal(),
            "unknown": self.unknown != "initial",
        }  # fmt: skip
        unused = [*(field for field, given in is_set.items() if given), *self.options]
        if unused:
            raise ValueError(
                f"Table {self.name!r} is external, so its rows are never trained, but its config sets {unused}. "
                "Use a TableConfig without them."
            )

    def record(self, **group_options: Any) -> dict[str, Any]:
        """The options that the op HashTable takes, by path; `group_options` are those that no TableConfig has."""
        options = {"name": self.name, "dim": self.dim, "unknown": self.unknown}
        options["record_tombstones"] = self.record_tombstones
        options["initializer"] = self.initializer.distribution
        options.update({"initializer.a": self.initializer.a, "initializer.b": self.initializer.b})
        for name in ("storage", "limits", "tier"):
            options.update({f"{name}.{key}": value for key, value in vars(getattr(self, name)).items()})
        options["storage.dtype"] = self.storage.dtype or self.dtype
        options["limits.eviction"] = self.limits.eviction or "none"
        return {**options, **group_options}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict of all fields. TF1 optimizers, which have no config, stay as they are."""
        from tf_fusedrec._tf_compat import keras_api

        optimizer = self.optimizer
        if isinstance(optimizer, Rule):
            optimizer = optimizer.to_dict()
        elif isinstance(optimizer, keras_api.OPTIMIZERS):
            optimizer = keras_api.optimizer_to_dict(optimizer)
        values = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "optimizer": optimizer,
        }
        plain = {n: dataclasses.asdict(v) if dataclasses.is_dataclass(type(v)) else v for n, v in values.items()}
        plain["initializer"] = {"class_name": type(self.initializer).__name__, **plain["initializer"]}
        return plain

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TableConfig:
        """Rebuilds the config from the result of to_dict."""
        from tf_fusedrec._tf_compat import keras_api

        fields = dict(fields)
        if isinstance(fields["optimizer"], Mapping) and "legacy" not in fields["optimizer"]:
            fields["optimizer"] = from_dict(fields["optimizer"])
        elif isinstance(fields["optimizer"], Mapping):
            fields["optimizer"] = keras_api.optimizer_from_dict(fields["optimizer"])
        initializer = dict(fields["initializer"])
        fields["initializer"] = _INITIALIZERS[initializer.pop("class_name")](**initializer)
        for name, record in RECORDS.items():
            fields[name] = None if fields[name] is None else record(**fields[name])
        return cls(**fields)


RECORDS = {"storage": Storage, "limits": Limits, "tier": Tier, "external": External}  # in a TableConfig, by field
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


@dataclasses.dataclass(frozen=True, repr=False)
class FeatureConfig(_Record):
    """One input of FusedEmbedding.

    Attributes:
      name: Key of the feature in the layer's inputs and outputs, a word of letters, digits and '_'. Unique.
      table: The feature's TableConfig, or its name where the layer gets a list of tables. Features may share a table.
      combiner: None keeps one row per id. "sum", "mean" and "sqrtn" pool the rows of a sample, with the optional
        weights of the call. "mean" divides by the sum of weights, "sqrtn" by the root of the sum of their squares.
      output_dtype: dtype of this feature's rows in the exchange and in the model; None: the table's dtype. A 16-bit
        dtype halves both for this feature only, for example for negatives (TurboGR, section 4.3.2). Its gradients are
        sent as bfloat16, which has the range of float32. A group makes two more all-to-alls for each additional dtype,
        and ids shared with features of another dtype are sent twice. It then needs a native table.
      padding_id: Id that means "no id", such as -1 in ids padded to [B, L]; None: every id is real. Padding has a row
        of zeros and does not count in pooled rows or means. It is not looked up, creates no row, is not sent and gets
        no gradient. Other features of the table may use the same integer as a real id.
    """

    name: str
    table: str | TableConfig
    combiner: str | None = None
    output_dtype: str | None = None
    padding_id: int | None = None

    def __post_init__(self) -> None:
        check_input_name("FeatureConfig.name", self.name)
        if not isinstance(self.table, (str, TableConfig)):
            raise ValueError(
                f"FeatureConfig.table must be a TableConfig or the name of one, got {self.table!r} for feature "
                f"{self.name!r}."
            )
        if self.combiner not in COMBINERS:
            raise ValueError(
                f"FeatureConfig.combiner must be one of {COMBINERS}, got {self.combiner!r} for feature {self.name!r}."
            )
        if self.output_dtype not in (None, *ROW_DTYPES):
            raise ValueError(
                f"FeatureConfig.output_dtype must be None or one of {ROW_DTYPES}, got {self.output_dtype!r} for "
                f"feature {self.name!r}."
            )
        integer = isinstance(self.padding_id, numbers.Integral) and not isinstance(self.padding_id, bool)
        if self.padding_id is not None and not (integer and -(2**63) <= self.padding_id < 2**63):
            raise ValueError(
                f"FeatureConfig.padding_id must be None or an int64, got {self.padding_id!r} for feature {self.name!r}."
            )

    @property
    def table_name(self) -> str:
        """The name of the feature's table."""
        return self.table.name if isinstance(self.table, TableConfig) else self.table


def named_tables(
    features: Sequence[FeatureConfig], tables: Sequence[TableConfig] = ()
) -> tuple[list[FeatureConfig], list[TableConfig]]:
    """The features with the names of their tables, and all tables: the given ones, then those that features hold."""
    if isinstance(features, (FeatureConfig, Mapping)) or isinstance(tables, (TableConfig, Mapping)):
        raise ValueError("features and tables must be lists. Use FusedEmbedding([feature], [table]).")
    features, tables = list(features), list(tables)
    for name, configs, record in (("features", features, FeatureConfig), ("tables", tables, TableConfig)):
        for config in configs:
            if not isinstance(config, record):
                raise ValueError(
                    f"{name} must hold {record.__name__} records, got {config!r}. Use FusedEmbedding(features, tables)."
                )
    known = tables.copy()
    for feature in features:
        if isinstance(feature.table, TableConfig) and feature.table not in known:
            known.append(feature.table)
    return [dataclasses.replace(feature, table=feature.table_name) for feature in features], known
