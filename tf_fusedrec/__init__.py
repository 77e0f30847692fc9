"""tf_fusedrec: fused embedding exchange and generative recommenders for TensorFlow 2."""

from tf_fusedrec._tf_compat import keras, tf  # isort: skip  (first: chooses legacy Keras, then imports TensorFlow)
import importlib
from typing import Any

from tf_fusedrec import checkpoint, collectives, external, schedules
from tf_fusedrec.collectives import rank, size
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.data import hash_strings
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.initializers import Constant, Normal, TruncatedNormal, Uniform, Zeros
from tf_fusedrec.saved_model import Signature, apply_delta, export
from tf_fusedrec.topology import Topology, init

__version__ = "0.1.0"

__all__ = [
    "Constant",
    "FeatureConfig",
    "FusedEmbedding",
    "Normal",
    "Signature",
    "TableConfig",
    "Topology",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "apply_delta",
    "callbacks",
    "checkpoint",
    "collectives",
    "data",
    "export",
    "external",
    "hash_strings",
    "init",
    "keras",
    "metrics",
    "optimizers",
    "rank",
    "schedules",
    "size",
    "tf",
]

_ON_DEMAND = ("callbacks", "data", "metrics")  # what not every program needs, data with its Parquet reader


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"tf_fusedrec.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
