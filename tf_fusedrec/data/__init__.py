"""Input pipeline: Parquet shards -> a plan of every rank's batches -> read-ahead -> tf.data. See README.md here.

A module is imported when its first name is used, so that `import tf_fusedrec` does not import pyarrow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_fusedrec.data.columns import POLICIES as POLICIES
    from tf_fusedrec.data.columns import Column as Column
    from tf_fusedrec.data.columns import check_features as check_features
    from tf_fusedrec.data.dataset import TokenBatches as TokenBatches
    from tf_fusedrec.data.fingerprint import hash_strings as hash_strings
    from tf_fusedrec.data.growing import GrowingFolder as GrowingFolder
    from tf_fusedrec.data.growing import Partition as Partition
    from tf_fusedrec.data.growing import check_same_files as check_same_files
    from tf_fusedrec.data.parquet import ParquetFolder as ParquetFolder
    from tf_fusedrec.data.plan import SCOPES as SCOPES
    from tf_fusedrec.data.plan import Cost as Cost
    from tf_fusedrec.data.plan import StochasticLength as StochasticLength
    from tf_fusedrec.data.transforms import cluster_samples as cluster_samples
    from tf_fusedrec.data.transforms import lookahead as lookahead

_MODULES = {
    "columns": ("POLICIES", "Column", "check_features"),
    "dataset": ("TokenBatches",),
    "fingerprint": ("hash_strings",),
    "growing": ("GrowingFolder", "Partition", "check_same_files"),
    "parquet": ("ParquetFolder",),
    "plan": ("SCOPES", "Cost", "StochasticLength"),
    "transforms": ("cluster_samples", "lookahead"),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
