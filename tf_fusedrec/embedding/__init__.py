"""FusedEmbedding: layer.py is what a user has, group_rows.py what a call does, modes.py what others make of calls."""

from tf_fusedrec.embedding.layer import FusedEmbedding
from tf_fusedrec.embedding.modes import Answer, Reached

__all__ = ["Answer", "FusedEmbedding", "Reached"]
