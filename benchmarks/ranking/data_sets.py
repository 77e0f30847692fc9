"""The data sets of the benchmark: files, tasks, experiments, and the folders of their validation and test splits."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from benchmarks.harness import harness, training
from models.data_sets.kuairand import LOGS, USER_FEATURES, convert_kuairand
from models.data_sets.movielens import RATINGS
from models.experiment import Experiment, load
from models.prepare import prepare_data

MODELS = ("grm", "dlrm", "din", "dcn")
KUAIRAND_HELD_OUT = 0.2  # share of a user's impressions in the test split, and of the others in the validation split


class DataSet(NamedTuple):
    """One kind of data."""

    name: str  # experiments are configs/<model>_<name>.yaml
    files: tuple[str, ...]  # a folder with one of them is of this kind
    tasks: tuple[str, str]  # the click task first
    tuning_seeds: tuple[int, ...]  # of tuning and of --sizes; a small split needs the mean of several
    split: Callable[[DataSet, Sequence[str], pathlib.Path], dict[str, pathlib.Path]]

    @property
    def deciding(self) -> list[str]:
        """The metrics whose mean chooses settings and epochs."""
        return [f"{task}_{metric}" for task in self.tasks for metric in ("auc", "gauc")]

    def experiment(self, model: str, overrides: Sequence[str] = ()) -> Experiment:
        return load(harness.ROOT / f"configs/{model}_{self.name}.yaml", overrides)

    def job(
        self, model: str, setting: training.Setting, epochs: int, seed: int, split: str, folder: pathlib.Path,
        run: pathlib.Path, patience: int = 0,
    ) -> training.Job:  # fmt: skip
        """Returns the job of a model, which trains on a data set and evaluates its part `test` as `split`."""
        fields = [f"{name}={value}" for name, value in setting.items()]
        experiment = self.experiment(model, [*fields, f"train.epochs={epochs}", f"seed={seed}"])
        return training.job_of(
            model, experiment, run, folder, {split: folder}, deciding=self.deciding, patience=patience
        )  # fmt: skip

    def prepared(self, source: pathlib.Path, run: pathlib.Path) -> dict[str, pathlib.Path]:
        """Returns the folders "validation" and "test" below `run`. The part `test` of each is the held-out one."""
        return self.split(self, [f"data.input={json.dumps(str(source))}"], run / "data")


def data_set_of(source: pathlib.Path) -> DataSet:
    """Returns the kind of data in a folder."""
    for one in DATA_SETS:
        if any((source / name).is_file() for name in one.files):
            return one
    wanted = "; ".join(f"{one.name}: {' or '.join(one.files)}" for one in DATA_SETS)
    raise SystemExit(f"error: --data {source} has no file of a known data set. Name a folder with one ({wanted}).")


def _by_time(data: DataSet, given: Sequence[str], root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Splits at two moments for all users. The validation data end where the test period begins."""
    splits = {name: data.experiment("grm", [*given, f"data.held_out={name}"]) for name in ("validation", "test")}
    return {name: prepare_data(experiment, root) for name, experiment in splits.items()}


def _by_user(data: DataSet, given: Sequence[str], root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Holds out the last impressions of each user for test, and the last of the others for validation."""
    experiment = data.experiment("grm", given)
    test = prepare_data(experiment, root)
    validation = test.with_name(f"{test.name}_validation")
    if not validation.exists():
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            earlier = pathlib.Path(temporary) / "earlier"
            earlier_log(pathlib.Path(experiment.data.input), earlier)
            convert_kuairand(earlier, validation, test_fraction=KUAIRAND_HELD_OUT, split="user")
    return {"validation": validation, "test": test}


def earlier_log(source: pathlib.Path, output: pathlib.Path) -> None:
    """Writes the log without the last KUAIRAND_HELD_OUT of each user's impressions, and the users' features.

    These are the training impressions of the converter's split by user, which rounds up and keeps ties in file order.
    """
    log = csv.read_csv(_first_of(source, LOGS))  # decompresses by the name
    user, time = log["user_id"].to_numpy(), log["time_ms"].to_numpy()
    order = np.lexsort([time, user])
    _, begin, counts = np.unique(user[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(begin, counts)
    kept = order[place < np.repeat(np.ceil(counts * (1 - KUAIRAND_HELD_OUT)), counts)]
    output.mkdir()
    csv.write_csv(log.take(pa.array(np.sort(kept))), output / "log.csv")
    shutil.copy(_first_of(source, USER_FEATURES), output)


def _first_of(folder: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise SystemExit(f"error: --data {folder} has none of {list(names)}. Name the folder of KuaiRand.")
    return found[0]


DATA_SETS = (
    DataSet("kuairand", LOGS, ("ctr", "long_view"), (0, 1, 2), _by_user),
    DataSet("ml1m_ranking", RATINGS, ("ctr", "ctcvr"), (0,), _by_time),
)
