"""Question: how good are models beside each other, each tuned on a validation split by one budget?

    python -m benchmarks.quality --data DIR [--settings N | --sizes | --tables] [--quick] [--json FILE] [--run DIR]

DIR holds one of these:
  MovieLens-1M   click := rating >= 4, second task: rating = 5; three parts by time, for all users alike
  KuaiRand       click, long view; the last fifth of every user's impressions is test, the last fifth of the others
                 validation
  Amazon Sports  the next article; a user's last interaction in the order of the file is test, the one before validation
GRM, DLRM, DIN, DCN-V2 and rates rank the first two. SASRec, HSTU and FuXi-alpha retrieve among all articles that a user
has not seen, and have not trained on the validation items.

All models read the same columns. Each model trains with the first N settings of the grid (all by default). The
validation split evaluates it after every epoch, until the patience ends. The highest mean of the deciding
metrics chooses the setting and the number of epochs; the rates choose among as many priors. On KuaiRand the score is
the mean of three seeds, because its scores differ as much between seeds as between settings. Then each seed trains the
model anew for so many epochs, for ranking on all data before the test split. The test split is evaluated once.

A field is a metric of a model, the mean over seeds: gauc_<model>, auc_<model> and the same of the second task after
"second_", or hr_at_10_<model>, ndcg_at_10_<model>. gauc_difference is GRM minus the best other model of the test split.
gauc_difference_low to _high is the 95 % interval of a paired bootstrap over users; auc_difference is the same. `models`
has all scores, choices and metrics, `differences` the interval of GRM minus each model.

The same command keeps finished jobs (harness/training.py). --quick tries one setting for two epochs, with one seed.

--sizes measures GAUC by forward FLOPs instead, of GRM and DLRM in four sizes each (MTGRBoost, figure 2). They train by
the first setting, and the validation split chooses the epochs of each. On MovieLens-1M one seed trains, because the
largest GRM takes half an hour. `sizes` has an entry for each. With --quick, two sizes of each train two epochs.

--tables compares GRM over the native hash table with GRM over TFRA's variable (FusedEmbedding's backend). It reports
AUC and GAUC of both tasks on the test split, four times per epoch (MTGRBoost, figure 11). Both trainings see equal
initial weights and batches, so the first point must agree. Later points differ by rounding, whose scale a third
training shows: the native table with another seed. `curves` has the points by table and seed. gauc_difference is the
largest difference of the click task's GAUC between the tables at any point, gauc_difference_seeds that of the two
seeds. --quick trains one epoch, without the second seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, training
from tf_fusedrec import keras
from tf_fusedrec.models import baselines
from tf_fusedrec.models.build import features
from tf_fusedrec.models.compare import metrics_of
from tf_fusedrec.models.data_sets.kuairand import LOGS, USER_FEATURES, convert_kuairand
from tf_fusedrec.models.data_sets.movielens import RATINGS
from tf_fusedrec.models.evaluate import evaluator
from tf_fusedrec.models.experiment import Experiment, from_dict, load
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.fit_calls import fit_calls
from tf_fusedrec.models.prepare import prepare_data

KUAIRAND_HELD_OUT = 0.2  # share of a user's impressions in the test split, and of the others in the validation split
SPORTS_USERS, QUICK_SPORTS_USERS = 12_000, 300  # the first ones, of validation, which costs as much as an epoch; of all
Folders = Mapping[str, tuple[pathlib.Path, pathlib.Path]]


class Budget(NamedTuple):
    """Limits of each model's search and training."""

    settings: int  # the first of the grid
    epochs: int
    patience: int
    tuning_seeds: tuple[int, ...]  # a small split needs the mean of several
    seeds: tuple[int, ...]  # of the final trainings

    def quick(self) -> Budget:
        return Budget(1, 2, 1, self.tuning_seeds[:1], self.seeds[:1])


