"""layer.py defines FusedEmbedding. group_rows.py runs one call, hooks.py lets schedules and exports intercept calls,
description.py tells a user what the layer holds."""

from tf_fusedrec.embedding.hooks import Answer, Reached
from tf_fusedrec.embedding.layer import FusedEmbedding

__all__ = ["Answer", "FusedEmbedding", "Reached"]
