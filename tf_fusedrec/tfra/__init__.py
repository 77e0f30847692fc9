"""Runs programs written for TFRA with Horovod: one changed import, fused layers, checkpoints in and out.

    from tf_fusedrec import tfra
    from tf_fusedrec.tfra import dynamic_embedding as de  # HvdAllToAllEmbedding is FusedTfraEmbedding here
    model = build_model()                                 # unchanged
    tfra.fuse(model)                                      # three all-to-alls per group and step, not per layer

Imports go down this list:
  dynamic_embedding.py (the import), fusing.py, importing.py, exporting.py
  fused_layer.py (the layer), id_discovery.py (the ids of a step's lookups), model_checkpoint.py, uneven_data.py
  row_lookup.py (rows by the exchange of exchange/routing.py), restore_on_load.py (SavedModels)
  partitioner.py, shared_shadow.py, row_distributions.py, table_files.py
"""

from tf_fusedrec.tfra import dynamic_embedding
from tf_fusedrec.tfra.exporting import export_checkpoint
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.fusing import FusedGroup, fuse
from tf_fusedrec.tfra.importing import import_checkpoint
from tf_fusedrec.tfra.model_checkpoint import ModelCheckpoint
from tf_fusedrec.tfra.uneven_data import stop_at_shortest

__all__ = [
    "FusedTfraEmbedding",
    "FusedGroup",
    "ModelCheckpoint",
    "dynamic_embedding",
    "export_checkpoint",
    "fuse",
    "import_checkpoint",
    "stop_at_shortest",
]
