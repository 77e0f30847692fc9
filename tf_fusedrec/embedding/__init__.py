"""layer.py defines FusedEmbedding. A call goes one way: inputs.py, lookup.py, outputs.py. trained_rows.py adds the
gradient. hooks.py lets schedules and exports intercept calls. description.py tells a user what the layer holds.
search.py finds the layers of a model."""

from tf_fusedrec.embedding.hooks import Reached, SuppliedRows
from tf_fusedrec.embedding.layer import FusedEmbedding
from tf_fusedrec.embedding.search import embeddings_of

__all__ = ["FusedEmbedding", "Reached", "SuppliedRows", "embeddings_of"]
