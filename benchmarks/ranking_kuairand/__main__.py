"""Question: how well does GRM rank beside DLRM on KuaiRand, when a validation split chooses?

    python -m benchmarks.ranking_kuairand [--data DIR] [--quick] [--json FILE]

The test split is the last fifth of every user's impressions. The validation split is the last fifth of the others.
Each model is trained once (seed 0) with every setting of GRID and evaluated on the validation split after every epoch.
The highest mean of the AUC of click and long view chooses the setting and the number of epochs. Then the model is
trained anew, with each of SEEDS, on all impressions before the test split, and evaluated on the test split once. Other
settings come from the configuration files. Some of these were chosen by test figures before this benchmark existed.

The JSON file has for each model all scores of the validation split (`tried`), the choice and its score. `test` has the
mean over seeds, the standard deviation and each seed's value of every metric of the test split. `difference` has each
seed's paired bootstrap interval of GRM - DLRM over users (models.compare). `baseline_` metrics are those of the added
log odds of users and items, which a model must beat. --quick tries one setting for two epochs, with one seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.machine import describe
from models.build import columns, extra_tokens, length_columns, make_embedding, make_model, no_rows
from models.compare import compare
from models.evaluate import Evaluation, evaluate
from models.experiment import Experiment, load
from tf_fusedrec import keras, tf
from tf_fusedrec.data import ParquetFolder, TokenBatches, read_items
from tf_fusedrec.data.kuairand import LOGS, USER_FEATURES, convert_kuairand

CONFIGS = harness.ROOT / "configs"
MODELS = ("grm", "dlrm")
HELD_OUT = 0.2  # share of each user's impressions in the test split, and of the others in the validation split
GRID = {
    "embedding.learning_rate": (0.001, 0.002),
    "model.dropout": (0.1, 0.3),
}
EPOCHS, SEEDS = 6, (0, 1, 2)
QUICK_EPOCHS, QUICK_SETTINGS, QUICK_SEEDS = 2, 1, (0,)


def earlier_log(source: pathlib.Path, output: pathlib.Path) -> None:
    """Writes the log without the last HELD_OUT of each user's impressions, and the users' features, into `output`.

    These are the training impressions of the converter's split by user, which rounds up and keeps ties in file order.
    """
    log = csv.read_csv(_first_of(source, LOGS))  # decompresses by the name
    user, time = log["user_id"].to_numpy(), log["time_ms"].to_numpy()
    order = np.lexsort([time, user])
    _, begin, counts = np.unique(user[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(begin, counts)
    kept = order[place < np.repeat(np.ceil(counts * (1 - HELD_OUT)), counts)]
    output.mkdir()
    csv.write_csv(log.take(pa.array(np.sort(kept))), output / "log.csv")
    shutil.copy(_first_of(source, USER_FEATURES), output)


def _first_of(folder: pathlib.Path, names: Sequence[str]) -> pathlib.Path:
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise SystemExit(f"error: --data {folder} has none of {list(names)}. Name the folder of KuaiRand.")
    return found[0]


def epochs_of(experiment: Experiment, folder: pathlib.Path) -> Iterator[Evaluation]:
    """Trains one epoch at a time, and yields the evaluation on the folder's test part after each."""
    keras.utils.set_random_seed(experiment.seed)
    data = ParquetFolder(folder / "train", columns(experiment.model, "train"), shuffle_seed=experiment.seed)
    batches = TokenBatches(
        data,
        length_columns=length_columns(experiment.model),
        extra_tokens=extra_tokens(experiment.model),
        target_tokens=experiment.train.target_tokens,
        epochs=experiment.train.epochs,
    )
    model = make_model(experiment, make_embedding(experiment), *read_items(folder))
    adam = experiment.train
    model.compile(keras.optimizers.legacy.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon))
    model(no_rows(data.columns))
    for epoch in range(adam.epochs):
        model.fit(batches.dataset(epoch), initial_epoch=epoch, epochs=epoch + 1, verbose=0)
        yield evaluate(experiment, model, folder)


