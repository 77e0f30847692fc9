"""For programs written for TFRA with Horovod: its layer by one import, many layers fused, checkpoints in and out.

    from tf_fusedrec.tfra import dynamic_embedding as de     # de.keras.layers.HvdAllToAllEmbedding is FusedEmbedding
    model = build_model()                                    # as before
    tf_fusedrec.tfra.fuse(model)                             # three all2alls a step instead of three a layer

From the edge inwards: dynamic_embedding.py (the swap), fusing.py, importing.py, exporting.py -> layer.py, asking.py ->
lookup.py -> route.py, shadow.py, initial.py, files.py.
"""

from tf_fusedrec.tfra import dynamic_embedding
from tf_fusedrec.tfra.callbacks import ModelCheckpoint
from tf_fusedrec.tfra.even import even
from tf_fusedrec.tfra.exporting import export_checkpoint
from tf_fusedrec.tfra.fusing import FusedGroup, fuse
from tf_fusedrec.tfra.importing import import_checkpoint
from tf_fusedrec.tfra.layer import FusedEmbedding

__all__ = [
    "FusedEmbedding",
    "FusedGroup",
    "ModelCheckpoint",
    "dynamic_embedding",
    "even",
    "export_checkpoint",
    "fuse",
    "import_checkpoint",
]