class DataSet(NamedTuple):
    name: str
    files: tuple[str, ...]  # a folder with one of them is of this kind
    configs: Mapping[str, tuple[str, ...]]  # a file of configs/ and settings, by model
    metrics: Mapping[str, str]  # fields of the result by metric
    deciding: tuple[str, ...]  # the metrics whose mean chooses settings and epochs
    grid: tuple[training.Setting, ...]  # settings that each model tries
    budget: Budget
    split: Callable[[DataSet, str, pathlib.Path, bool], Folders]
    tasks: tuple[str, ...] = ()  # of ranking, the click task first
    published: Mapping[str, tuple[float, ...]] = {}  # metrics of others by model

    def experiment(self, model: str, overrides: Sequence[str] = ()) -> Experiment:
        file, *settings = self.configs[model]
        return load(harness.ROOT / "configs" / file, [*settings, *overrides])

    def prepared(self, source: pathlib.Path, run: pathlib.Path, quick: bool = False) -> Folders:
        """Returns two folders below `run` for the splits "validation" and "test".

        The part `train` of the first is trained on. The part `test` of the second is the held-out one.
        """
        return self.split(self, str(source), run / "data", quick)


def data_set_of(source: pathlib.Path) -> DataSet:
    for one in DATA_SETS:
        if any((source / name).is_file() for name in one.files):
            return one
    wanted = "; ".join(f"{one.name}: {' or '.join(one.files)}" for one in DATA_SETS)
    raise SystemExit(f"error: --data {source} has no file of a known data set. Name a folder with one ({wanted}).")


def _by_time(data: DataSet, source: str, root: pathlib.Path, quick: bool) -> Folders:
    """Splits at two moments for all users. The validation data end where the test period begins."""
    given = f"data.input={json.dumps(source)}"
    splits = {name: data.experiment("grm", [given, f"data.held_out={name}"]) for name in ("validation", "test")}
    return {name: (prepare_data(experiment, root),) * 2 for name, experiment in splits.items()}


def _by_user(data: DataSet, source: str, root: pathlib.Path, quick: bool) -> Folders:
    """Holds out the last impressions of each user for test, and the last of the others for validation."""
    experiment = data.experiment("grm", [f"data.input={json.dumps(source)}"])
    test = prepare_data(experiment, root)
    validation = test.with_name(f"{test.name}_validation")
    if not validation.exists():
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            earlier = pathlib.Path(temporary) / "earlier"
            earlier_log(pathlib.Path(experiment.data.input), earlier)
            convert_kuairand(earlier, validation, test_fraction=KUAIRAND_HELD_OUT, split="user")
    return {"validation": (validation,) * 2, "test": (test,) * 2}


def _by_item(data: DataSet, source: str, root: pathlib.Path, quick: bool) -> Folders:
    """Holds out the last item of each user for test and the one before for validation. Neither is trained on."""
    given = [f"data.input={json.dumps(f'{source}/{data.files[0]}')}"]
    whole = prepare_data(data.experiment("sasrec", given), root)
    splits = training.held_out(whole, root, QUICK_SPORTS_USERS if quick else None)
    sample = root / f"{splits['validation'].name}_sample"
    sample = training.cut(splits["validation"], sample, users=SPORTS_USERS)
    return {"validation": (splits["validation"], sample), "test": (splits["validation"], splits["test"])}


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


def _ranking(
    name: str, files: tuple[str, ...], tasks: tuple[str, str], tuning_seeds: tuple[int, ...],
    split: Callable[[DataSet, str, pathlib.Path, bool], Folders],
) -> DataSet:  # fmt: skip
    """Fields of the click task have no prefix, those of the other begin with "second_"."""
    grid = {
        "model.history_dropout": (0.5, 0.0), "embedding.learning_rate": (0.002, 0.001), "model.dropout": (0.1, 0.3)
    }  # fmt: skip
    metrics = {
        f"{task}_{metric}": f"{prefix}{metric}"
        for prefix, task in zip(("", "second_"), tasks) for metric in ("gauc", "auc")
    }  # fmt: skip
    configs = {model: (f"{model}_{name}.yaml",) for model in ("grm", "dlrm", "din", "dcn")}
    settings = tuple(dict(zip(grid, values)) for values in itertools.product(*grid.values()))
    budget = Budget(8, 5, 1, tuning_seeds, (0, 1, 2))
    return DataSet(name, files, configs, metrics, tuple(metrics), settings, budget, split, tasks)


