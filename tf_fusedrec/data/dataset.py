"""The last stage of the input pipeline: token-balanced batches as a tf.data.Dataset that Keras model.fit takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data import plan
from tf_fusedrec.data.columns import Column
from tf_fusedrec.data.parquet import ParquetFolder
from tf_fusedrec.data.plan import Cost, StochasticLength
from tf_fusedrec.data.rows import Ragged, Rows

_PREFETCH = 4  # batches made ahead, enough to hide a row group that takes longer than a step to decode


class TokenBatches:
    """Batches of about target_tokens_per_rank tokens from this rank's rows. All ranks have the same number of batches.

    Args:
      folder: Folder to read.
      length_columns: Names of list columns with the model's tokens, or of int64 columns with numbers of tokens.
      target_tokens_per_rank: Target number of tokens in a batch of one rank, >= 1.
      extra_tokens: Number of tokens that the model adds to every row, such as contextual features.
      scope: "rank" or "global", see plan.py. "global" balances best if batches have few rows, but every rank then reads
        the row groups of all ranks.
      cost: Cost to balance instead of tokens; a target of n tokens becomes the average cost of n tokens.
      stochastic_length: Rule that cuts rows at random in every epoch. Tokens are counted and batches formed before the
        cut. It draws by the folder's seed, the epoch and the batch.
      epochs: Number of epochs to read, >= 1.
      start: Position of an earlier job, on any number of ranks, to resume from; None begins with epoch 0.

    Attributes:
      first_epoch: 0, or the epoch of `start`.
      steps_per_epoch: Steps of every rank in a whole epoch, the maximum over ranks and epochs. A rank without rows
        left has batches of no rows. 0 if there are no rows.
      first_step: Step of first_epoch to resume with, such that the epoch ends at steps_per_epoch. It is the number of
        finished steps if the number of ranks is the same. Otherwise it may be negative, and it is steps_per_epoch if
        no row is left: then begin with the next epoch.

    Raises:
      ValueError: a length column has no numbers of tokens; target_tokens_per_rank or epochs is below 1; a row has more
        tokens than the target, unless the folder skips bad rows; `start` belongs to other data or another order.
    """

    def __init__(
        self,
        folder: ParquetFolder,
        *,
        length_columns: Sequence[str],
        target_tokens_per_rank: int,
        extra_tokens: int = 0,
        scope: str = "rank",
        cost: Cost | None = None,
        stochastic_length: StochasticLength | None = None,
        epochs: int = 1,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (
            ("target_tokens_per_rank", target_tokens_per_rank, 1),
            ("epochs", epochs, 1), ("extra_tokens", extra_tokens, 0),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}.")
        if scope not in plan.SCOPES:
            raise ValueError(f"scope must be one of {plan.SCOPES}, got {scope!r}.")
        lists = [column.name for column in folder.columns if column.ragged]
        if stochastic_length is not None and stochastic_length.column not in lists:
            raise ValueError(
                f"stochastic_length.column must be one of the list columns {lists}, got {stochastic_length.column!r}."
            )
        self._folder, self._scope, self._stochastic_length = folder, scope, stochastic_length
        tokens = folder.tokens(length_columns, extra_tokens)
        _handle_long_rows(folder, tokens, length_columns, target_tokens_per_rank)
        self._weights, self._target = (cost or Cost()).weights(tokens, target_tokens_per_rank)
        self._start = _checked_start(folder, start) if start else None
        self.first_epoch = start["epoch"] if start else 0
        self._plan_of: dict[int, plan.EpochPlan] = {}
        different_epochs = range(epochs if folder.seed is not None else 1)
        positions = plan.all_positions(folder.num_rows)
        self.steps_per_epoch = max(self._new_plan(epoch, positions).steps for epoch in different_epochs)
        self.first_step = 0
        if start and self._start is not None:
            steps_left = self._plan(self.first_epoch).steps
            if start["ranks"] == folder.ranks:  # The same ranks end the epoch as before, with its empty batches.
                steps_left = max(steps_left, start["steps_left"])
            self.first_step = self.steps_per_epoch - steps_left

    def dataset(self, first_epoch: int | None = None, epochs: int = 1) -> tf.data.Dataset:
        """Batches of some epochs.

        Args:
          first_epoch: First epoch; None begins at the position `start`, that is at first_step of first_epoch.
          epochs: Number of epochs. Call model.fit with the same number and with steps_per_epoch, minus first_step for
            an epoch that begins there.

        Returns:
          Dataset of dicts by column name: <dtype>[B], or RaggedTensor <dtype>[B, (L)] with int64 row_splits. Its
          cardinality is the number of steps. Errors of the reader appear as TensorFlow errors with the same message.
        """
        begin = self.first_epoch if first_epoch is None else first_epoch
        steps = {epoch: self.steps_per_epoch - self._skipped(epoch) for epoch in range(begin, begin + epochs)}

        def batches() -> Iterator[Rows]:
            for epoch, count in steps.items():
                epoch_plan = self._plan(epoch)
                rank = self._folder.rank
                positions, batch_positions = itertools.tee(epoch_plan.batch(rank, step) for step in range(count))
                rows = self._folder.read_positions(epoch, epoch_plan.intervals(rank), positions)
                yield from (self._cut(batch, epoch, at) for batch, at in zip(rows, batch_positions))

        dataset = _to_tensors(batches, self._folder.columns)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(sum(steps.values()))).prefetch(_PREFETCH)
        options = tf.data.Options()
        options.autotune.enabled = False  # It has nothing to tune here, and delays the end of an iterator by 0.15 s.
        return dataset.with_options(options)

    def _cut(self, rows: Rows, epoch: int, positions: np.ndarray) -> Rows:
        """Cuts a batch by stochastic_length. The seed depends on `positions` <int64>[B], not on the reading rank."""
        rule = self._stochastic_length
        if rule is None or not rows.num_rows:
            return rows
        random = np.random.default_rng([self._folder.seed or 0, epoch, int(positions[0])])
        places = rule.places(rows.ragged(rule.column), random)
        aligned = [c.name for c in self._folder.columns if rule.column in (c.name, c.aligned_with)]
        return Rows({**rows.columns, **{name: rows.ragged(name).pick(places) for name in aligned}}, rows.num_rows)

    def position(self, epoch: int, step: int) -> dict[str, Any]:
        """Position of all ranks after `step` trained steps of an epoch, whatever has been read ahead.

        Args:
          epoch: Number of the epoch.
          step: Trained steps; in first_epoch they are counted from first_step.

        Returns:
          JSON-serializable value for `start`, the same on all ranks.
        """
        done = step - self._skipped(epoch)
        begun = done > 0 or (epoch == self.first_epoch and self._start is not None)
        return {
            "epoch": epoch,
            "left": self._plan(epoch).left_after(done) if begun else None,
            "ranks": self._folder.ranks,
            "steps_left": self.steps_per_epoch - step,
            **_order_of(self._folder),
        }

    def _skipped(self, epoch: int) -> int:
        return self.first_step if epoch == self.first_epoch else 0

    def _plan(self, epoch: int) -> plan.EpochPlan:
        """This job's plan of an epoch. Only the plan of the latest epoch is kept."""
        if epoch not in self._plan_of:
            streams = self._start if epoch == self.first_epoch else None
            self._plan_of = {epoch: self._new_plan(epoch, streams or plan.all_positions(self._folder.num_rows))}
        return self._plan_of[epoch]

    def _new_plan(self, epoch: int, streams: plan.Streams) -> plan.EpochPlan:
        weights = self._weights[self._folder.order(epoch).file_rows()]
        return plan.EpochPlan(weights, self._target, streams, self._folder.ranks, self._scope)


