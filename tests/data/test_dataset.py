"""token_balanced_dataset: static types, exact steps, empty batches, and that Keras model.fit consumes it."""

import numpy as np
import pytest

from tests.data.shards import COLUMNS, expected_rows, read_lists, write_folder
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.data import ParquetFolder, token_balanced_dataset
from tf_fusedrec.data.batching import token_balanced_batches

OPTIONS = {"length_columns": ["item_id"], "extra_tokens": 1, "target_tokens": 12}


def _rows(batches):
    """Batches of tensors as a list of rows, as expected_rows gives them."""
    rows = []
    for batch in batches:
        lists = [batch["user_id"].numpy().tolist(), batch["item_id"].to_list(), batch["rating"].to_list()]
        rows += [(user, tuple(items), tuple(ratings)) for user, items, ratings in zip(*lists)]
    return rows


def test_element_spec_is_static(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [9], 4), COLUMNS)
    assert token_balanced_dataset(folder, **OPTIONS).element_spec == {
        "user_id": tf.TensorSpec([None], tf.int64),
        "item_id": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1, row_splits_dtype=tf.int64),
        "rating": tf.RaggedTensorSpec([None, None], tf.float32, ragged_rank=1, row_splits_dtype=tf.int64),
    }


def test_holds_the_rows_of_each_epoch_in_order(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [40], 8), COLUMNS, shuffle_seed=2, shuffle_rows=16)
    batches = list(token_balanced_dataset(folder, epochs=2, first_epoch=3, **OPTIONS))
    assert _rows(batches) == read_lists(folder, 3) + read_lists(folder, 4)
    sizes = [
        batch.num_rows for epoch in (3, 4) for batch in token_balanced_batches(folder.read(epoch), ["item_id"], 1, 12)
    ]
    assert [int(batch["user_id"].shape[0]) for batch in batches] == sizes


def test_every_rank_has_the_same_steps_and_empty_batches_at_the_end(tmp_path):
    path = write_folder(tmp_path / "d", [7], 100)
    folders = [ParquetFolder(path, COLUMNS, rank=rank, world_size=4) for rank in range(4)]
    steps = max(folder.count_batches(epochs=2, **OPTIONS) for folder in folders) + 1
    rows = []
    for folder in folders:
        dataset = token_balanced_dataset(folder, epochs=2, steps_per_epoch=steps, **OPTIONS)
        assert int(dataset.cardinality()) == 2 * steps
        batches = list(dataset)
        assert len(batches) == 2 * steps
        last = batches[steps - 1]
        assert last["user_id"].shape == [0]
        assert last["item_id"].row_splits.numpy().tolist() == [0]
        assert last["rating"].flat_values.dtype == tf.float32
        rows += _rows(batches[:steps])
    assert sorted(rows) == expected_rows(7)


def test_an_epoch_with_more_batches_is_cut_short(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [40], 8), COLUMNS)
    whole = list(token_balanced_dataset(folder, **OPTIONS))
    cut = list(token_balanced_dataset(folder, epochs=2, steps_per_epoch=2, **OPTIONS))
    assert len(whole) > 2
    assert _rows(cut) == _rows(whole[:2]) * 2


class _MeanRating(keras.Model):
    """Learns one number: the mean rating. Its loss of a batch without rows is 0."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(name="mean", shape=(), initializer="zeros")
        self.loss_tracker = keras.metrics.Mean(name="loss")  # Keras tracks only the losses it computes itself

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.mean + 0.0 * tf.cast(tf.reduce_sum(x["item_id"].flat_values), tf.float32)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        error = tf.square(x["rating"].flat_values - y_pred)
        loss = tf.math.divide_no_nan(tf.reduce_sum(error), tf.cast(tf.size(error), tf.float32))
        self.loss_tracker.update_state(loss)
        return loss


def test_model_fit_consumes_it_with_empty_batches(tmp_path):
    folder = ParquetFolder(write_folder(tmp_path / "d", [40], 8), COLUMNS, shuffle_seed=0)
    steps = folder.count_batches(epochs=5, **OPTIONS) + 2
    dataset = token_balanced_dataset(folder, epochs=5, steps_per_epoch=steps, **OPTIONS)
    model = _MeanRating()
    model.compile(optimizer=keras.optimizers.legacy.SGD(0.2))
    history = model.fit(dataset, epochs=5, steps_per_epoch=steps, verbose=0)
    assert int(model.optimizer.iterations) == 5 * steps
    assert np.all(np.isfinite(history.history["loss"]))
    ratings = [value for row in expected_rows(40) for value in row[2]]
    # SGD on batches of about nine ratings ends near the mean; 0.2 is three times the noise seen over ten seeds.
    assert abs(float(model.mean) - np.mean(ratings)) < 0.2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_tokens": 0}, "target_tokens must be >= 1, got 0"),
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be >= 1, got 0"),
        ({"extra_tokens": -1}, "extra_tokens must be >= 0, got -1"),
        ({"length_columns": ["nothing"]}, "length_columns names 'nothing', which is not a list column"),
    ],
)
def test_arguments_are_checked(tmp_path, change, message):
    folder = ParquetFolder(write_folder(tmp_path / "d", [4], 4), COLUMNS)
    with pytest.raises(ValueError, match=message):
        token_balanced_dataset(folder, **{**OPTIONS, **change})
