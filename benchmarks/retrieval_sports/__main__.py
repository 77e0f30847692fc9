"""Question: how well do SASRec, HSTU and FuXi-alpha find the next article on Amazon Sports, tuned by one budget?

    python -m benchmarks.retrieval_sports [--data DIR] [--run DIR] [--settings N] [--quick] [--json FILE]

DIR holds interactions.csv.gz: user_id, item_id, timestamp. A user's last interaction in the order of the file is test,
the one before validation. Timestamps have the resolution of a day, so the order of the file decides.

Each model is trained with the first N settings of GRID (all by default) on all items before validation, until the
validation NDCG@10 of the first 12,000 users stops improving. The best score chooses setting and number of epochs. The
model is then trained anew, with another seed, for so many epochs, and ranks the items of the test split that the user
has not seen. It is trained twice: `test` is of the model that has not trained on the validation items, as is usual, and
`test_all_items` of the model that has. Both see them in the history. HSTU and FuXi-alpha also see the times of the
items, and the time of the item to predict.

`grid` has all settings, and `settings` is the number of tried ones. `models` has the choices, all scores and both
results by model; hr_at_10_<model> and ndcg_at_10_<model> repeat `test`. Every training is a job with a folder below
--run, whose name holds a hash of its configuration. The same command keeps finished jobs, so it may be stopped at any
time; `missing` names the others. --json is written after each round of jobs, which has a job of each model.
--quick tries one setting for two epochs of the first users.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import harness, processes, training
from benchmarks.harness.training import Job
from benchmarks.schedule_quality.splits import first_users, validation_of
from models.experiment import load
from models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/amazon_sports/sasrec_sports.yaml"
LOG = "interactions.csv.gz"
MODELS = {"sasrec": "sasrec", "hstu": "hstu", "fuxi": "fuxi_alpha"}  # model.encoder of each
# Each setting differs from the one of the configuration in the fields that it names.
GRID: tuple[dict[str, float], ...] = (
    {},
    {"model.dropout": 0.2},
    {"model.temperature": 0.05},
    {"model.temperature": 0.2},
    {"model.num_blocks": 2},
)
PARTS = {"test": "validation", "test_all_items": "test"}  # results by the data set whose part `train` is trained on
DECIDING = ("ndcg@10",)
VALIDATION_USERS = 12_000  # the first ones; a third of all, as an evaluation costs as much as an epoch
QUICK_USERS = 300
# Recall@10 and NDCG@10 of blondered/transformer_benchmark, from the same interactions.
PUBLISHED = {"sasrec": (0.0569, 0.0314), "hstu": (0.0437, 0.0243), "fuxi": (0.0437, 0.0244)}
PROTOCOL = (
    "Items in the order of the file, in which items of a day keep the order of the source; a user's last item is test, "
    "the one before validation (of the first 12,000 users); all items that the user has not seen are ranked. The model "
    "of `test` has not trained on the validation items, the model of `test_all_items` has."
)


class Budget(NamedTuple):
    """Limits of each model's search and training."""

    settings: int = len(GRID)  # the first of GRID
    epochs: int = 60
    patience: int = 4
    seed: int = 1  # of the final trainings; tuning has 0


class Run(NamedTuple):
    """The jobs of a run."""

    folders: Mapping[str, pathlib.Path]  # data sets, see `prepared`
    place: pathlib.Path  # folder of the jobs
    budget: Budget

    @property
    def settings(self) -> tuple[dict[str, float], ...]:
        return GRID[: self.budget.settings]

    def tuning(self, model: str, setting: Mapping[str, float]) -> Job:
        return self._job(model, setting, self.budget.epochs, 0, "validation", "sample", self.budget.patience)

    def final(self, model: str, part: str) -> Job | None:
        """Returns the job of a result in PARTS, or None if the model is not tuned yet."""
        tried = [(setting, [self.tuning(model, setting)]) for setting in self.settings]
        if not all(job.finished for _, (job,) in tried):
            return None
        chosen = training.choice(tried)
        return self._job(model, chosen["setting"], chosen["epochs"], self.budget.seed, PARTS[part], "test", 0)

    def _job(
        self, model: str, setting: Mapping[str, float], epochs: int, seed: int, trained: str, held_out: str,
        patience: int,
    ) -> Job:  # fmt: skip
        fields = [f"{name}={value}" for name, value in setting.items()]
        experiment = load(CONFIG, [f"model.encoder={MODELS[model]}", *fields, f"train.epochs={epochs}", f"seed={seed}"])
        return training.job_of(
            model, experiment, self.folders[trained], self.place, deciding=DECIDING, held_out=self.folders[held_out],
            patience=patience,
        )  # fmt: skip