SPORTS = "amazon_sports/sasrec_sports.yaml"
DATA_SETS = (
    _ranking("kuairand", LOGS, ("ctr", "long_view"), (0, 1, 2), _by_user),
    _ranking("ml1m_ranking", RATINGS, ("ctr", "ctcvr"), (0,), _by_time),
    DataSet(
        "amazon_sports", ("interactions.csv.gz",),
        {model: (SPORTS, f"model.encoder={encoder}") for model, encoder in (
            ("sasrec", "sasrec"), ("hstu", "hstu"), ("fuxi", "fuxi_alpha")
        )},
        {"hr@10": "hr_at_10", "ndcg@10": "ndcg_at_10"}, ("ndcg@10",),
        ({}, {"model.dropout": 0.2}, {"model.temperature": 0.05}, {"model.temperature": 0.2}, {"model.num_blocks": 2}),
        Budget(5, 60, 4, (0,), (1,)), _by_item,
        # Recall@10 and NDCG@10 of blondered/transformer_benchmark, from the same interactions.
        published={"sasrec": (0.0569, 0.0314), "hstu": (0.0437, 0.0243), "fuxi": (0.0437, 0.0244)},
    ),
)  # fmt: skip


PRIORS = (10.0, 3.0, 30.0, 100.0, 1.0, 5.0, 20.0, 50.0)  # exposures by which the mean rate weighs
GRM = "grm"


class Run(NamedTuple):
    """The jobs of a run. A model is its name, or its name and size."""

    data: DataSet
    folders: Folders
    place: pathlib.Path
    budget: Budget

    def tuned(self, candidates: Mapping[Any, Sequence[training.Setting]]) -> dict[Any, dict[str, Any]]:
        """Trains every candidate setting of each model. Returns the choice of each on the validation split."""
        budget = self.budget
        tried = {
            model: [
                (setting, [self.job(model, setting, budget.epochs, seed, "validation", budget.patience)
                           for seed in budget.tuning_seeds])
                for setting in settings
            ]
            for model, settings in candidates.items()
        }  # fmt: skip
        training.train(one for settings in tried.values() for _, jobs in settings for one in jobs)
        return {model: training.choice(settings) for model, settings in tried.items()}

    def retrained(self, chosen: Mapping[Any, Mapping[str, Any]]) -> dict[Any, list[training.Job]]:
        """Trains each model anew by its choice. Returns its jobs by seed, which evaluate the test split."""
        jobs = {
            model: [self.job(model, one["setting"], one["epochs"], seed, "test", 0) for seed in self.budget.seeds]
            for model, one in chosen.items()
        }
        training.train(one for of_model in jobs.values() for one in of_model)
        return jobs

    def job(
        self, model: Any, setting: training.Setting, epochs: int, seed: int, split: str, patience: int
    ) -> training.Job:  # fmt: skip
        name = model if isinstance(model, str) else model[0]
        fields = [f"{field}={value}" for field, value in setting.items()]
        experiment = self.data.experiment(name, [*fields, f"train.epochs={epochs}", f"seed={seed}"])
        trained_on, held_out = self.folders[split]
        return training.job_of(
            name, experiment, self.place, trained_on, {split: held_out}, deciding=self.data.deciding, patience=patience
        )  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    data, budget = run.data, run.budget
    models = run.tuned(dict.fromkeys(data.configs, data.grid[: budget.settings]))
    final = run.retrained(models)
    for model, jobs in final.items():
        ended = [job.epochs()[-1] for job in jobs]
        models[model]["test"] = training.means([entry["test"] for entry in ended])
        models[model]["processor_seconds_per_epoch"] = ended[0]["processor_seconds"]
    fields = {"data": data.name, "tasks": list(data.tasks), **budget._asdict(), "models": models}
    if data.tasks:
        samples = {model: [job.samples() for job in jobs] for model, jobs in final.items()}
        models["rates"] = tuned_rates(data, run.folders["validation"][1], PRIORS[: budget.settings])
        samples["rates"] = [rates_samples(data, run.folders["test"][1], models["rates"]["setting"]["prior"])]
        models["rates"]["test"] = results_of(samples["rates"][0])
        fields |= differences(data, models, samples)
    else:
        test = next(iter(models.values()))["test"]
        fields |= {f"{field}_popularity": test[f"baseline_{metric}"] for metric, field in data.metrics.items()}
        fields["published"] = {model: dict(zip(data.metrics.values(), x)) for model, x in data.published.items()}
    for metric, field in data.metrics.items():
        fields |= {f"{field}_{model}": one["test"][metric] for model, one in models.items()}
    return fields


