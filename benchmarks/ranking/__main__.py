"""Question: how well does GRM rank beside DLRM, DIN, DCN-V2 and rates, each tuned on a validation split?

    python -m benchmarks.ranking --data DIR [--sizes | --settings N] [--quick] [--json FILE] [--run DIR]

DIR holds MovieLens-1M (click := rating >= 4, second task: rating = 5; three parts by time, for all users alike) or
KuaiRand (click, long view; the last fifth of every user's impressions is test, the last fifth of the others
validation).

All models read the same columns. Each one is trained with the first N settings of GRID (all by default) and evaluated
on the validation split after every epoch, until an epoch is not better. The highest mean of AUC and GAUC of both tasks
chooses the setting and the number of epochs; the rates choose among as many priors. On KuaiRand the score is the mean
of three seeds, because its scores differ as much between seeds as between settings. Then each seed trains the model
anew on all data before the test split, for so many epochs. The test split is evaluated once. Other settings come from
configs/<model>_<data>.yaml.

The fields of the click task are gauc_<model> and auc_<model>, means over seeds. gauc_difference is GRM minus the model
that is best in the test split, with the 95 % interval of a paired bootstrap over users, gauc_difference_low to _high;
auc_difference is the same. Fields of the second task begin with "second_". `models` has all scores, choices and
metrics, `differences` the interval of GRM minus each model.

Every training is a job with a folder below --run, whose name holds a hash of its configuration. The same command keeps
finished jobs, so it may be stopped at any time. As many jobs train at a time as there are cores, with one thread each.
--quick tries one setting for two epochs, with one seed.

--sizes measures GAUC by forward FLOPs instead, of GRM and DLRM in four sizes each (MTGRBoost, figure 2). They train by
the first setting of GRID, and the validation split chooses the epochs of each. On MovieLens-1M one seed trains, because
the largest GRM takes half an hour. `sizes` has an entry for each, with the fields of sizes_of. benchmarks.plots
draws it. With --quick, two sizes of each train one epoch.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import harness, processes, training
from benchmarks.ranking import summary
from benchmarks.ranking.data_sets import MODELS, DataSet, data_set_of
from models.experiment.ranking_config import RankingConfig

GRID = {
    "model.history_dropout": (0.5, 0.0),
    "embedding.learning_rate": (0.002, 0.001),
    "model.dropout": (0.1, 0.3),
}


class Budget(NamedTuple):
    """Limits of each model's search and training."""

    settings: int = 8  # the first of GRID
    epochs: int = 5
    patience: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)


WHOLE, QUICK = Budget(), Budget(settings=1, epochs=2, seeds=(0,))


def settings_of(budget: Budget) -> list[dict[str, float]]:
    return [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())][: budget.settings]


def choices(
    data: DataSet, folders: Mapping[str, pathlib.Path], run: pathlib.Path, budget: Budget
) -> dict[str, dict[str, Any]]:
    """Returns setting, epochs and score of each model on the validation split, and all that was tried."""
    folder, seeds = folders["validation"], data.tuning_seeds[: len(budget.seeds)]
    tried = {
        model: [
            (setting, [data.job(model, setting, budget.epochs, seed, folder, run, budget.patience) for seed in seeds])
            for setting in settings_of(budget)
        ]
        for model in MODELS
    }
    training.train([job for of_model in tried.values() for _, jobs in of_model for job in jobs])
    return {model: training.choice(of_model) for model, of_model in tried.items()}


def measure(data: DataSet, source: pathlib.Path, run: pathlib.Path, budget: Budget) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    folders = data.prepared(source, run)
    models = choices(data, folders, run, budget)
    final = {
        (model, seed): data.job(model, chosen["setting"], chosen["epochs"], seed, folders["test"], run)
        for seed in budget.seeds
        for model, chosen in models.items()
    }
    training.train(list(final.values()))
    samples = {model: [final[model, seed].samples() for seed in budget.seeds] for model in MODELS}
    test = {}
    for model in MODELS:
        ended = [final[model, seed].epochs()[-1] for seed in budget.seeds]
        test[model] = summary.of_seeds([entry["held_out"] for entry in ended])
        models[model]["processor_seconds_per_epoch"] = ended[0]["processor_seconds"]
    config = data.experiment("grm").model
    assert isinstance(config, RankingConfig)
    priors = summary.PRIORS[: budget.settings]
    models["rates"] = summary.choose_prior(config, folders["validation"], data.deciding, priors)
    prior = models["rates"]["setting"]["prior"]
    samples["rates"] = [summary.rates_samples(config, folders["test"], prior)]
    test["rates"] = summary.of_seeds([summary.rates_results(config, folders["test"], prior)])
    names = [f"{task}_{metric}" for task in data.tasks for metric in summary.METRICS]
    between = summary.differences(samples, names)
    return {
        "data": data.name,
        "tasks": list(data.tasks),
        **budget._asdict(),
        **summary.flat(test, between, data.tasks),
        "test_exposures": len(samples["grm"][0]["user"]),
        "models": {name: {**fields, "test": test[name]} for name, fields in models.items()},
        "differences": between,
    }


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


