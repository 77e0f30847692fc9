"""GAUC by forward FLOPs of GRM and of DLRM, in four sizes each (MTGRBoost, figure 2)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import training_jobs
from benchmarks.harness.training_job import best
from benchmarks.ranking import summary
from benchmarks.ranking.data_sets import DataSet

# Fields of the experiment by model, smallest size first. The columns of a row grow, and the networks with them.
SIZES: dict[str, list[dict[str, Any]]] = {
    "grm": [
        {
            "model.dim": dim, "model.num_blocks": blocks, "model.qk_dim": dim // 2, "model.value_dim": dim // 2,
            "model.expert_units": dim, "model.head_units": dim // 2,
        }
        for dim, blocks in ((16, 1), (32, 2), (64, 3), (128, 4))
    ],
    "dlrm": [
        {"model.dim": dim, "model.bottom_units": [2 * dim], "model.top_units": [4 * dim, 2 * dim]}
        for dim in (16, 32, 64, 128)
    ],
}  # fmt: skip


def measure(
    data: DataSet, folders: Mapping[str, pathlib.Path], run: pathlib.Path, setting: Mapping[str, Any], epochs: int,
    patience: int, seeds: tuple[int, ...], count: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trains the first `count` sizes of both models. Returns an entry for each, smallest first.

    Args:
      data: Kind of the data.
      folders: Its splits, the result of `data.prepared`.
      run: Folder of the jobs.
      setting: Fields of the experiment that all sizes share.
      epochs: Largest number of epochs. With patience 0, every size trains so many.
      patience: Epochs without a better validation score after which the choice of the epochs ends.
      seeds: Seeds of the trainings on all data before the test split.
      count: Number of sizes of each model.

    Returns:
      Entries with model, size (from 1), epochs, forward_mflops (of one row of a user and its exposures), and the test
      split's gauc, auc, second_gauc and second_auc, means over the seeds. gauc_seeds has the single values.
    """
    sizes = {(model, at): {**setting, **fields} for model in SIZES for at, fields in enumerate(SIZES[model][:count])}
    chosen = dict.fromkeys(sizes, epochs)
    if patience:
        tuning = {
            key: data.job(key[0], fields, epochs, 0, folders["validation"], run, patience)
            for key, fields in sizes.items()
        }
        training_jobs.train(list(tuning.values()))
        chosen = {key: best(one.epochs())["epoch"] for key, one in tuning.items()}
    final = {
        (key, seed): data.job(key[0], fields, chosen[key], seed, folders["test"], run)
        for seed in seeds
        for key, fields in sizes.items()
    }
    training_jobs.train(list(final.values()))
    entries = []
    for key in sizes:
        ended = [final[key, seed].epochs()[-1] for seed in seeds]
        test = summary.of_seeds([entry["held_out"] for entry in ended])
        entry = {"model": key[0], "size": key[1] + 1, "epochs": chosen[key]}
        entry["forward_mflops"] = ended[0]["forward_mflops"]
        for prefix, task in zip(("", "second_"), data.tasks):
            entry |= {f"{prefix}{metric}": test[f"{task}_{metric}"]["mean"] for metric in summary.METRICS}
        entries.append({**entry, "gauc_seeds": test[f"{data.tasks[0]}_gauc"]["seeds"]})
    return entries
