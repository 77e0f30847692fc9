"""Runs programs written for TFRA with Horovod: one changed import, fused layers, checkpoints in and out.

    from tf_fusedrec import tfra
    from tf_fusedrec.tfra import dynamic_embedding as de  # HvdAllToAllEmbedding is FusedTfraEmbedding here
    model = build_model()                                 # unchanged
    tfra.fuse(model)                                      # three all-to-alls per group and step, not per layer

Imports go down this list:
  dynamic_embedding.py (the import, savers), fusing.py
  native_files.py (savers of native tables), checkpoints.py
  native_rows.py (rows of fused layers in native tables), uneven_data.py
  fused_layer.py (the layer and its SavedModels)
  row_lookup.py (rows by the exchange of exchange/routing.py), row_distributions.py
  table.py (FusedEmbedding(backend="tfra")), tfra_library.py
"""

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY

if not KERAS_IS_LEGACY:
    raise ImportError(
        "tf_fusedrec.tfra needs tf_keras, the only Keras that TFRA works with, but this program uses Keras 3. "
        "Remedy: set TF_USE_LEGACY_KERAS=1 in the environment."
    )

from tf_fusedrec.tfra import dynamic_embedding
from tf_fusedrec.tfra.checkpoints import export_checkpoint, import_checkpoint
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.fusing import fuse

__all__ = ["FusedTfraEmbedding", "dynamic_embedding", "export_checkpoint", "fuse", "import_checkpoint"]