def differences(
    data: DataSet, models: Mapping[str, Mapping[str, Any]], samples: Mapping[str, Sequence[training.Samples]]
) -> dict[str, Any]:
    """Returns `differences`, and those of GRM from the best baseline by metric."""
    between = {
        model: training.differences(of_model, samples[GRM], list(data.metrics))
        for model, of_model in samples.items()
        if model != GRM
    }
    fields: dict[str, Any] = {"differences": between}
    for metric, field in data.metrics.items():
        best = fields[f"{field}_best_baseline"] = max(between, key=lambda model: models[model]["test"][metric])
        row = between[best][metric]
        fields |= {f"{field}_difference": row["difference"], f"{field}_difference_low": row["low"],
                   f"{field}_difference_high": row["high"]}  # fmt: skip
    return fields


def rates_samples(data: DataSet, folder: pathlib.Path, prior: float) -> dict[str, np.ndarray]:
    """Returns samples of the part `test`, scored by smoothed label rates, in the order of compare.read_samples."""
    config = data.experiment(GRM).model
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
    data, setting = run.data, run.data.grid[0]
    chosen = run.tuned(
        {(model, at): [{**setting, **fields}] for model in SIZES for at, fields in enumerate(SIZES[model][:count])}
    )
    entries = []
    for (model, at), jobs in run.retrained(chosen).items():
        ended = [job.epochs()[-1] for job in jobs]
        means = training.means([entry["test"] for entry in ended])
        entry = {"model": model, "size": at + 1, "epochs": ended[0]["epoch"]}
        entry["forward_mflops"] = ended[0]["forward_mflops"]
        entry |= {field: means[metric] for metric, field in data.metrics.items()}
        entries.append({**entry, "gauc_seeds": [one["test"][f"{data.tasks[0]}_gauc"] for one in ended]})
    return {"data": data.name, "tasks": list(data.tasks), "seeds": run.budget.seeds, "sizes": entries}


# --tables

POINTS_PER_EPOCH = 4
EQUAL = 1e-5  # relative, of metrics before the first step


class Curve(keras.callbacks.Callback):
    """Evaluates the model before the first step, and after every `every` steps."""

    def __init__(self, evaluate: Callable[[], Mapping[str, float]], every: int):
        super().__init__()
        self._evaluate, self._every, self._steps = evaluate, every, 0
        self.points: list[dict[str, float]] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.points.append({"step": 0, **self._evaluate()})

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.points.append({"step": self._steps, **self._evaluate()})


