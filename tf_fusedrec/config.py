"""What a user says about tables and features: frozen records, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tf_fusedrec import initializers
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.initializers import Initializer, Normal

COMBINERS = (None, "sum", "mean", "sqrtn")
ROW_DTYPES = ("float32", "float16", "bfloat16")
KERAS_OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    Attributes:
      name: known by it everywhere: messages, checkpoints, initial values. Unique.
      dim: columns of a row, D.
      optimizer: how rows are trained: any optimizer that TFRA's DynamicEmbeddingOptimizer accepts (tf_keras legacy or
        new, or a TF1 optimizer). A Keras optimizer is a description: every group trains with its own copy.
      initializer: distribution of a new row's values.
      dtype: of a row: "float32", "float16" or "bfloat16".
    """

    name: str
    dim: int
    optimizer: Any
    initializer: Initializer = Normal()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str) or "/" in self.name:
            raise ValueError(
                f"TableConfig.name must be a non-empty string without '/' (checkpoints have a folder of that name), "
                f"got {self.name!r}."
            )
        if not isinstance(self.dim, int) or self.dim <= 0:
            raise ValueError(f"TableConfig.dim must be an int > 0, got {self.dim!r} for table {self.name!r}.")
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"TableConfig.dtype must be one of {ROW_DTYPES}, got {self.dtype!r} for table {self.name!r}."
            )
        if not isinstance(self.initializer, Initializer):
            raise ValueError(
                f"TableConfig.initializer must be one of tf_fusedrec's (Normal, TruncatedNormal, Uniform, Constant, "
                f"Zeros), got {type(self.initializer).__name__} for table {self.name!r}. Keras initializers draw the "
                "same matrix at every lookup, which would give new ids repeated rows."
            )
        if isinstance(self.optimizer, str) or not hasattr(self.optimizer, "apply_gradients"):
            raise ValueError(
                f"TableConfig.optimizer must be an optimizer, got {self.optimizer!r} for table {self.name!r}. "
                "Example: keras.optimizers.legacy.Adagrad(0.1)."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; TF1 optimizers, which have no config, stay as they are."""
        optimizer = self.optimizer
        if isinstance(optimizer, KERAS_OPTIMIZERS):
            legacy = isinstance(optimizer, keras.optimizers.legacy.Optimizer)
            optimizer = {"legacy": legacy, **keras.optimizers.serialize(optimizer)}
        initializer = {"class_name": type(self.initializer).__name__, **dataclasses.asdict(self.initializer)}
        return {
            "name": self.name, "dim": self.dim, "dtype": self.dtype, "optimizer": optimizer, "initializer": initializer
        }  # fmt: skip

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TableConfig:
        """The record that to_dict described."""
        fields = dict(fields)
        if isinstance(fields["optimizer"], Mapping):
            described = dict(fields["optimizer"])
            legacy = described.pop("legacy")
            fields["optimizer"] = keras.optimizers.deserialize(described, use_legacy_optimizer=legacy)
        initializer = dict(fields["initializer"])
        fields["initializer"] = getattr(initializers, initializer.pop("class_name"))(**initializer)
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One input of FusedEmbedding.

    Attributes:
      name: key of the feature in the layer's inputs and outputs. Unique.
      table: name of the table whose rows it reads. Features may share a table.
      combiner: None keeps one row per id; "sum", "mean" and "sqrtn" pool the rows of a sample, weighted by the weights
        that the call may bring (mean divides by the sum of weights, sqrtn by the root of the sum of their squares).
    """

    name: str
    table: str
    combiner: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"FeatureConfig.name must be a non-empty string, got {self.name!r}.")
        if self.combiner not in COMBINERS:
            raise ValueError(
                f"FeatureConfig.combiner must be one of {COMBINERS}, got {self.combiner!r} for feature {self.name!r}."
            )
