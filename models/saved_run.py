"""Checks of a run's checkpoint before it is used. They need no TensorFlow, so ranks start only after them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_fusedrec.files import saves
from tf_fusedrec.files.inspection import open_tables
from tf_fusedrec.models.experiment import EmbeddingConfig, Experiment, from_dict

# Fields of EmbeddingConfig about replicas of the tables, which only training needs.
REPLICAS = ("groups", "rule", "sync_every", "moment_scale", "replicas_together", "average_late")


def experiment_of(checkpoint: str | os.PathLike, overrides: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a checkpoint of a run, with replaced settings.

    Raises:
      ValueError: The folder has no checkpoint, another program wrote it, this version does not know the experiment, or
        a replacement is wrong.
    """
    extra = saves.read_manifest(checkpoint)["extra"]
    if not isinstance(extra, dict) or "experiment" not in extra:
        raise ValueError(
            f"checkpoint {os.fspath(checkpoint)!r} names no experiment, so another program than `fusedrec train` wrote "
            "it. Use a checkpoint of `fusedrec train`, or tf_fusedrec.export in the program that wrote this one."
        )
    try:
        experiment = from_dict(extra["experiment"])
    except ValueError as error:
        raise ValueError(
            f"checkpoint {os.fspath(checkpoint)!r} holds an experiment that this version does not know: {error}"
        ) from error
    return from_dict(extra["experiment"], overrides) if overrides else experiment


def saved_experiment(checkpoint: str | os.PathLike) -> Experiment:
    """As experiment_of, without replicas of the tables."""
    experiment = experiment_of(checkpoint)
    unreplicated = {name: getattr(EmbeddingConfig, name) for name in REPLICAS}
    return dataclasses.replace(experiment, embedding=dataclasses.replace(experiment.embedding, **unreplicated))


def check_whole(checkpoint: pathlib.Path) -> None:
    """Raises ValueError unless a folder has a checkpoint of a run, whose files are whole. Only a load verifies rows."""
    experiment_of(checkpoint)
    last = saves.read_manifest(checkpoint)
    for described in [last, *([saves.read_manifest(checkpoint, "best")] if "best" in last["extra"] else [])]:
        open_tables(checkpoint, described)


def check_goes_on(experiment: Experiment, checkpoint: pathlib.Path) -> None:
    """Raises ValueError unless an experiment can go on from a checkpoint."""
    before, now = experiment_of(checkpoint).to_dict(), experiment.to_dict()
    for section in ("task", "model", "embedding"):
        if changed := list(changes(before[section], now[section], section)):
            raise ValueError(
                f"--resume: {checkpoint} was trained with other settings: {', '.join(changed)}. Use the saved values, "
                "or another --output."
            )
    check_whole(checkpoint)


def check_gives_rows(experiment: Experiment, checkpoint: pathlib.Path) -> None:
    """Raises ValueError unless a checkpoint has rows for a table of an experiment."""
    saved = open_tables(checkpoint, saves.read_manifest(checkpoint))
    common = [table for table in experiment.tables if table.name in saved]
    if not common:
        wanted = sorted(table.name for table in experiment.tables)
        raise ValueError(
            f"--warm-start: {checkpoint} has the tables {sorted(saved)}, and the model has {wanted}. Use a run that "
            "has one of these."
        )
    for table in common:
        if saved[table.name].dim != table.dim:
            raise ValueError(
                f"--warm-start: table {table.name!r} of {checkpoint} has dim {saved[table.name].dim}, and the model's "
                f"has {table.dim}. Use a run of this dim, or set embedding.tables.{table.name}.dim."
            )


def changes(before: Any, now: Any, path: str) -> Iterator[str]:
    """Yields the fields that differ, such as "model.dim 16 -> 8"."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from changes(before.get(name), now.get(name), f"{path}.{name}")
    elif before != now:
        yield f"{path} {before} -> {now}"