def train(run: Run, path: pathlib.Path | None) -> dict[str, Any]:
    """Trains the unfinished jobs in rounds, a setting of all models in each. Returns the fields of the JSON file."""
    for setting in run.settings:
        training.train([run.tuning(model, setting) for model in MODELS])
        harness.write_json(path, summary(run))
    for part in PARTS:
        training.train([job for model in MODELS if (job := run.final(model, part)) is not None])
        harness.write_json(path, summary(run))
    return summary(run)


def summary(run: Run) -> dict[str, Any]:
    """Returns the fields of the JSON file, of the finished jobs."""
    models: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    missing: list[str] = []
    for model in MODELS:
        tried = [(setting, run.tuning(model, setting)) for setting in run.settings]
        missing += [f"{model} {setting}" for setting, job in tried if not job.finished]
        if done := [(setting, [job]) for setting, job in tried if job.finished]:
            models[model] = training.choice(done)
        for part in PARTS:
            final = run.final(model, part)
            if final is None or not final.finished:
                missing.append(f"{model} {part}")
                continue
            last = final.epochs()[-1]
            models[model][part] = last["held_out"]
            models[model]["processor_seconds_per_epoch"] = last["processor_seconds"]
            for name in ("hr@10", "ndcg@10") if part == "test" else ():
                field = name.replace("@", "_at_")
                flat[f"{field}_{model}"] = last["held_out"][name]
                flat[f"{field}_popularity"] = last["held_out"][f"baseline_{name}"]
    return {
        "cores_used": len(os.sched_getaffinity(0)),
        "data": "amazon_sports", **run.budget._asdict(), "grid": list(GRID), **flat,
        "missing": missing, "models": models, "protocol": PROTOCOL,
        "published": {model: dict(zip(("hr_at_10", "ndcg_at_10"), figures)) for model, figures in PUBLISHED.items()},
    }  # fmt: skip


def prepared(source: pathlib.Path, run: pathlib.Path, users: int | None) -> dict[str, pathlib.Path]:
    """Returns the data sets below `run`, of the first users unless `users` is None.

    The part `test` of "test" has the last items, of "validation" the items before. "sample" is "validation" with the
    first VALIDATION_USERS.
    """
    if not (source / LOG).is_file():
        raise harness.CheckFailed(f"--data {source} has no {LOG}. Name the folder of Amazon Sports.")
    whole = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(source / LOG))}"]), run / "data")
    if users is not None:
        whole = first_users(whole, run / "data" / f"{whole.name}_users{users}", users)
    validation = validation_of(whole, run / "data" / f"{whole.name}_validation")
    sample = first_users(validation, validation.with_name(f"{validation.name}_sample"), VALIDATION_USERS)
    return {"validation": validation, "sample": sample, "test": whole}


def show(fields: Mapping[str, Any]) -> None:
    rows = []
    for name, one in fields["models"].items():
        row = {"model": name, "setting": one["setting"] or "as configured", "epochs": one["epochs"]}
        row |= {"validation NDCG@10": one["score"]}
        row |= {
            f"{part} {metric}": one[part][metric] if part in one else ""
            for part in PARTS
            for metric in ("hr@10", "ndcg@10")
        }
        rows.append(row)
    harness.print_table(fields["protocol"], rows)
    print("  missing: " + ("; ".join(fields["missing"]) or "nothing"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, f"one setting, two epochs, the first {QUICK_USERS} users")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/amazon_sports")
    parser.add_argument("--settings", type=int, metavar="N", choices=range(1, len(GRID) + 1),
                        help="settings of GRID that each model tries")  # fmt: skip
    parser.add_argument("--run", type=pathlib.Path, default="runs/retrieval_sports", help="folder of the jobs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    budget = Budget(settings=1, epochs=2, patience=1) if arguments.quick else Budget()
    budget = budget._replace(settings=arguments.settings or budget.settings)
    place = arguments.run.resolve()
    folders = prepared(arguments.data.resolve(), place, QUICK_USERS if arguments.quick else None)
    show(train(Run(folders, place, budget), arguments.json))


if __name__ == "__main__":
    processes.program(main)