def train_curve(experiment: Mapping[str, Any], backend: str, data: str) -> list[dict[str, float]]:
    """Trains the experiment, whose rule is adam. Returns the points: step, and the held-out metrics by name."""
    config, source = from_dict(experiment), pathlib.Path(data)

    def layer(config: Experiment) -> fr.FusedEmbedding:
        """Lets Keras' Adam train the rows, which both backends take."""
        tables = []
        for table in config.tables:
            rule = table.optimizer
            adam = keras.optimizers.legacy.Adam(rule.learning_rate, rule.beta_1, rule.beta_2, rule.epsilon)
            tables.append(dataclasses.replace(table, optimizer=adam))
        return fr.FusedEmbedding(
            features(config.model), tables, seed=config.seed, backend=backend, key_encoding="hash"
        )  # fmt: skip

    model = training.compiled(config, source, layer)
    evaluate = evaluator(config, model)
    (call,) = fit_calls(config, source, None)
    curve = Curve(lambda: evaluate(source).results, max(1, call.steps // POINTS_PER_EPOCH))
    training.fit(model, call, [curve])
    return curve.points


class Variant(NamedTuple):
    backend: str
    seed: int


NATIVE, TFRA, OTHER_SEED = Variant("native", 0), Variant("tfra", 0), Variant("native", 1)


def measure_tables(data: DataSet, folder: pathlib.Path, epochs: int, variants: Sequence[Variant]) -> dict[str, Any]:
    points: dict[Variant, list[dict[str, float]]] = {}
    for variant in variants:  # each in a process of its own
        experiment = data.experiment(GRM, [f"train.epochs={epochs}", f"seed={variant.seed}"]).to_dict()
        points[variant] = processes.ask(
            train_curve, variables={"TF_USE_LEGACY_KERAS": "1"}, experiment=experiment, backend=variant.backend,
            data=str(folder),
        )  # fmt: skip

    def largest(other: Variant, metric: str) -> float:
        """Returns the largest difference from NATIVE at equal steps, except the point before the first step."""
        both = [points[NATIVE][1:], points[other][1:]]
        harness.check_equal("steps of the points", *([point["step"] for point in curve] for curve in both))
        return max(abs(a[metric] - b[metric]) for a, b in zip(*both))

    fields: dict[str, Any] = {"data": data.name, "tasks": list(data.tasks), "epochs": epochs}
    fields["steps"] = points[NATIVE][-1]["step"]
    for metric, field in data.metrics.items():
        reason = "rows and weights are equal, and few users of nearly equal scores change places by rounding"
        first = [points[variant][0][metric] for variant in (TFRA, NATIVE)]
        harness.check_close(f"{metric} before the first step", *first, relative=EQUAL, reason=reason)
        fields[field] = {variant.backend: points[variant][-1][metric] for variant in (NATIVE, TFRA)}
        fields[f"{field}_difference"] = largest(TFRA, metric)
        if OTHER_SEED in points:
            fields[f"{field}_difference_seeds"] = largest(OTHER_SEED, metric)
    fields["curves"] = [
        {**variant._asdict(), "points": [{name: point[name] for name in ("step", *data.metrics)} for point in curve]}
        for variant, curve in points.items()
    ]
    return fields


def show(fields: Mapping[str, Any], data: DataSet) -> None:
    rows = [
        {"model": name, "validation score": one["score"], "epochs": one.get("epochs", ""), "setting": one["setting"],
         **{metric: one["test"][metric] for metric in data.metrics}}
        for name, one in fields["models"].items()
    ]  # fmt: skip
    harness.print_table(f"test split, means of {len(fields['seeds'])} seeds", rows)
    harness.print_fields(f"fields; intervals of {training.LEVEL:.0%}", fields)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "one setting, two epochs, one seed")
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="DIR", help="folder of a data set")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--sizes", action="store_true", help="GAUC by forward FLOPs of GRM and DLRM instead")
    form.add_argument("--tables", action="store_true", help="GRM over native tables and over TFRA's instead")
    form.add_argument("--settings", type=int, metavar="N", help="settings of the grid that each model tries")
    parser.add_argument("--run", type=pathlib.Path, default="runs/quality", help="folder of the jobs")
    arguments = parser.parse_args(argv)
    data, place, quick = data_set_of(arguments.data), arguments.run.resolve(), arguments.quick
    if arguments.settings and not 1 <= arguments.settings <= len(data.grid):
        parser.error(f"--settings must be from 1 to {len(data.grid)} for {data.name}, got {arguments.settings}.")
    if (arguments.sizes or arguments.tables) and not data.tasks:
        parser.error(f"--sizes and --tables need data for ranking, got {data.name}. Use KuaiRand or MovieLens-1M.")
    budget = data.budget.quick() if quick else data.budget
    folders = data.prepared(arguments.data.resolve(), place, quick)
    if arguments.tables:
        variants = (NATIVE, TFRA) if quick else (NATIVE, TFRA, OTHER_SEED)
        fields = measure_tables(data, folders["test"][0], 1 if quick else 3, variants)
        harness.print_fields("largest differences between the tables, and between seeds", fields)
    elif arguments.sizes:
        budget = budget._replace(settings=1, seeds=budget.tuning_seeds)
        fields = measure_sizes(Run(data, folders, place, budget), count=2 if quick else 4)
        harness.print_table("test split, means over seeds", fields["sizes"])
    else:
        budget = budget._replace(settings=arguments.settings or budget.settings)
        fields = measure(Run(data, folders, place, budget))
        show(fields, data)
    harness.write_json(arguments.json, {"benchmark": "quality", **fields})


if __name__ == "__main__":
    processes.program(main)
