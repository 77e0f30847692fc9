"""Checkpoints of dense weights and tables: sharded, checksummed, atomic, from any number of ranks to any other.

    checkpoint.save("runs/a/checkpoint", model, model.optimizer, extra={"epoch": 3})     # all ranks
    extra = checkpoint.load("runs/a/checkpoint", model, model.optimizer)                 # any number of ranks

Every rank writes its own rows, in hash order with an index, so that each of any number of ranks reads contiguous bytes:
its share (shard_file.py). A manifest, written last, makes files a checkpoint: an interrupted save leaves the last one
whole (manifest.py), and some earlier saves are kept (folders.py). Tables are known by name: a table that is added,
dropped, reordered or grouped otherwise moves no other. Checkpointer saves in the background, and between full saves
only what has changed.

From the edge inwards: layers.py (what is saved) -> checkpointer.py, loading.py (collectives) -> saving.py, verdict.py,
shares.py (ranks are numbers) -> folders.py, manifest.py, dense.py, shard_file.py (files) -> schema.py, disk.py.
"""

from tf_fusedrec.checkpoint.checkpointer import Checkpointer, save
from tf_fusedrec.checkpoint.folders import read_manifest, saves
from tf_fusedrec.checkpoint.loading import dense_prefix, load, read_tables
from tf_fusedrec.checkpoint.manifest import exists
from tf_fusedrec.checkpoint.verdict import NotFinite
from tf_fusedrec.checkpoint.warm_start import warm_start, warm_start_parquet
from tf_fusedrec.tables.state import without_tables

__all__ = [
    "Checkpointer",
    "NotFinite",
    "dense_prefix",
    "exists",
    "load",
    "read_manifest",
    "read_tables",
    "save",
    "saves",
    "warm_start",
    "warm_start_parquet",
    "without_tables",
]
