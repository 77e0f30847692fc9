"""Input pipeline: Parquet shards -> a plan of every rank's batches -> read-ahead -> tf.data. See README.md here."""

from tf_fusedrec.data.bad_input import POLICIES
from tf_fusedrec.data.batching import Cost, StochasticLength
from tf_fusedrec.data.clustering import cluster_samples
from tf_fusedrec.data.columns import Column, check_features
from tf_fusedrec.data.dataset import TokenBatches
from tf_fusedrec.data.fingerprint import hash_strings
from tf_fusedrec.data.growing import GrowingFolder, Partition, check_same_files
from tf_fusedrec.data.layouts import DatasetInfo, read_info, read_items
from tf_fusedrec.data.lookahead import lookahead
from tf_fusedrec.data.parquet import ParquetFolder
from tf_fusedrec.data.plan import SCOPES

__all__ = [
    "Column",
    "Cost",
    "DatasetInfo",
    "GrowingFolder",
    "POLICIES",
    "ParquetFolder",
    "Partition",
    "SCOPES",
    "StochasticLength",
    "TokenBatches",
    "check_features",
    "check_same_files",
    "cluster_samples",
    "hash_strings",
    "lookahead",
    "read_info",
    "read_items",
]
