"""Input pipeline: Parquet shards -> this rank's rows -> token-balanced batches -> tf.data. See README.md here."""

from tf_fusedrec.data.clustering import cluster_samples
from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.dataset import token_balanced_dataset
from tf_fusedrec.data.layouts import DatasetInfo, read_info, read_items
from tf_fusedrec.data.lookahead import lookahead
from tf_fusedrec.data.parquet import ParquetFolder

__all__ = [
    "Column",
    "DatasetInfo",
    "ParquetFolder",
    "cluster_samples",
    "lookahead",
    "read_info",
    "read_items",
    "token_balanced_dataset",
]
