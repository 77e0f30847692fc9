"""NumPy forms of what DLRM, DIN and DCN-V2 share: the inputs of an exposure, and networks with ReLU."""

import numpy as np

from tests.models.batches import ranking_batch
from tests.models.plain_embedding import PlainEmbedding
from tf_fusedrec import keras, tf

CATALOGUE = np.arange(1, 60)
# Fields of the records that all tests use.
FIELDS = {
    "contextual": ("user_id", "user_budget"), "item_features": ("genre",), "other_labels": ("conversion",),
    "max_history": 12, "max_exposures": 6, "dim": 8,
}  # fmt: skip
EVENT_TABLES = {"history_item": "item", "history_genre": "genre", "history_action": "action"}


def make(model, config, popularity=CATALOGUE):
    keras.utils.set_random_seed(7)
    return model(config, PlainEmbedding(config.table_of_feature, config.dim), CATALOGUE, popularity)


def batch_of(histories, exposures):
    batch = ranking_batch(histories=histories, exposures=exposures)
    for role in ("history", "exposed"):
        items = batch[f"{role}_item"]
        batch[f"{role}_genre"] = items.with_values(items.values % 5)
    return batch


class Exposure:
    """The inputs of one exposure, in float64.

    Attributes:
      dense: [4].
      own: list of [8], rows of the context, of the item and of its genre.
      candidate: [16], the last two.
      events: [L, 24], rows of item, genre and action.
      since: [L], log(1 + seconds) / 10 from each event to the exposure.
    """

    def __init__(self, tables, lists, scalars, b, e):
        item, time = lists["exposed_item"][b][e], lists["exposed_time"][b][e]
        past = np.array(lists["history_time"][b], np.int64)
        hour = 2 * np.pi * (time % 86_400) / 86_400
        self.since = np.log1p(time - past) / 10
        self.dense = np.array([np.log1p(len(past)), self.since[-1] if len(past) else 0.0, np.sin(hour), np.cos(hour)])
        self.own = [tables[name][scalars[name][b]] for name in ("user_id", "user_budget")]
        self.own += [tables["item"][item], tables["genre"][item % 5]]
        self.candidate = np.concatenate(self.own[-2:])
        parts = [tables[table][np.array(lists[name][b], int)] for name, table in EVENT_TABLES.items()]
        self.events = np.concatenate(parts, axis=1)

    @property
    def means(self):
        """List of [8], the mean of each column of the history, or zeros without one."""
        mean = self.events.mean(axis=0) if len(self.events) else np.zeros(24)
        return list(mean.reshape(3, 8))


def exposures_of(model, batch):
    """Yields the exposures of a batch in order."""
    tables = {name: table.numpy().astype(np.float64) for name, table in model.embedding.tables.items()}
    lists = {name: column.to_list() for name, column in batch.items() if isinstance(column, tf.RaggedTensor)}
    scalars = {name: column.numpy() for name, column in batch.items() if not isinstance(column, tf.RaggedTensor)}
    for b, items in enumerate(lists["exposed_item"]):
        yield from (Exposure(tables, lists, scalars, b, e) for e in range(len(items)))


def float64(layer):
    return [weight.numpy().astype(np.float64) for weight in layer.weights]


def relu_network(x, network):
    """Applies the Dense layers of a keras.Sequential, each with ReLU."""
    for layer in network.layers:
        if layer.weights:
            kernel, bias = float64(layer)
            x = np.maximum(x @ kernel + bias, 0)
    return x


def head(model, x):
    kernel, bias = float64(model.head)
    return x @ kernel + bias
