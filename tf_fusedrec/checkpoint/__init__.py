"""Checkpoints of dense weights and tables: sharded, checksummed, atomic, from any number of ranks to any other.

    checkpoint.save("runs/a/checkpoint", model, model.optimizer, extra={"epoch": 3})     # all ranks
    extra = checkpoint.load("runs/a/checkpoint", model, model.optimizer)                 # any number of ranks

Every rank writes its own rows in hash order, with an index (files/shard_file.py). Any number of ranks can load them,
because each rank reads a contiguous range of bytes (files/table_reader.py). The manifest is written last and makes the
files a checkpoint, so an interrupted save leaves the last checkpoint intact (files/manifest.py). Some earlier saves are
kept (files/saves.py). Tables are identified by name: adding, dropping, reordering or regrouping one table leaves the
others unchanged. Checkpointer saves in the background, and writes only changed rows between full saves.

layers.py finds the layers. checkpointer.py and loading.py call collectives. saving.py sees ranks as plain numbers.
dense.py writes dense weights. The formats of all other files are in files/.
"""

from tf_fusedrec.checkpoint.checkpointer import Checkpointer, save
from tf_fusedrec.checkpoint.loading import load, read_tables
from tf_fusedrec.checkpoint.warm_start import warm_start
from tf_fusedrec.files.saves import saves
from tf_fusedrec.tables.keras_savers import without_tables

__all__ = ["Checkpointer", "load", "read_tables", "save", "saves", "warm_start", "without_tables"]
