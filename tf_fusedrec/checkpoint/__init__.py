"""Checkpoints of dense weights and tables: sharded, checksummed, atomic, from any number of ranks to any other.

    checkpoint.save("runs/a/checkpoint", model, model.optimizer, extra={"epoch": 3})     # all ranks
    extra = checkpoint.load("runs/a/checkpoint", model, model.optimizer)                 # any number of ranks

Every rank writes its own rows, in hash order with an index, so that each of any number of ranks reads contiguous bytes:
its share (shard_file.py). A manifest, written last, makes files a checkpoint: an interrupted save leaves the last one
whole (manifest.py). Tables are known by name: what is added, dropped, reordered or grouped otherwise moves nothing
else. Checkpointer saves in the background, and between full saves only what has changed.

From the edge inwards: checkpointer.py, loading.py (collectives) -> saving.py, shares.py (ranks are numbers) ->
manifest.py, dense.py, shard_file.py (files) -> disk.py.
"""

from tf_fusedrec.checkpoint.checkpointer import Checkpointer, save
from tf_fusedrec.checkpoint.loading import dense_prefix, load, read_tables
from tf_fusedrec.checkpoint.manifest import exists, read_manifest
from tf_fusedrec.checkpoint.warm_start import warm_start, warm_start_parquet
from tf_fusedrec.tables.state import without_tables

__all__ = [
    "Checkpointer",
    "dense_prefix",
    "exists",
    "load",
    "read_manifest",
    "read_tables",
    "save",
    "warm_start",
    "warm_start_parquet",
    "without_tables",
]
