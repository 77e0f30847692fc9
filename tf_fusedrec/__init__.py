"""tf_fusedrec: fused embedding exchange and generative recommenders for TensorFlow 2."""

from tf_fusedrec._tf_compat import keras, tf  # isort: skip  (first: chooses legacy Keras, then imports TensorFlow)
import importlib
from typing import Any

from tf_fusedrec import checkpoint, schedules
from tf_fusedrec.checkpoint.external_rows import read_rows
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.data import hash_strings
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import rank, size
from tf_fusedrec.exchange.topology import Topology, init
from tf_fusedrec.initializers import Constant, Normal, TruncatedNormal, Uniform, Zeros
from tf_fusedrec.planning import Cluster, plan
from tf_fusedrec.saved_model import Signature, apply_delta, export
from tf_fusedrec.tables import external

__version__ = "0.1.0"

external.read_with(read_rows)  # tables know no checkpoints, so they are told how rows come out of one

__all__ = [
    "Cluster",
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
    "hash_strings",
    "init",
    "keras",
    "metrics",
    "optimizers",
    "plan",
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
