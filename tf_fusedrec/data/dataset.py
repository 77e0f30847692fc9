"""The last stage of the input pipeline: token-balanced batches as a tf.data.Dataset that Keras model.fit takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data import batching
from tf_fusedrec.data.columns import Column, empty_rows
from tf_fusedrec.data.parquet import ParquetFolder
from tf_fusedrec.data.rows import Ragged, Rows

_PREFETCH = 4  # batches made ahead, enough to hide a row group that takes longer than a step


def token_balanced_dataset(
    folder: ParquetFolder,
    *,
    length_columns: Sequence[str],
    target_tokens: int,
    extra_tokens: int = 0,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    first_epoch: int = 0,
) -> tf.data.Dataset:
    """Batches of about target_tokens tokens (MTGRBoost Algorithm 1) of this rank's rows.

    Args:
      folder: what to read.
      length_columns: list columns whose values become tokens of the model.
      target_tokens: tokens wanted in a batch.
      extra_tokens: tokens that the model adds to every row (contextual features, for example).
      epochs: how many times the data are read, each time in the folder's order of that epoch.
      steps_per_epoch: batches of every epoch on this rank, for example the maximum over ranks of
        folder.count_batches(). A rank that runs out yields batches of no rows; an epoch that has more is cut short.
        Call model.fit with the same steps_per_epoch and epochs. None gives as many as there are.
      first_epoch: the number of the first epoch; a resumed job continues with the order it would have had.

    Returns:
      A dataset of dicts, by column name: <dtype>[B], or RaggedTensor <dtype>[B, (L)] with int64 row_splits. Its
      cardinality is epochs * steps_per_epoch when steps_per_epoch is given. Without it the cardinality is unknown, and
      model.fit would take the first epoch's number of batches for all: fit one epoch at a time then.

    Raises:
      ValueError: a length column that is not a list column, or a target, epochs or steps below 1.
    """
    batching.check_length_columns(length_columns, folder.columns)
    wanted = {"target_tokens": target_tokens, "epochs": epochs}
    if steps_per_epoch is not None:
        wanted["steps_per_epoch"] = steps_per_epoch
    for name, value in wanted.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    if extra_tokens < 0:
        raise ValueError(f"extra_tokens must be >= 0, got {extra_tokens}.")

    def batches() -> Iterator[dict]:
        for epoch in range(first_epoch, first_epoch + epochs):
            of_epoch = batching.token_balanced_batches(folder.read(epoch), length_columns, extra_tokens, target_tokens)
            if steps_per_epoch is not None:
                nothing = itertools.repeat(empty_rows(folder.columns))
                of_epoch = itertools.islice(itertools.chain(of_epoch, nothing), steps_per_epoch)
            yield from map(_arrays, of_epoch)

    signature = {column.name: _spec(column) for column in folder.columns}
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    if steps_per_epoch is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(epochs * steps_per_epoch))
    return dataset.map(_tensors).prefetch(_PREFETCH)


def _spec(column: Column) -> tf.TensorSpec | tuple[tf.TensorSpec, tf.TensorSpec]:
    values = tf.TensorSpec([None], column.dtype)
    return (values, tf.TensorSpec([None], tf.int64)) if column.ragged else values


def _arrays(rows: Rows) -> dict[str, np.ndarray | tuple[np.ndarray, np.ndarray]]:
    """Plain arrays for TensorFlow: ragged tensors made in Python would cost more than all the reading."""
    return {
        name: (column.values, column.row_splits) if isinstance(column, Ragged) else column
        for name, column in rows.columns.items()
    }


def _tensors(arrays: dict[str, tf.Tensor | tuple[tf.Tensor, tf.Tensor]]) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    # validate=False: the row_splits are cumulative sums made by our own reader, right by construction.
    return {
        name: tf.RaggedTensor.from_row_splits(*column, validate=False) if isinstance(column, tuple) else column
        for name, column in arrays.items()
    }
