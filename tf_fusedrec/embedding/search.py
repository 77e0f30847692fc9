"""Finds the FusedEmbedding layers of a model: the one search for checkpoints, exports and schedules."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.layer import FusedEmbedding, two_of_one_name
from tf_fusedrec.tables import Table


def embeddings_of(model: tf.Module) -> list[FusedEmbedding]:
    """The FusedEmbedding layers that a model has now, in an order that is the same on all ranks.

    Args:
      model: Keras model, or one FusedEmbedding. The search covers nested models, nested layers and their attributes,
        including lists, tuples and dicts.
    """
    return [module for module in (model, *model.submodules) if isinstance(module, FusedEmbedding)]


def check_names(model: tf.Module) -> None:
    """Raises ValueError if two FusedEmbedding layers of a model have one name."""
    names = [layer.name for layer in embeddings_of(model)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(two_of_one_name(name))


def tables_in(model: tf.Module) -> list[Table]:
    """The tables of each group of these layers, without those of other models."""
    return [lookup.table for embedding in embeddings_of(model) for lookup in embedding.lookups]