def sizes_of(
    data: DataSet, folders: Mapping[str, pathlib.Path], run: pathlib.Path, setting: Mapping[str, Any], epochs: int,
    patience: int, seeds: tuple[int, ...], count: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trains the first `count` sizes of both models. Returns an entry for each, smallest first.

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
        training.train(list(tuning.values()))
        chosen = {key: training.best(one.epochs())["epoch"] for key, one in tuning.items()}
    final = {
        (key, seed): data.job(key[0], fields, chosen[key], seed, folders["test"], run)
        for seed in seeds
        for key, fields in sizes.items()
    }
    training.train(list(final.values()))
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


def measure_sizes(data: DataSet, source: pathlib.Path, run: pathlib.Path, quick: bool) -> dict[str, Any]:
    """Returns the fields of the JSON file of --sizes."""
    seeds = data.size_seeds[: len(WHOLE.seeds)]
    given: dict[str, Any] = WHOLE._asdict() | {"settings": settings_of(WHOLE)[0], "seeds": seeds, "count": 4}
    if quick:
        given |= {"epochs": 1, "patience": 0, "seeds": QUICK.seeds, "count": 2}
    entries = sizes_of(data, data.prepared(source, run), run, given.pop("settings"), **given)
    harness.print_table("test split, means over seeds", entries)
    return {"data": data.name, "tasks": list(data.tasks), "seeds": given["seeds"], "sizes": entries}


def show(fields: Mapping[str, Any]) -> None:
    for name, one in fields["models"].items():
        epochs = f", {one['epochs']} epochs" if "epochs" in one else ""
        print(f"{name}: {one['setting']}{epochs}, validation score {one['score']:.4f}")
    rows = []
    for prefix, task in zip(("", "second_"), fields["tasks"]):
        for metric in summary.METRICS:
            row: dict[str, Any] = {"metric": f"{task} {metric}"}
            row |= {name: fields[f"{prefix}{metric}_{name}"] for name in fields["models"]}
            row["best baseline"] = fields[f"{prefix}{metric}_best_baseline"]
            ends = ("difference", "difference_low", "difference_high")
            row |= {end: fields[f"{prefix}{metric}_{end}"] for end in ends}
            rows.append(row)
    harness.print_table(f"test split, means of {len(fields['seeds'])} seeds; difference: grm - best baseline", rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, "one setting, two epochs, one seed")
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="DIR", help="MovieLens-1M or KuaiRand")
    parser.add_argument("--sizes", action="store_true", help="GAUC by forward FLOPs of GRM and DLRM instead")
    parser.add_argument("--settings", type=int, metavar="N", choices=range(1, WHOLE.settings + 1),
                        help="settings of GRID that each model tries")  # fmt: skip
    parser.add_argument("--run", type=pathlib.Path, default="runs/ranking", help="folder of the jobs")
    arguments = parser.parse_args(argv)
    if arguments.sizes and arguments.settings:
        parser.error("--settings is of no use with --sizes, whose models train by the first setting. Leave it out.")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    data = data_set_of(arguments.data)
    source, run = arguments.data.resolve(), arguments.run.resolve()
    budget = QUICK if arguments.quick else WHOLE
    if arguments.sizes:
        fields = measure_sizes(data, source, run, arguments.quick)
    else:
        fields = measure(data, source, run, budget._replace(settings=arguments.settings or budget.settings))
        show(fields)
    harness.write_json(arguments.json, {"benchmark": "ranking_sizes" if arguments.sizes else "ranking", **fields})


if __name__ == "__main__":
    processes.program(main)
