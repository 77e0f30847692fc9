"""Splits a training job into calls of fit: epochs of one data set, or partitions of a growing folder.

Keras takes one number of steps for all epochs of a fit. A resumed epoch has fewer steps, so it gets its own fit. Every
partition gets its own fit too, as one "epoch" of Keras.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tf_fusedrec import tf
from tf_fusedrec.data import ParquetFolder, StochasticLength, TokenBatches, cluster_samples
from tf_fusedrec.data.growing import Partition, check_same_files
from tf_fusedrec.data.plan import Cost
from tf_fusedrec.models import data_cache
from tf_fusedrec.models.build import columns, extra_tokens, ids_by_table, length_columns
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.prepare import growing_folder, prepare_partition
from tf_fusedrec.schedules import schedule


class FitCall(NamedTuple):
    """The arguments of one call of fit."""

    dataset: tf.data.Dataset
    epoch: int  # First epoch.
    end: int  # The epoch after the last one.
    steps: int  # Steps of a whole epoch.
    step: int  # Steps of the first epoch that are already trained; see TokenBatches.first_step.
    position: Callable[[int, int], dict[str, Any]]  # input_position of callbacks.Checkpoint.


def fit_calls(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[FitCall]:
    """Yields the calls of fit of a job, in order. All ranks iterate together.

    Args:
      experiment: Experiment. Its data.follow decides whether the data grow.
      folder: Folder of the data set.
      saved: Result of `position` at the checkpoint to resume from, or None for a new job.

    Raises:
      ValueError: The data have no rows, `saved` belongs to the other kind of data, or TokenBatches or GrowingFolder
        refuse an argument.
    """
    follow = experiment.data.follow
    if saved is not None and ("partition" in saved) != follow:
        was = "followed a growing folder" if "partition" in saved else "read one data set in epochs"
        raise ValueError(
            f"data.follow is {follow}, but the job of the checkpoint {was}, so it cannot resume. Set data.follow to "
            f"{not follow}, or train from the beginning."
        )
    return (_partitions if follow else _epochs)(experiment, folder / "train", saved)


def _epochs(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[FitCall]:
    epochs = experiment.train.epochs
    batches = _batches(experiment, _folder(experiment, folder), epochs, saved)
    steps, epoch, step = batches.steps_per_epoch, batches.first_epoch, batches.first_step
    if not steps:
        raise ValueError(f"{folder} holds no rows to train on. Choose other data with --data.")
    if step == steps:  # Only empty batches were left, which other ranks do not need.
        epoch, step = epoch + 1, 0
    if step and epoch < epochs:
        yield FitCall(_dataset(experiment, batches, epoch), epoch, epoch + 1, steps, step, batches.position)
        epoch += 1
    if epoch < epochs:
        dataset = _dataset(experiment, batches, epoch, epochs - epoch)
        yield FitCall(dataset, epoch, epochs, steps, 0, batches.position)


def _partitions(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[FitCall]:
    data = experiment.data
    root = data.input if data.follows_table else folder
    after = None
    if saved is not None:
        number, name = saved["partition"]
        after = Partition(number, name, f"{root}/{name}")
    growing = growing_folder(data, root, after)

    def rows_of(partition: Partition) -> pathlib.Path:
        """The rows of a partition. The first one of a table has been prepared with the parts that are held out."""
        if not data.follows_table:
            return pathlib.Path(partition.path)
        return prepare_partition(experiment, growing, partition) / "train" if partition.number else folder

    begun: list[tuple[Partition, Mapping[str, Any] | None]] = []
    if after is not None and saved is not None and saved["epoch"] == 0:  # The checkpoint lies inside the partition.
        begun.append((after, saved))
    for partition, start in itertools.chain(begun, ((partition, None) for partition in growing)):
        rows = rows_of(partition)
        yield from _partition(experiment, partition, rows, start)
        if data.follows_table and partition.number:  # The first one has the parts that are held out.
            data_cache.release(rows.parent)


def _partition(
    experiment: Experiment, partition: Partition, rows: pathlib.Path, saved: Mapping[str, Any] | None
) -> Iterator[FitCall]:
    """Yields the fit of a partition unless it has no rows. TokenBatches call it epoch 0, Keras epoch `number`."""
    folder = _folder(experiment, rows)
    check_same_files(folder)
    batches = _batches(experiment, folder, 1, saved)
    number, steps = partition.number, batches.steps_per_epoch

    def position(epoch: int, step: int) -> dict[str, Any]:
        return {"partition": [number, partition.name], **batches.position(epoch - number, step)}

    if steps > batches.first_step:
        yield FitCall(_dataset(experiment, batches, 0), number, number + 1, steps, batches.first_step, position)


def _folder(experiment: Experiment, path: pathlib.Path) -> ParquetFolder:
    return ParquetFolder(
        path,
        columns(experiment.model, "train"),
        shuffle_seed=experiment.seed,
        bad_rows=experiment.data.bad_rows,
    )


def _batches(
    experiment: Experiment, folder: ParquetFolder, epochs: int, start: Mapping[str, Any] | None
) -> TokenBatches:
    train, model = experiment.train, experiment.model
    history, cut = "history_item" if isinstance(model, RankingConfig) else "item_id", None
    if train.stochastic_length:
        cut = StochasticLength(history, train.stochastic_length, model.max_history)
    return TokenBatches(
        folder,
        stochastic_length=cut,
        length_columns=length_columns(experiment.model),
        extra_tokens=extra_tokens(experiment.model),
        target_tokens_per_rank=train.target_tokens_per_rank,
        scope=train.balance,
        cost=Cost(1.0, train.quadratic_cost),
        epochs=epochs,
        start=start,
    )


def _dataset(experiment: Experiment, batches: TokenBatches, epoch: int, epochs: int = 1) -> tf.data.Dataset:
    dataset, train = batches.dataset(epoch, epochs), experiment.train
    if not train.cluster_samples:
        return dataset
    ids = functools.partial(ids_by_table, experiment.model)
    return cluster_samples(dataset, schedule.get(train.schedule).stages.pieces, ids)
