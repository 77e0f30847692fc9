"""Question: how much quality do schedules and topologies lose that are not equal to synchronous training?

    python -m benchmarks.schedule_quality [--quick] [--json FILE] [--run DIR] [--data DIR] [--epochs N] [--arms A ...]

models.train trains retrieval on MovieLens-1M in 2 processes, anew for each variant:
  sync            the baseline
  nested_M4       equal to accumulation over 4 micro-batches
  semi_async      rows lack one update
  weight_sync_c*  2 groups of one rank, averaged after every step; moments are scaled by c, where c = 2 is the number of
                  groups, as 2D-SP recommends
  sync_seed_1     synchronous training with another seed

The figures are HR@10 and NDCG@10 over all movies that a user has not rated. The difference from `sync` has the 95 %
interval of a paired bootstrap over users. This interval ignores the chance of initial values and batches, whose
size `sync_seed_1` shows (NestPipe, figure 6; TurboGR, table 5; 2D-SP, figure 4).

Every variant has a folder below --run. The same command keeps finished variants and resumes an interrupted one from its
last epoch. --arms names the variants to train. --quick trains one epoch of the first users.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tf_fusedrec as fr
from benchmarks.harness import children, harness, processes
from models.compare import compare, read_samples
from models.experiment import load
from models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/hstu_ml1m_tiny.yaml"
RANKS = 2
_TWO_GROUPS = (f"embedding.groups={RANKS}", "embedding.rule=weight_sync", "embedding.sync_every=1")
VARIANTS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "nested_M4": ("train.schedule=nested(4)",),
    "semi_async": ("train.schedule=semi_async",),
    "weight_sync_c1": (*_TWO_GROUPS, "embedding.moment_scale=1"),
    f"weight_sync_c{RANKS}": (*_TWO_GROUPS, f"embedding.moment_scale={RANKS}"),
    "sync_seed_1": ("seed=1",),
}
BASELINE = "sync"
METRICS = ("hr@10", "ndcg@10")
RESAMPLES, LEVEL = 1000, 0.95
QUICK_USERS = 300
TOKENS = 2048  # per batch and rank, which halves the steps of CONFIG


def train(folder: pathlib.Path, settings: Sequence[str]) -> None:
    """Trains and evaluates one variant in RANKS processes, or resumes it. Does nothing if it is finished.

    Raises:
      CheckFailed: The folder belongs to other settings, or the training failed.
    """
    wanted = load(CONFIG, settings).to_dict()
    known = folder / "experiment.json"
    if known.exists() and json.loads(known.read_text(encoding="utf-8")) != wanted:
        raise harness.CheckFailed(f"{folder} belongs to other settings than {list(settings)}. Name another --run.")
    if (folder / "results.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    command = [horovodrun, "-np", str(RANKS), "--gloo", sys.executable, "-m", "models.train", "--config", str(CONFIG)]
    command += ["--output", str(folder), *(word for setting in settings for word in ("--set", setting))]
    command += ["--resume"] * fr.checkpoint.exists(folder / "checkpoint")
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        done = processes.run(
            command, env=children.environment(), cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise harness.CheckFailed(f"{folder.name} ended with code {done.returncode}; see {folder / 'log.txt'}.")


def row(name: str, run: pathlib.Path) -> dict[str, Any]:
    """Returns the metrics of a finished variant, and their differences from BASELINE with the ends of the interval."""
    table = compare(read_samples(run / BASELINE), read_samples(run / name), RESAMPLES, 0, LEVEL)
    found: dict[str, Any] = {"arm": name}
    for metric in METRICS:
        key, entry = metric.replace("@", "_at_"), table[metric]
        found |= {key: entry["b"]} | {f"{key}_{part}": entry[part] for part in ("difference", "low", "high")}
    return found


def first_users(data: pathlib.Path, folder: pathlib.Path, users: int) -> pathlib.Path:
    """Makes a folder with the ratings of the first users only."""
    with gzip.open(data / "ratings.csv.gz", "rt", encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        header = next(lines)
        user = header.index("user_id")
        kept = [header, *(line for line in lines if int(line[user]) <= users)]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "ratings.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(kept)
    return folder


def summary(run: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of the JSON file, for all finished variants."""
    ended = [name for name in VARIANTS if (run / name / "results.json").exists()]
    experiment: Mapping[str, Any] = json.loads((run / BASELINE / "experiment.json").read_text(encoding="utf-8"))
    test = json.loads((run / BASELINE / "results.json").read_text(encoding="utf-8"))["test"]
    return {
        "arms": [row(name, run) for name in ended],
        "not_trained": [name for name in VARIANTS if name not in ended],
        "popularity": {metric.replace("@", "_at_"): test[f"baseline_{metric}"] for metric in METRICS},
        "users": int(test["users"]),
        "ranks": RANKS,
        "epochs": experiment["train"]["epochs"],
        "tokens_per_batch_of_a_rank": experiment["train"]["target_tokens"],
        "model": experiment["model"],
        "level": LEVEL,
        "resamples": RESAMPLES,
    }


def show(result: Mapping[str, Any]) -> None:
    model = result["model"]
    harness.print_table(
        f"MovieLens-1M, {result['users']} users, {result['epochs']} epochs on {result['ranks']} ranks, "
        f"dim {model['dim']}, {model['num_blocks']} blocks; against {BASELINE} with a {result['level']:.0%} interval",
        result["arms"],
    )
    print("  by popularity: " + ", ".join(f"{name} {value:.4f}" for name, value in result["popularity"].items()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=f"one epoch of the first {QUICK_USERS} users")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every variant (3)")
    parser.add_argument(
        "--arms", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train besides sync"
    )
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/ml-1m")
    parser.add_argument("--run", type=pathlib.Path, help="folder of the runs (default: below runs/)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if not arguments.data.is_dir():
        print(f"not measured: the folder {arguments.data} does not exist")
        harness.write_json(arguments.json, {"arms": [], "not_measured": f"no data at {arguments.data.name}"})
        return
    epochs, data = (1 if arguments.quick else arguments.epochs), arguments.data.resolve()
    run = (arguments.run or pathlib.Path("runs", f"schedule_quality{'_quick' * arguments.quick}_{epochs}")).resolve()
    if arguments.quick:
        data = first_users(data, run / "first_users", QUICK_USERS)
    data = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(data))}"]), run / "data")
    for name in dict.fromkeys([BASELINE, *arguments.arms]):
        print(f"{name} ...", flush=True)
        shared = [f"data.input={json.dumps(str(data))}", f"train.epochs={epochs}", f"train.target_tokens={TOKENS}"]
        train(run / name, [*shared, *VARIANTS[name]])
    result = summary(run)
    show(result)
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    harness.run(main)
