"""What a job trains, cut into calls of fit: epochs of one data set, or the partitions of a folder that grows.

A resumed epoch has fewer steps than the others, and Keras knows one number for all: it gets a fit of its own. So does
every partition, an "epoch" to Keras.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tf_fusedrec as fr
from models.build import columns, extra_tokens, length_columns
from models.experiment import Experiment
from tf_fusedrec import tf
from tf_fusedrec.data import Cost, GrowingFolder, ParquetFolder, Partition, TokenBatches, check_same_files


class Round(NamedTuple):
    """One call of fit."""

    dataset: tf.data.Dataset
    epoch: int
    end: int  # the epoch behind the last one
    steps: int  # of a whole epoch
    step: int  # of the first epoch that was trained before; see TokenBatches.first_step
    position: Callable[[int, int], dict[str, Any]]  # input_position of callbacks.Checkpoint


def rounds(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[Round]:
    """The rounds of a job, in order; all ranks iterate together.

    Args:
      experiment: says whether the data grow.
      folder: of the data set.
      saved: what `position` gave at the checkpoint to go on from; None begins.

    Raises:
      ValueError: there are no rows to train on; `saved` is of the other kind of data; what TokenBatches and
        GrowingFolder refuse.
    """
    follow = experiment.data.follow
    if saved is not None and ("partition" in saved) != follow:
        was = "followed a growing folder" if "partition" in saved else "read one data set in epochs"
        raise ValueError(
            f"data.follow is {follow}, but the job of the checkpoint {was}: there is no place to go on from. "
            f"Set data.follow to {not follow}, or train from the beginning."
        )
    return (_partitions if follow else _epochs)(experiment, folder / "train", saved)


def _epochs(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[Round]:
    epochs = experiment.train.epochs
    batches = _batches(experiment, _folder(experiment, folder), epochs, saved)
    steps, epoch, step = batches.steps_per_epoch, batches.first_epoch, batches.first_step
    if not steps:
        raise ValueError(f"{folder} holds no rows to train on.")
    if step and epoch < epochs:
        yield Round(batches.dataset(epoch), epoch, epoch + 1, steps, step, batches.position)
        epoch += 1
    if epoch < epochs:
        yield Round(batches.dataset(epoch, epochs - epoch), epoch, epochs, steps, 0, batches.position)


def _partitions(experiment: Experiment, folder: pathlib.Path, saved: Mapping[str, Any] | None) -> Iterator[Round]:
    data = experiment.data
    after = None
    if saved is not None:
        number, name = saved["partition"]
        after = Partition(number, name, f"{folder}/{name}")
        if saved["epoch"] == 0:  # inside of it
            yield from _partition(experiment, after, saved)
    growing = GrowingFolder(
        folder,
        marker=data.marker or None,
        poll_seconds=data.poll_seconds,
        timeout_seconds=data.timeout_seconds or None,
        max_partitions=data.max_partitions or None,
        after=after,
    )
    for partition in growing:
        yield from _partition(experiment, partition, None)


def _partition(experiment: Experiment, partition: Partition, saved: Mapping[str, Any] | None) -> Iterator[Round]:
    """The round of a partition; none when it has no rows. To its TokenBatches it is epoch 0, to Keras its number."""
    folder = _folder(experiment, pathlib.Path(partition.path))
    check_same_files(folder)
    batches = _batches(experiment, folder, 1, saved)
    number, steps = partition.number, batches.steps_per_epoch

    def position(epoch: int, step: int) -> dict[str, Any]:
        return {"partition": [number, partition.name], **batches.position(epoch - number, step)}

    if steps > batches.first_step:
        yield Round(batches.dataset(0), number, number + 1, steps, batches.first_step, position)


def _folder(experiment: Experiment, path: pathlib.Path) -> ParquetFolder:
    return ParquetFolder(
        path,
        columns(experiment.model, "train"),
        rank=fr.collectives.rank(),
        world_size=fr.collectives.size(),
        shuffle_seed=experiment.seed,
        bad_rows=experiment.data.bad_rows,
    )


def _batches(
    experiment: Experiment, folder: ParquetFolder, epochs: int, start: Mapping[str, Any] | None
) -> TokenBatches:
    train = experiment.train
    return TokenBatches(
        folder,
        length_columns=length_columns(experiment.model),
        extra_tokens=extra_tokens(experiment.model),
        target_tokens=train.target_tokens,
        scope=train.balance,
        cost=Cost(1.0, train.quadratic_cost),
        epochs=epochs,
        start=start,
    )
