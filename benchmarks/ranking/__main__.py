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

The same command keeps finished jobs (harness/training.py). --quick tries one setting for two epochs, with one seed.

--sizes measures GAUC by forward FLOPs instead, of GRM and DLRM in four sizes each (MTGRBoost, figure 2). They train by
the first setting of GRID, and the validation split chooses the epochs of each. On MovieLens-1M one seed trains, because
the largest GRM takes half an hour. `sizes` has an entry for each, with the fields of measure_sizes.
benchmarks.plots draws it. With --quick, two sizes of each train two epochs.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness, processes, training
from benchmarks.ranking.data_sets import MODELS, DataSet, data_set_of
from models import baselines
from models.compare import metrics_of
from models.experiment.ranking_config import RankingConfig

GRID = {
    "model.history_dropout": (0.5, 0.0),
    "embedding.learning_rate": (0.002, 0.001),
    "model.dropout": (0.1, 0.3),
}
PRIORS = (10.0, 3.0, 30.0, 100.0, 1.0, 5.0, 20.0, 50.0)  # exposures by which the mean rate weighs
METRICS = ("gauc", "auc")
OURS = "grm"


class Budget(NamedTuple):
    """Limits of each model's search and training."""

    settings: int = 8  # the first of GRID and of PRIORS
    epochs: int = 5
    patience: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)


WHOLE, QUICK = Budget(), Budget(settings=1, epochs=2, seeds=(0,))


def settings_of(budget: Budget) -> list[dict[str, float]]:
    return [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())][: budget.settings]


class Run(NamedTuple):
    """The jobs of a run. A model is its name, or its name and size."""

    data: DataSet
    folders: Mapping[str, pathlib.Path]  # see DataSet.prepared
    place: pathlib.Path
    budget: Budget

    def tuned(self, candidates: Mapping[Any, Sequence[training.Setting]]) -> dict[Any, dict[str, Any]]:
        """Returns the choice of each model on the validation split."""

        def job(model: Any, setting: training.Setting, seed: int) -> training.Job:
            return self._job(model, setting, self.budget.epochs, seed, "validation", self.budget.patience)

        return training.tuned(candidates, job, self.data.tuning_seeds[: len(self.budget.seeds)])

    def retrained(self, chosen: Mapping[Any, Mapping[str, Any]]) -> dict[Any, list[training.Job]]:
        """Returns the jobs of each model by seed, trained on all data before the test split."""

        def job(model: Any, seed: int, setting: training.Setting, epochs: int) -> training.Job:
            return self._job(model, setting, epochs, seed, "test", 0)

        return training.retrained(chosen, self.budget.seeds, job)

    def _job(
        self, model: Any, setting: training.Setting, epochs: int, seed: int, split: str, patience: int
    ) -> training.Job:  # fmt: skip
        name = model if isinstance(model, str) else model[0]
        return self.data.job(name, setting, epochs, seed, split, self.folders[split], self.place, patience)


def measure(run: Run) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    data = run.data
    models = run.tuned(dict.fromkeys(MODELS, settings_of(run.budget)))
    final = run.retrained(models)
    samples = {model: [job.samples() for job in jobs] for model, jobs in final.items()}
    test = {model: [job.epochs()[-1]["test"] for job in jobs] for model, jobs in final.items()}
    for model, jobs in final.items():
        models[model]["processor_seconds_per_epoch"] = jobs[0].epochs()[-1]["processor_seconds"]
    models["rates"] = tuned_rates(data, run.folders["validation"], PRIORS[: run.budget.settings])
    samples["rates"] = [rates_samples(data, run.folders["test"], models["rates"]["setting"]["prior"])]
    test["rates"] = [results_of(samples["rates"][0])]
    names = [f"{task}_{metric}" for task in data.tasks for metric in METRICS]
    between = {
        model: training.differences(of_model, samples[OURS], names)
        for model, of_model in samples.items()
        if model != OURS
    }
    means = {model: training.means(results) for model, results in test.items()}
    return {
        "data": data.name,
        "tasks": list(data.tasks),
        **run.budget._asdict(),
        **flat(means, between, data.tasks),
        "models": {model: {**one, "test": means[model]} for model, one in models.items()},
        "differences": between,
    }


