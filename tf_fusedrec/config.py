"""Configs of tables, features and initial rows: frozen records that check their fields on construction."""

from __future__ import annotations

import dataclasses
import keyword
import numbers
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from tf_fusedrec import optimizers
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.optimizers import Rule

COMBINERS = (None, "sum", "mean", "sqrtn")
ROW_DTYPES = ("float32", "float16", "bfloat16")
STORAGE_DTYPES = (None, *ROW_DTYPES, "mixed")
EVICTIONS = (None, "lru", "lfu")
UNKNOWN = ("initial", "zeros")
KERAS_OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)
_INPUT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MOST_BYTES = 200  # Linux allows 255, and a writer appends up to 55.
# The native table passes them to the op HashTable under their names (tables/native.py).
NATIVE_FIELDS = (
    "storage_dtype", "stochastic_rounding", "hot_after", "max_rows", "eviction", "ttl", "admission_count",
    "max_candidates", "frequency_decay_steps", "record_tombstones", "memory_budget", "tier_folder", "host_rows",
    "hot_rows",
)  # fmt: skip
# Limits of one table. Tables of one group may differ in them; the op takes them by segment.
LIMIT_FIELDS = ("max_rows", "eviction", "ttl", "admission_count", "max_candidates", "frequency_decay_steps")
# Tables of one group may differ in them, and share the sum.
SUMMED_FIELDS = ("memory_budget", "hot_rows")


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
    """Every column is `value`."""

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


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    Attributes:
      name: Name of the table in messages, checkpoints and the seed of initial rows, of at most 200 bytes. Unique.
      dim: Columns of a row, D.
      optimizer: Description of the optimizer: a record of tf_fusedrec.optimizers, or a Keras optimizer with a
        counterpart there. Backend "tfra" takes any optimizer that TFRA's DynamicEmbeddingOptimizer accepts. Every
        group trains with its own state.
      initializer: Distribution of a new row's values.
      dtype: dtype of the rows that the model gets and the exchange sends: "float32", "float16" or "bfloat16".
      unknown: Row of an unknown id in lookups that do not train (evaluation, prediction, exports). "initial": the row
        with which its training would begin. "zeros": zeros.
      trainable: False freezes this table of a layer: its rows stay as they are, and unknown ids get no row.

    Storage of rows, with backend "native" only:
      storage_dtype: dtype of rows in memory; None: dtype. "mixed" keeps rows looked up by at least hot_after steps in
        float32 and the others in float16 (MTGRBoost, section 5.2). Slots of 16-bit rows are bfloat16. A row that was
        looked up so often returns to float16 only with frequency_decay_steps.
      stochastic_rounding: True if updated 16-bit rows are rounded stochastically, so that small updates survive on
        average.
      hot_after: Number of training steps, see storage_dtype.

    Capacity per rank, with backend "native" only; all but record_tombstones may differ between tables of a group:
      max_rows: Maximum number of rows, enforced by `eviction`; 0 for no limit.
      eviction: "lru" (least recently looked up), "lfu" (least frequently looked up), or None: reaching max_rows is an
        error.
      ttl: Number of training steps without a lookup after which a row is removed; 0 for never.
      admission_count: Number of training steps that must look up an id before it gets a row. Until then the id has its
        initial row and is not trained. Counts are exact. A step counts an id once, across all its micro-batches.
      max_candidates: Maximum number of ids counted for admission; beyond it all counts are halved. 0 for no limit.
      frequency_decay_steps: Number of training steps after which the counts for "lfu" and hot_after are halved; 0
        for never. So a row that was popular once does not stay so for ever. A row of a "mixed" table has its turn once
        in that many steps. If its count is below hot_after by then, it returns to float16, unless one of the last
        lookups_per_update steps looked it up. Needs storage_dtype "mixed" or eviction "lfu".
      record_tombstones: True to record removed ids, for delta checkpoints and delta exports.

    Tiers of memory per rank, with backend "native" only:
      memory_budget: Bytes of rows in memory; the other rows go to a file in tier_folder. Tables of one group share the
        sum of their budgets. 0 for no limit.
      tier_folder: Folder on a local disk.
      host_rows: True if a table larger than its GPU keeps rows in host memory, with the rows of two batches on the
        device (NestPipe, section IV-B). It allows every option above except admission_count and storage_dtype "mixed",
        and the gradients of one step per update. Applies to device tables only.
      hot_rows: Number of additional rows on the device, in addition to those of two batches: the rows that lookups
        requested most often (FusedRec, section 4, has rows in device memory, host memory and files). They do not travel
        with every batch, and return to host memory when others are more frequent or a call needs host memory up to
        date. Their memory on the device is taken when the layer is made. Tables of one group share the sum of their
        hot_rows. Needs host_rows; 0 for none. The rows are the same for any number.

    Tables of other models, with any backend (FusedRec, section 2):
      external: Folder of a checkpoint of tf_fusedrec.checkpoint with the rows. Every rank reads its own rows when the
        layer is made. The rows are never trained, and no checkpoint of this model has them. Unknown ids have zeros.
        The only other fields of such a table are name, dim and dtype.
      external_table: Name of the table in that checkpoint; None: `name`.
    """

    name: str
    dim: int
    optimizer: Any = None
    initializer: Initializer = Normal()
    dtype: str = "float32"
    unknown: str = "initial"
    storage_dtype: str | None = None
    stochastic_rounding: bool = False
    hot_after: int = 0
    max_rows: int = 0
    eviction: str | None = None
    ttl: int = 0
    admission_count: int = 1
    max_candidates: int = 0
    frequency_decay_steps: int = 0
    record_tombstones: bool = False
    memory_budget: int = 0
    tier_folder: str = ""
    host_rows: bool = False
    hot_rows: int = 0
    external: str | None = None
    external_table: str | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        check_file_name("TableConfig.name", self.name)
        if not isinstance(self.dim, int) or self.dim <= 0:
            raise ValueError(f"TableConfig.dim must be an int > 0, got {self.dim!r} for table {self.name!r}.")
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"TableConfig.dtype must be one of {ROW_DTYPES}, got {self.dtype!r} for table {self.name!r}."
            )
        if not isinstance(self.trainable, bool):
            raise ValueError(f"TableConfig.trainable must be a bool, got {self.trainable!r} for table {self.name!r}.")
        if not isinstance(self.initializer, Initializer):
            raise ValueError(
                f"TableConfig.initializer must be one of tf_fusedrec's (Normal, TruncatedNormal, Uniform, Constant, "
                f"Zeros), got {type(self.initializer).__name__} for table {self.name!r}. A Keras initializer draws the "
                "same matrix at every lookup, so new ids would get repeated rows."
            )
        if self.external is not None or self.external_table is not None:
            self._check_external()
        elif not isinstance(self.optimizer, Rule) and not hasattr(self.optimizer, "apply_gradients"):
            raise ValueError(
                f"TableConfig.optimizer must be an optimizer, got {self.optimizer!r} for table {self.name!r}. "
                "Example: tf_fusedrec.optimizers.Adagrad(0.1)."
            )
        self._check_storage()
        self._check_capacity()

    @property
    def stores_natively(self) -> list[str]:
        """Fields with a non-default value that only backend "native" supports."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in NATIVE_FIELDS if getattr(self, name) != defaults[name]]

    def _check_external(self) -> None:
        if not isinstance(self.external, str) or not self.external:
            raise ValueError(
                f"TableConfig.external must be the folder of a checkpoint, a string, got {self.external!r} with "
                f"external_table {self.external_table!r} for table {self.name!r}."
            )
        is_set = {
            "optimizer": self.optimizer is not None, "initializer": self.initializer != Normal(),
            "unknown": self.unknown != "initial",
        }  # fmt: skip
        unused = [*(field for field, given in is_set.items() if given), *self.stores_natively]
        if unused:
            raise ValueError(
                f"Table {self.name!r} is external, so its rows are never trained, but its config sets {unused}. "
                "Use a TableConfig without them."
            )

    def _check_storage(self) -> None:
        for field, choices in (("storage_dtype", STORAGE_DTYPES), ("eviction", EVICTIONS), ("unknown", UNKNOWN)):
            if getattr(self, field) not in choices:
                got = getattr(self, field)
                raise ValueError(f"TableConfig.{field} must be one of {choices}, got {got!r} for table {self.name!r}.")
        if (self.storage_dtype == "mixed") != (self.hot_after > 0):
            raise ValueError(
                f"TableConfig.hot_after > 0 and storage_dtype='mixed' go together, got {self.hot_after} and "
                f"{self.storage_dtype!r} for table {self.name!r}."
            )
        if (self.memory_budget > 0) != bool(self.tier_folder):
            raise ValueError(
                f"TableConfig.memory_budget > 0 and tier_folder go together, got {self.memory_budget} and "
                f"{self.tier_folder!r} for table {self.name!r}."
            )
        if self.memory_budget and self.storage_dtype == "mixed":
            raise ValueError(
                f"TableConfig.memory_budget does not work with storage_dtype='mixed' (table {self.name!r}). Set "
                "another storage_dtype."
            )
        if self.stochastic_rounding and (self.storage_dtype or self.dtype) == "float32":
            raise ValueError(f"TableConfig.stochastic_rounding needs a 16-bit storage_dtype (table {self.name!r}).")

    def _check_capacity(self) -> None:
        numbers_of = (
            "max_rows", "ttl", "max_candidates", "frequency_decay_steps", "memory_budget", "hot_after", "hot_rows",
        )  # fmt: skip
        for field in numbers_of:
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 0:
                raise ValueError(
                    f"TableConfig.{field} must be an int >= 0, got {getattr(self, field)!r} for table {self.name!r}."
                )
        if not isinstance(self.admission_count, int) or self.admission_count < 1:
            raise ValueError(
                f"TableConfig.admission_count must be an int >= 1, got {self.admission_count!r} for table "
                f"{self.name!r}."
            )
        if self.hot_rows and not self.host_rows:
            raise ValueError(
                f"TableConfig.hot_rows needs host_rows=True, because other tables have no rows in host memory for a "
                f"GPU, got {self.hot_rows} for table {self.name!r}. Use host_rows=True, or leave hot_rows 0."
            )
        if self.eviction and not self.max_rows:
            raise ValueError(f"TableConfig.eviction {self.eviction!r} needs max_rows > 0 (table {self.name!r}).")
        if self.frequency_decay_steps and self.storage_dtype != "mixed" and self.eviction != "lfu":
            raise ValueError(
                "TableConfig.frequency_decay_steps needs storage_dtype='mixed' or eviction='lfu', which compare "
                f"counts, got {self.frequency_decay_steps} with {self.storage_dtype!r} and {self.eviction!r} for table "
                f"{self.name!r}. Set one of them, or leave frequency_decay_steps 0."
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict of all fields. TF1 optimizers, which have no config, stay as they are."""
        optimizer = self.optimizer
        if isinstance(optimizer, Rule):
            optimizer = optimizer.to_dict()
        elif isinstance(optimizer, KERAS_OPTIMIZERS):
            legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
            optimizer = {"legacy": legacy, **keras.optimizers.serialize(optimizer)}
        initializer = {"class_name": type(self.initializer).__name__, **dataclasses.asdict(self.initializer)}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "optimizer": optimizer, "initializer": initializer}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TableConfig:
        """Rebuilds the config from the result of to_dict."""
        fields = dict(fields)
        if isinstance(fields["optimizer"], Mapping) and "legacy" not in fields["optimizer"]:
            fields["optimizer"] = optimizers.from_dict(fields["optimizer"])
        elif isinstance(fields["optimizer"], Mapping):
            described = dict(fields["optimizer"])
            legacy = described.pop("legacy")
            fields["optimizer"] = keras.optimizers.deserialize(described, use_legacy_optimizer=legacy)
        initializer = dict(fields["initializer"])
        fields["initializer"] = _INITIALIZERS[initializer.pop("class_name")](**initializer)
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One input of FusedEmbedding.

    Attributes:
      name: Key of the feature in the layer's inputs and outputs, a word of letters, digits and '_'. Unique.
      table: Name of the feature's table. Features may share a table.
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
    table: str
    combiner: str | None = None
    output_dtype: str | None = None
    padding_id: int | None = None

    def __post_init__(self) -> None:
        check_input_name("FeatureConfig.name", self.name)
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
