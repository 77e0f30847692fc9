"""layer.py defines FusedEmbedding. A call goes one way: features.py, lookup.py, features.py. trained_rows.py adds the
gradient, call_steps.py lets schedules and exports replace steps, description.py tells a user what the layer holds.
search.py finds the layers of a model."""

from tf_fusedrec.embedding.layer import FusedEmbedding
from tf_fusedrec.embedding.search import check_names, embeddings_of, tables_in

__all__ = ["FusedEmbedding", "check_names", "embeddings_of", "tables_in"]