def _order_of(folder: ParquetFolder) -> dict[str, Any]:
    """The settings, in addition to the epoch, that positions depend on."""
    return {"contents": folder.contents(), "shuffle_seed": folder.seed, "shuffle_rows": folder.shuffle_rows}


def _checked_start(folder: ParquetFolder, start: Mapping[str, Any]) -> plan.Streams | None:
    """The remaining positions of the first epoch, None for all. Raises ValueError for positions of another order."""
    if start["left"] is None:
        return None
    for name, value in _order_of(folder).items():
        if start[name] != value:
            raise ValueError(
                f"start lies inside epoch {start['epoch']} of data with {name} {start[name]!r}, but {folder.path} has "
                f"{value!r}. A position is valid for one order of rows only: restore the files and settings, or begin "
                "the next epoch with start=None."
            )
    return [[(begin, end) for begin, end in stream] for stream in start["left"]]


def _handle_long_rows(folder: ParquetFolder, tokens: np.ndarray, length_columns: Sequence[str], target: int) -> None:
    """Refuses rows longer than a whole batch, or skips them by setting their tokens to 0."""
    long = np.flatnonzero(tokens > target)
    groups = folder.groups_of(long)
    for group in np.unique(groups):
        rows = long[groups == group]
        place, first = folder.place(int(group))
        folder.bad.handle(
            place,
            f"column {list(length_columns)} has a row of {tokens[rows[0]]} tokens, "
            f"longer than target_tokens_per_rank = {target} of a batch. Shorten rows (Column.keep_last), raise "
            'target_tokens_per_rank, or skip such rows (bad_rows="skip"). '
            f"Row {rows[0] - first} is the first.",
            (rows - first).tolist(),
        )
    tokens[long] = 0


def _to_tensors(batches: Callable[[], Iterator[Rows]], columns: Sequence[Column]) -> tf.data.Dataset:
    """A dataset of the batches that `batches` yields. Each iterator calls `batches` once.

    The generator yields only a number, and a numpy_function looks up the arrays by it. A from_generator of arrays would
    convert them as long as Parquet reads them. A numpy_function needs nearly no time.
    """
    numbers = itertools.count()
    waiting: dict[int, list[np.ndarray]] = {}

    def produce() -> Iterator[int]:
        yielded: list[int] = []
        try:
            for rows in batches():
                arrays: list[np.ndarray] = []
                for column in columns:
                    values = rows.columns[column.name]
                    arrays += [values.values, values.row_splits] if isinstance(values, Ragged) else [values]
                yielded = [number for number in yielded if number in waiting]
                yielded.append(next(numbers))
                waiting[yielded[-1]] = arrays
                yield yielded[-1]
        finally:  # An abandoned iterator leaves batches that were never looked up.
            for number in yielded:
                waiting.pop(number, None)

    dtypes = [dtype for column in columns for dtype in [column.value_dtype] + ["int64"] * column.ragged]

    def tensors(number: tf.Tensor) -> dict[str, tf.Tensor | tf.RaggedTensor]:
        flat = tf.numpy_function(lambda at: waiting.pop(int(at)), [number], dtypes)
        for tensor in flat:
            tensor.set_shape([None])  # ensure_shape would add an op per tensor to every step.
        parts = iter(flat)
        batch: dict[str, tf.Tensor | tf.RaggedTensor] = {}
        for column in columns:
            batch[column.name] = next(parts)
            if column.ragged:
                # validate=False: the reader computes the row_splits as cumulative sums, so they are valid.
                batch[column.name] = tf.RaggedTensor.from_row_splits(batch[column.name], next(parts), validate=False)
        return batch

    return tf.data.Dataset.from_generator(produce, output_signature=tf.TensorSpec([], tf.int64)).map(tensors)
