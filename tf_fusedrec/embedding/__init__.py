"""layer.py defines FusedEmbedding. group_rows.py runs one call, modes.py lets schedules and exports intercept calls,
description.py tells a user what the layer holds."""

from tf_fusedrec.embedding.layer import FusedEmbedding
from tf_fusedrec.embedding.modes import Answer, Reached

__all__ = ["Answer", "FusedEmbedding", "Reached"]
