"""layer.py defines FusedEmbedding, and single.py Embedding for one feature. Schedules reach a layer through
internals.py. A call goes one way: features.py, group.py, step.py and back; left_out.py and replicas.py belong to the
update. describe.py writes for a user what a layer has."""

from tf_fusedrec.embedding.internals import CallHooks
from tf_fusedrec.embedding.layer import FusedEmbedding, check_names, embeddings_of, tables_in
from tf_fusedrec.embedding.single import Embedding
from tf_fusedrec.embedding.step import Lookup, Step

__all__ = ["CallHooks", "Embedding", "FusedEmbedding", "Lookup", "Step", "check_names", "embeddings_of", "tables_in"]