def choose(name: str, folder: pathlib.Path, settings: Sequence[Mapping[str, float]], epochs: int) -> dict[str, Any]:
    """Returns the best setting and number of epochs on the test part of `folder`, which is the validation split.

    `tried` has each setting with its score after every epoch.
    """
    best: dict[str, Any] = {"score": 0.0}
    tried = []
    for setting in settings:
        scores = []
        for epoch, (results, _) in enumerate(epochs_of(experiment_of(name, setting, epochs, 0), folder), start=1):
            scores.append((results["ctr_auc"] + results["long_view_auc"]) / 2)
            if scores[-1] > best["score"]:
                best = {"setting": dict(setting), "epochs": epoch, "score": scores[-1], "validation": results}
        tried.append({**setting, "scores": [round(score, 4) for score in scores]})
        print(name, setting, " ".join(f"{score:.4f}" for score in scores), flush=True)
    return {**best, "tried": tried}


def experiment_of(name: str, setting: Mapping[str, float], epochs: int, seed: int) -> Experiment:
    overrides = [f"{field}={value}" for field, value in setting.items()]
    return load(CONFIGS / f"{name}_kuairand.yaml", [*overrides, f"train.epochs={epochs}", f"seed={seed}"])


def measure(source: pathlib.Path, quick: bool) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    settings = [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())]
    settings, epochs = (settings[:QUICK_SETTINGS], QUICK_EPOCHS) if quick else (settings, EPOCHS)
    seeds = QUICK_SEEDS if quick else SEEDS
    fields: dict[str, Any] = {"settings": len(settings), "seeds": len(seeds)}
    samples: dict[str, list[dict[str, np.ndarray]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        earlier_log(source, folder / "earlier")
        convert_kuairand(folder / "earlier", folder / "validation", test_fraction=HELD_OUT, split="user")
        convert_kuairand(source, folder / "test", test_fraction=HELD_OUT, split="user")
        for name in MODELS:
            chosen = choose(name, folder / "validation", settings, epochs)
            runs = [
                list(epochs_of(experiment_of(name, chosen["setting"], chosen["epochs"], seed), folder / "test"))[-1]
                for seed in seeds
            ]
            samples[name] = [run.samples for run in runs]
            test = {metric: [run.results[metric] for run in runs] for metric in runs[0].results}
            of_seeds = {
                metric: {"mean": float(np.mean(each)), "deviation": float(np.std(each)), "seeds": each}
                for metric, each in test.items()
            }
            fields[name] = {**chosen, "test": of_seeds}
    pairs = [compare(a, b, 1000, 0, 0.95) for a, b in zip(samples["dlrm"], samples["grm"])]
    fields["difference"] = {metric: [_interval(pair[metric]) for pair in pairs] for metric in pairs[0]}
    return fields


def _interval(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in ("difference", "low", "high")}


def _print(fields: Mapping[str, Any]) -> None:
    rows = []
    for metric in fields["grm"]["test"]:
        if not metric.startswith("baseline_") and metric.endswith("auc"):
            row: dict[str, Any] = {"metric": metric}
            for name in MODELS:
                of_model = fields[name]["test"][metric]
                row |= {name: of_model["mean"], f"{name} +-": round(of_model["deviation"], 4)}
            differences = fields["difference"][metric]
            row["rates"] = fields["grm"]["test"][f"baseline_{metric}"]["mean"]
            row["seeds where grm is surely above"] = sum(one["low"] > 0 for one in differences)
            row["surely below"] = sum(one["high"] < 0 for one in differences)
            rows.append(row)
    for name in MODELS:
        chosen = fields[name]
        print(f"{name}: {chosen['setting']}, {chosen['epochs']} epochs, validation score {chosen['score']:.4f}")
    harness.print_table(f"test split, mean and standard deviation of {fields['seeds']} seeds", rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("../shared/data/kuairand_explicit"))
    parser.add_argument("--quick", action="store_true", help="one setting, two epochs, one seed")
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    arguments = parser.parse_args(argv)
    tf.get_logger().setLevel("ERROR")  # TensorFlow warns that every training traces its functions anew
    fr.init()
    fields = measure(arguments.data, arguments.quick)
    _print(fields)
    if arguments.json:
        facts = {"benchmark": "ranking_kuairand", "machine": describe(), **fields}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
