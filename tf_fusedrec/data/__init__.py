"""Input pipeline: Parquet shards -> a plan of every rank's batches -> read-ahead -> tf.data. See README.md here.

A module is imported when its first name is used, so that `import tf_fusedrec` does not import pyarrow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_fusedrec.data.columns import Column as Column
    from tf_fusedrec.data.dataset import TokenBatches as TokenBatches
    from tf_fusedrec.data.growing import GrowingFolder as GrowingFolder
    from tf_fusedrec.data.parquet import ParquetFolder as ParquetFolder
    from tf_fusedrec.data.plan import Cost as Cost
    from tf_fusedrec.data.plan import StochasticLength as StochasticLength
    from tf_fusedrec.data.transforms import cluster_samples as cluster_samples
    from tf_fusedrec.data.transforms import lookahead as lookahead

_MODULES = {
    "Column": "columns",
    "Cost": "plan",
    "GrowingFolder": "growing",
    "ParquetFolder": "parquet",
    "StochasticLength": "plan",
    "TokenBatches": "dataset",
    "cluster_samples": "transforms",
    "lookahead": "transforms",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
