"""Oracle of stale rows: the same model on plain tf.Variables, whose updates by NumPy arrive some steps late."""

import numpy as np

from tf_fusedrec import keras, tf


class PlainTables(keras.layers.Layer):
    """Replaces a FusedEmbedding, for ids that are known beforehand. It trains nothing by itself."""

    def __init__(self, embedding, ids_of_table):
        super().__init__()
        self.features = embedding.internals.features
        self.ids = {table: np.unique(ids) for table, ids in ids_of_table.items()}
        self.shown = {}
        for table, ids in self.ids.items():
            feature = next(name for name, f in self.features.items() if f.table == table and f.combiner is None)
            rows = embedding({feature: tf.constant(ids)}, training=False)[feature]
            self.shown[table] = tf.Variable(rows, trainable=False)

    def call(self, inputs, training=None):
        return {name: self._rows(self.features[name], ids) for name, ids in inputs.items()}

    def _rows(self, feature, ids):
        return tf.gather(self.shown[feature.table], tf.searchsorted(tf.constant(self.ids[feature.table]), ids))


def gradients_of(model, tables):
    """Returns the argument `gradients` of `train` for a model with batches (x, y, weights of samples)."""

    @tf.function(reduce_retracing=True)
    def gradients(x, y, weight):
        with tf.GradientTape() as tape:
            tape.watch(list(tables.shown.values()))
            loss = model.compute_loss(x, y, model(x, training=True), weight)
        return tape.gradient(loss, (model.trainable_variables, tables.shown))

    return lambda batch: gradients(*batch)


def train(model, tables, gradients, batches, staleness, rate, sync_every=1, average_late=False):
    """Trains with Adagrad (v += g^2 from 0.1, w -= rate g / (sqrt(v) + 1e-7)) on rows that lack `staleness` updates.

    Args:
      model: with an optimizer for its dense weights, which it trains.
      tables: the PlainTables inside the model, which it leaves as they were.
      gradients: from a batch to gradients of model.trainable_variables and of tables.shown.
      batches: of each step a list: the batch of each group of ranks that has tables of its own.
      sync_every: updates after which the tables of all groups, v among them, become their mean.
      average_late: True if that mean is taken before the next update, and every group adds its own update to it.

    Returns:
      rows {table: [ids, D]} of the first group after all updates; with average_late, the mean of all groups.
    """
    begin = {table: shown.numpy().astype(np.float64) for table, shown in tables.shown.items()}
    groups = range(len(batches[0]))
    versions = [[begin] for _ in groups]
    squares = [{table: np.full_like(rows, 0.1) for table, rows in begin.items()} for _ in groups]
    for t, of_groups in enumerate(batches):
        all_dense = []
        copies = [{table: array.copy() for table, array in square.items()} for square in squares]  # += changes squares
        before = [dict(versions[group][-1]) for group in groups], copies
        for group in groups:
            for table, shown in tables.shown.items():
                shown.assign(versions[group][max(t - staleness, 0)][table].astype(np.float32))
            dense, sparse = gradients(of_groups[group])
            all_dense.append(dense)
            newest = {}
            for table, rows in versions[group][-1].items():
                g = np.asarray(tf.convert_to_tensor(sparse[table]), np.float64)  # rows of no id have a gradient of zero
                squares[group][table] += g**2
                newest[table] = rows - rate * g / (np.sqrt(squares[group][table]) + 1e-7)
            versions[group].append(newest)
        state = [versions[group][-1] for group in groups], squares
        if average_late and t > 0 and t % sync_every == 0:
            for now, then in zip(state, before):
                for table in begin:
                    mean = np.mean([of_group[table] for of_group in then], axis=0)
                    for of_group, earlier in zip(now, then):
                        of_group[table] = mean + of_group[table] - earlier[table]
        if ((t + 1) % sync_every == 0 and not average_late) or (average_late and t + 1 == len(batches)):
            for table in begin:
                for now in state:
                    mean = np.mean([of_group[table] for of_group in now], axis=0)
                    for of_group in now:
                        of_group[table] = mean.copy()
        means = [tf.add_n(parts) / len(parts) for parts in zip(*all_dense)]
        model.optimizer.apply_gradients(zip(means, model.trainable_variables))
    for table, shown in tables.shown.items():
        shown.assign(begin[table].astype(np.float32))
    return versions[0][-1]
