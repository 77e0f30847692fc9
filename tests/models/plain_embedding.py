"""A stand-in for FusedEmbedding with the same call over plain tf.Variable tables."""

import numpy as np

from tf_fusedrec import keras, tf

ROWS = 64  # ids 0 .. ROWS-1


class PlainEmbedding(keras.layers.Layer):
    """Maps {feature: ids} to {feature: rows}, from tables [ROWS, dim] with a seed per table name."""

    def __init__(self, table_of: dict[str, str], dim: int, name: str = "plain_embedding"):
        super().__init__(name=name)
        self.table_of = table_of
        self.tables = {}
        for table in sorted(set(table_of.values())):
            rng = np.random.default_rng([ord(letter) for letter in table])
            values = rng.normal(0.0, 0.3, [ROWS, dim]).astype(np.float32)
            self.tables[table] = tf.Variable(values, name=table)

    def call(self, inputs, training=None):
        rows = {}
        for feature, ids in inputs.items():
            table = self.tables[self.table_of[feature]]
            if isinstance(ids, tf.RaggedTensor):
                rows[feature] = ids.with_values(tf.gather(table, ids.values))
            else:
                rows[feature] = tf.gather(table, ids)
        return rows
