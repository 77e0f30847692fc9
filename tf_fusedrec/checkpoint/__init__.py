"""Checkpoints of dense weights and tables: sharded, checksummed, atomic, from any number of ranks to any other.

    checkpoint.save("runs/a/checkpoint", model, model.optimizer, extra={"epoch": 3})     # all ranks
    extra = checkpoint.load("runs/a/checkpoint", model, model.optimizer)                 # any number of ranks

Every rank writes its own rows in hash order, with an index (shard_file.py). Any number of ranks can load them, because
each rank reads a contiguous range of bytes (resharding.py). The manifest is written last and makes the files a
checkpoint, so an interrupted save leaves the last checkpoint whole (manifest.py). Some earlier saves are kept
(folders.py). Tables are identified by name: adding, dropping, reordering or regrouping one table leaves the others
alone. Checkpointer saves in the background, and writes only changed rows between full saves.

Modules, from the outside inwards: layers.py finds the layers. checkpointer.py and loading.py call collectives.
saving.py, validation.py and resharding.py see ranks as plain numbers. folders.py, manifest.py, dense.py and
shard_file.py define the files. schema.py and disk.py are the base.
"""

from tf_fusedrec.checkpoint.checkpointer import Checkpointer, save
from tf_fusedrec.checkpoint.folders import read_manifest, saves
from tf_fusedrec.checkpoint.loading import dense_prefix, load, read_tables
from tf_fusedrec.checkpoint.manifest import exists
from tf_fusedrec.checkpoint.validation import NotFinite
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