def flat(
    means: Mapping[str, Mapping[str, float]], between: Mapping[str, Mapping[str, Mapping[str, float]]],
    tasks: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Returns the headline fields. Fields of the click task have no prefix, others begin with "second_"."""
    fields: dict[str, Any] = {}
    for prefix, task in zip(("", "second_"), tasks):
        for metric in METRICS:
            name, field = f"{task}_{metric}", f"{prefix}{metric}"
            fields |= {f"{field}_{model}": results[name] for model, results in means.items()}
            best = fields[f"{field}_best_baseline"] = max(between, key=lambda model: means[model][name])
            row = between[best][name]
            fields[f"{field}_difference"] = row["difference"]
            fields |= {f"{field}_difference_{end}": row[end] for end in ("low", "high")}
    return fields


def rates_samples(data: DataSet, folder: pathlib.Path, prior: float) -> dict[str, np.ndarray]:
    """Returns samples of the part `test`, scored by smoothed label rates, in the order of compare.read_samples."""
    config = data.experiment(OURS).model
    assert isinstance(config, RankingConfig)
    shown = baselines.exposures(config, folder / "test")
    order = np.lexsort([shown.time, shown.item, shown.user])
    scores = baselines.ranking(config, folder, shown.user, shown.item, prior)
    samples = {"user": shown.user, "item": shown.item, "time": shown.time}
    for task, label in shown.labels.items():
        samples |= {f"{task}_label": label, f"{task}_logit": scores[task]}
    return {name: values[order] for name, values in samples.items()}


def results_of(samples: training.Samples) -> dict[str, float]:
    everyone = np.ones(len(np.unique(samples["user"])), np.int64)
    return {name: metric(everyone) for name, metric in metrics_of(samples).items()}


def tuned_rates(data: DataSet, folder: pathlib.Path, priors: Sequence[float]) -> dict[str, Any]:
    """Returns the best prior on the validation split `folder`, its score, and all scores."""
    results = {prior: results_of(rates_samples(data, folder, prior)) for prior in priors}
    scores = {prior: float(np.mean([one[name] for name in data.deciding])) for prior, one in results.items()}
    best = max(scores, key=lambda prior: scores[prior])
    tried = [{"prior": prior, "scores": [round(score, 4)]} for prior, score in scores.items()]
    return {"setting": {"prior": best}, "score": scores[best], "tried": tried}


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


def measure_sizes(run: Run, count: int) -> dict[str, Any]:
    """Trains the first `count` sizes of both models. Returns the fields of the JSON file of --sizes.

    `sizes` has entries with model, size (from 1), epochs, forward_mflops (of one row of a user and its exposures), and
    the test split's gauc, auc, second_gauc and second_auc, means over the seeds. gauc_seeds has the single values.
    """
    setting, tasks = settings_of(run.budget)[0], run.data.tasks
    chosen = run.tuned(
        {(model, at): [{**setting, **fields}] for model in SIZES for at, fields in enumerate(SIZES[model][:count])}
    )
    entries = []
    for (model, at), jobs in run.retrained(chosen).items():
        ended = [job.epochs()[-1] for job in jobs]
        means = training.means([entry["test"] for entry in ended])
        entry = {"model": model, "size": at + 1, "epochs": ended[0]["epoch"]}
        entry["forward_mflops"] = ended[0]["forward_mflops"]
        for prefix, task in zip(("", "second_"), tasks):
            entry |= {f"{prefix}{metric}": means[f"{task}_{metric}"] for metric in METRICS}
        entries.append({**entry, "gauc_seeds": [one["test"][f"{tasks[0]}_gauc"] for one in ended]})
    return {"data": run.data.name, "tasks": list(tasks), "seeds": run.budget.seeds, "sizes": entries}


def show(fields: Mapping[str, Any]) -> None:
    rows = [
        {"model": name, "validation score": one["score"], "epochs": one.get("epochs", ""), "setting": one["setting"],
         **{f"{task} {metric}": one["test"][f"{task}_{metric}"] for task in fields["tasks"] for metric in METRICS}}
        for name, one in fields["models"].items()
    ]  # fmt: skip
    harness.print_table(f"test split, means of {len(fields['seeds'])} seeds", rows)
    compared = {name: value for name, value in fields.items() if "_difference" in name or "_best_" in name}
    harness.print_fields(f"{OURS} - best baseline, {training.LEVEL:.0%} interval", compared)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "one setting, two epochs, one seed")
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="DIR", help="MovieLens-1M or KuaiRand")
    parser.add_argument("--sizes", action="store_true", help="GAUC by forward FLOPs of GRM and DLRM instead")
    parser.add_argument("--settings", type=int, metavar="N", choices=range(1, WHOLE.settings + 1),
                        help="settings of GRID that each model tries")  # fmt: skip
    parser.add_argument("--run", type=pathlib.Path, default="runs/ranking", help="folder of the jobs")
    arguments = parser.parse_args(argv)
    if arguments.sizes and arguments.settings:
        parser.error("--settings is of no use with --sizes, whose models train by the first setting. Leave it out.")
    data, place = data_set_of(arguments.data), arguments.run.resolve()
    budget = QUICK if arguments.quick else WHOLE
    if arguments.sizes:
        budget = budget._replace(settings=1, seeds=data.tuning_seeds[: len(budget.seeds)])
    budget = budget._replace(settings=arguments.settings or budget.settings)
    run = Run(data, data.prepared(arguments.data.resolve(), place), place, budget)
    if arguments.sizes:
        fields = measure_sizes(run, count=2 if arguments.quick else 4)
        harness.print_table("test split, means over seeds", fields["sizes"])
    else:
        fields = measure(run)
        show(fields)
    harness.write_json(arguments.json, {"benchmark": "ranking_sizes" if arguments.sizes else "ranking", **fields})


if __name__ == "__main__":
    processes.program(main)
