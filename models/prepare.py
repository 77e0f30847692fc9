"""Prepares the data set of an experiment as a folder in our Parquet layout. Rank 0 writes it once for all ranks.

The folder's name holds a fingerprint of its origin: the settings, and the name, size and time of every raw file. The
folder appears complete or not at all, so all runs share it (data.cache), and one job at a time converts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib

import tf_fusedrec as fr
from tf_fusedrec.data import GrowingFolder
from tf_fusedrec.data.growing import Partition
from tf_fusedrec.models import data_cache
from tf_fusedrec.models.data_sets.events import Window
from tf_fusedrec.models.data_sets.interactions import convert_sequences
from tf_fusedrec.models.data_sets.kuairand import convert_kuairand
from tf_fusedrec.models.data_sets.layouts import read_info
from tf_fusedrec.models.data_sets.movielens import convert_movielens, convert_movielens_ranking
from tf_fusedrec.models.data_sets.synthetic import write_synthetic_ranking, write_synthetic_retrieval
from tf_fusedrec.models.data_sets.table import convert_table, convert_table_sequences
from tf_fusedrec.models.data_sets.table_files import ENDINGS
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.data_config import SOURCES, WINDOWED, DataConfig
from tf_fusedrec.models.experiment.ranking_config import RankingConfig


def prepare_data(experiment: Experiment, root: str | os.PathLike) -> pathlib.Path:
    """Returns the folder of the experiment's data set. Collective.

    Args:
      experiment: Experiment whose `data` section and seed define the data.
      root: Folder of prepared data sets, on a file system that all ranks see.

    Raises:
      ValueError: data.input is not set, does not exist, or does not fit the experiment's task; a file cannot be read
        or written.
      RuntimeError: Rank 0 could not prepare the data; raised on the other ranks with its message.
    """
    if experiment.data.follows_table:
        experiment = _of_first_partition(experiment)
    folder: pathlib.Path | None = None
    error: Exception | None = None
    if fr.rank() == 0:
        try:
            folder = _prepare(experiment, pathlib.Path(root))
        except OSError as caught:
            error = ValueError(f"data cannot be prepared in {root}: {caught}. Set data.cache to another folder.")
        except Exception as caught:  # The other ranks get the message below, so that none waits forever.
            error = caught
    outcome = (str(folder), None if error is None else f"{type(error).__name__}: {error}")
    name, message = fr.collectives.all_gather_object(outcome)[0]
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(f"rank 0 could not prepare the data: {message}")
    return pathlib.Path(name)


def _prepare(experiment: Experiment, root: pathlib.Path) -> pathlib.Path:
    data = experiment.data
    source = pathlib.Path(data.input) if data.input else None
    if source is not None and not source.exists():
        raise ValueError(f"data.input (--data) is {data.input!r}, which does not exist. Pass a file or folder.")
    if source is not None and (source / "dataset.json").is_file():
        folder = source
        data_cache.hold(folder)
    else:
        folder = _convert(experiment, source, root)
    info = read_info(folder)
    if info.task != experiment.task:
        raise ValueError(
            f"{folder} holds {info.task} data, but the experiment's task is {experiment.task!r}. "
            "Name a configuration for that task, or other data with --data."
        )
    return folder


def _convert(experiment: Experiment, source: pathlib.Path | None, root: pathlib.Path) -> pathlib.Path:
    data = experiment.data
    folder = root / f"{data.source}-{_fingerprint(experiment, source, root)}"
    synthetic = data.source.startswith("synthetic")
    if source is not None and synthetic:
        raise ValueError(
            f"data.input (--data) is {data.input!r}, which is not in our Parquet layout (no dataset.json), and "
            f"data.source {data.source!r} converts nothing. Name a configuration for that data; "
            f"there are converters for {[name for name in SOURCES if not name.startswith('synthetic')]}."
        )
    if source is None and not synthetic:
        raise ValueError(f"data.source {data.source!r} needs its files: name their folder with --data.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with data_cache.locked(folder):
        if not folder.exists():
            _write(experiment, source, folder)
        data_cache.hold(folder)
    return folder


def _write(experiment: Experiment, source: pathlib.Path | None, folder: pathlib.Path) -> None:
    data = experiment.data
    if source is None:
        if experiment.task == "ranking":
            write_synthetic_ranking(folder, seed=experiment.seed, **data.sizes())
        else:
            write_synthetic_retrieval(folder, seed=experiment.seed, **data.sizes(), held_out=data.held_out)
        return
    if data.source == "movielens":
        convert_movielens(source, folder, held_out=data.held_out)
    elif data.source == "sequences":
        convert_sequences(source, folder, held_out=data.held_out)
    elif data.source == "movielens_ranking":
        convert_movielens_ranking(source, folder, held_out=data.held_out, window=_window(experiment))
    elif data.source == "table" and experiment.task == "retrieval":
        convert_table_sequences(
            source, folder, data.column_map, held_out=data.held_out, bad_rows=data.bad_rows, texts=data.texts
        )
    elif data.source == "table":
        convert_table(
            source, folder, data.column_map, held_out=data.held_out, window=_window(experiment),
            bad_rows=data.bad_rows, earlier=data.earlier, texts=data.texts,
        )  # fmt: skip
    else:
        convert_kuairand(source, folder, split=data.split)


def growing_folder(data: DataConfig, path: str | os.PathLike, after: Partition | None = None) -> GrowingFolder:
    """The growing folder of data.follow."""
    return GrowingFolder(
        path,
        marker=data.marker or None,
        files=ENDINGS if data.follows_table and not data.marker else (),
        poll_s=data.poll_s,
        timeout_s=data.timeout_s or None,
        max_partitions=data.max_partitions or None,
        after=after,
    )


def _of_first_partition(experiment: Experiment) -> Experiment:
    """Returns the experiment with the first partition as its data. Waits for it. Collective."""
    data = experiment.data
    first = next(iter(growing_folder(data, data.input)), None)
    if first is None:
        form = f"a folder with {data.marker}" if data.marker else f"a file *{', *'.join(ENDINGS)}"
        raise ValueError(f"data.input {data.input!r} has ended without a partition ({form}).")
    return dataclasses.replace(experiment, data=dataclasses.replace(data, input=first.path, follow=False))


def prepare_partition(experiment: Experiment, growing: GrowingFolder, partition: Partition) -> pathlib.Path:
    """Returns the folder of a later partition of a table. All of its events are train. Collective."""
    data = dataclasses.replace(
        experiment.data, input=partition.path, earlier=tuple(growing.before(partition)), held_out="none", follow=False
    )
    return prepare_data(dataclasses.replace(experiment, data=data), data.cache)


def with_new_data(experiment: Experiment, source: str, *, held_out: str) -> Experiment:
    """Returns the experiment of a trained run with other data. Events of a table that it has seen are history.

    Args:
      experiment: Experiment of the run.
      source: Raw files or a converted folder, as data.input.
      held_out: As data.held_out.
    """
    data = experiment.data
    if data.source == "table" and experiment.task == "ranking":
        known = (*data.earlier, data.input)
        earlier = tuple(each for each in known if os.path.exists(each) and not os.path.samefile(each, source))
        if lost := [each for each in known if not os.path.exists(each)]:
            print(f"data: {lost} are gone, so histories lack their events", flush=True)
        return dataclasses.replace(
            experiment, data=dataclasses.replace(data, input=source, earlier=earlier, held_out=held_out)
        )
    return dataclasses.replace(experiment, data=dataclasses.replace(data, input=source))


def _window(experiment: Experiment) -> Window:
    """The rows of a log of events, with histories as long as the model reads them."""
    assert isinstance(experiment.model, RankingConfig)
    return Window(exposures=experiment.data.window, history=experiment.model.max_history)


def _fingerprint(experiment: Experiment, source: pathlib.Path | None, root: pathlib.Path) -> str:
    """Returns sixteen hexadecimal digits of a hash over everything that the converted data depend on."""
    facts: dict = {"source": experiment.data.source, "version": fr.__version__}
    if experiment.task == "retrieval":
        facts["held_out"] = experiment.data.held_out
    if source is None:
        facts.update(sizes=experiment.data.sizes(), seed=experiment.seed)
    else:
        # Other converters than that of tables also read the files beside the log (movies, user features).
        folder = source if source.is_dir() or experiment.data.source == "table" else source.parent
        files = [
            path
            for each in (folder, *map(pathlib.Path, experiment.data.earlier))
            for path in (sorted(each.iterdir()) if each.is_dir() else [each])
            if path.is_file()
        ]
        facts["files"] = [[path.name for path in files], data_cache.digests(root, files)]
        facts["ids"] = "by value"  # the rule of data_sets.text_log.ids_of
        facts["split"] = experiment.data.split
        if experiment.data.source in WINDOWED and experiment.task == "ranking":
            facts["window"] = [experiment.data.held_out, *_window(experiment)]
        if experiment.data.source == "table":
            data = experiment.to_dict()["data"]
            facts["columns"] = [data["columns"], data["bad_rows"], data["texts"]]
        facts["chosen"] = source.name if source.is_file() else ""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
