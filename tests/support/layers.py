"""Layers with a feature for each table, one step of their training, and the tables of all ranks together."""

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import tf


def layer_of(*tables, combiner=None, **options):
    """Returns a FusedEmbedding. Each table has one feature, with the name of the table."""
    return fr.FusedEmbedding([fr.FeatureConfig(t.name, t.name, combiner) for t in tables], tables, **options)


def train(embedding, inputs, loss_of=tf.reduce_sum):
    """Makes one step. The loss is the sum of loss_of(rows) over the features. Returns the rows by feature."""
    with tf.GradientTape() as tape:
        rows = embedding(inputs)
        loss = sum(loss_of(of_feature) for of_feature in rows.values())
    tape.gradient(loss, embedding.trainable_variables)
    return rows


def merged(tables):
    """Returns the ids and records of all ranks, by ascending id. An id may be on one rank only."""
    ids, records = (np.concatenate(parts) for parts in zip(*tables))
    assert len(np.unique(ids)) == len(ids), "an id lives on two ranks"
    order = np.argsort(ids)
    return ids[order], records[order]
