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

`settings` is the number of tried settings. `models` has the choices, all scores and both results by model;
hr_at_10_<model> and ndcg_at_10_<model> repeat `test`. The same command keeps finished jobs (harness/training.py).
--quick tries one setting for two epochs of the first users.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import harness, processes, training
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
METRICS = ("hr@10", "ndcg@10")
VALIDATION_USERS = 12_000  # the first ones; a third of all, as an evaluation costs as much as an epoch
QUICK_USERS = 300
# Recall@10 and NDCG@10 of blondered/transformer_benchmark, from the same interactions.
PUBLISHED = {"sasrec": (0.0569, 0.0314), "hstu": (0.0437, 0.0243), "fuxi": (0.0437, 0.0244)}


class Budget(NamedTuple):
    """Limits of each model's search and training."""

    settings: int = len(GRID)  # the first of GRID
    epochs: int = 60
    patience: int = 4
    seed: int = 1  # of the final trainings; tuning has 0


def measure(folders: Mapping[str, pathlib.Path], run: pathlib.Path, budget: Budget) -> dict[str, Any]:
    """Returns the fields of the JSON file. `folders`: see `prepared`."""

    def job(
        model: str, setting: training.Setting, epochs: int, seed: int, data: str, splits: dict[str, str], patience: int
    ) -> training.Job:  # fmt: skip
        fields = [f"{name}={value}" for name, value in setting.items()]
        experiment = load(CONFIG, [f"model.encoder={MODELS[model]}", *fields, f"train.epochs={epochs}", f"seed={seed}"])
        held_out = {split: folders[name] for split, name in splits.items()}
        return training.job_of(
            model, experiment, run, folders[data], held_out, deciding=["ndcg@10"], patience=patience
        )  # fmt: skip

    def tuning(model: str, setting: training.Setting, seed: int) -> training.Job:
        return job(model, setting, budget.epochs, seed, "validation", {"validation": "sample"}, budget.patience)

    def final(model: str, part: str, setting: training.Setting, epochs: int) -> training.Job:
        return job(model, setting, epochs, budget.seed, PARTS[part], {"test": "test"}, 0)

    models = training.tuned(dict.fromkeys(MODELS, GRID[: budget.settings]), tuning, [0])
    flat: dict[str, float] = {}
    for model, jobs in training.retrained(models, list(PARTS), final).items():
        ended = [one.epochs()[-1] for one in jobs]
        models[model] |= {part: entry["test"] for part, entry in zip(PARTS, ended)}
        models[model]["processor_seconds_per_epoch"] = ended[0]["processor_seconds"]
        for metric in METRICS:
            field = metric.replace("@", "_at_")
            flat[f"{field}_{model}"] = ended[0]["test"][metric]
            flat[f"{field}_popularity"] = ended[0]["test"][f"baseline_{metric}"]
    published = {model: dict(zip(("hr_at_10", "ndcg_at_10"), figures)) for model, figures in PUBLISHED.items()}
    return {"data": "amazon_sports", **budget._asdict(), **flat, "models": models, "published": published}


def prepared(source: pathlib.Path, run: pathlib.Path, users: int | None) -> dict[str, pathlib.Path]:
    """Returns the data sets below `run`, of the first users unless `users` is None.

    The part `test` of "test" has the last items, of "validation" the items before. "sample" is "validation" with the
    first VALIDATION_USERS.
    """
    if not (source / LOG).is_file():
        raise harness.CheckFailed(f"--data {source} has no {LOG}. Name the folder of Amazon Sports.")
    whole = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(source / LOG))}"]), run / "data")
    if users is not None:
        whole = training.cut(whole, run / "data" / f"{whole.name}_users{users}", users=users)
    validation = training.cut(whole, run / "data" / f"{whole.name}_validation", last=False)
    sample = training.cut(validation, run / "data" / f"{validation.name}_sample", users=VALIDATION_USERS)
    return {"validation": validation, "sample": sample, "test": whole}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, f"one setting, two epochs, the first {QUICK_USERS} users")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/amazon_sports")
    parser.add_argument("--settings", type=int, metavar="N", choices=range(1, len(GRID) + 1),
                        help="settings of GRID that each model tries")  # fmt: skip
    parser.add_argument("--run", type=pathlib.Path, default="runs/retrieval_sports", help="folder of the jobs")
    arguments = parser.parse_args(argv)
    budget = Budget(settings=1, epochs=2, patience=1) if arguments.quick else Budget()
    budget = budget._replace(settings=arguments.settings or budget.settings)
    run = arguments.run.resolve()
    folders = prepared(arguments.data.resolve(), run, QUICK_USERS if arguments.quick else None)
    fields = measure(folders, run, budget)
    rows = [
        {"model": model, "setting": one["setting"] or "as configured", "epochs": one["epochs"],
         "validation NDCG@10": one["score"],
         **{f"{part} {metric}": one[part][metric] for part in PARTS for metric in METRICS}}
        for model, one in fields["models"].items()
    ]  # fmt: skip
    harness.print_table("Amazon Sports, all items that a user has not seen are ranked", rows)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
