"""Question: what do schedules and topologies that are not equal to synchronous training cost in quality?

    python -m benchmarks.schedule_quality [--quick] [--json FILE] [--run DIR] [--data DIR] [--epochs N] [--arms A ...]

Retrieval on MovieLens-1M, trained anew by models.train in 2 processes under each arm: `sync`; `nested_M4`, which is
equal to accumulation over 4 micro-batches; `semi_async`, whose rows lack one update; `weight_sync` with 2 groups of one
rank, averaged after every step, and moments scaled by c = 1 (not at all) and c = 2 (the number of groups, as 2D-SP
recommends). HR@10 and NDCG@10 over all movies that a user has not rated, and their difference to `sync` with the 95 %
interval of a paired bootstrap over users. That interval knows nothing of the luck of initial values and batches: the
arm `sync_seed_1`, synchronous training with another seed, shows how much that is (NestPipe, figure 6; TurboGR, table 5;
2D-SP, figure 4).

Every arm has its folder below --run. What has ended stays, and an arm that was interrupted goes on from its last epoch,
when the command is given again. --quick trains one epoch of the first users.
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
from benchmarks import children, harness, processes
from models.compare import compare, read_samples
from models.experiment import load
from models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/hstu_ml1m_tiny.yaml"
RANKS = 2
_TWO_GROUPS = (f"embedding.groups={RANKS}", "embedding.rule=weight_sync", "embedding.sync_every=1")
ARMS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "nested_M4": ("train.schedule=nested(4)",),
    "semi_async": ("train.schedule=semi_async",),
    "weight_sync_c1": (*_TWO_GROUPS, "embedding.moment_scale=1"),
    f"weight_sync_c{RANKS}": (*_TWO_GROUPS, f"embedding.moment_scale={RANKS}"),
    "sync_seed_1": ("seed=1",),
}
REFERENCE = "sync"
METRICS = ("hr@10", "ndcg@10")
RESAMPLES, LEVEL = 1000, 0.95
QUICK_USERS = 300
TOKENS = 2048  # of a batch of a rank: half the steps of CONFIG, which was made for one epoch


def train(folder: pathlib.Path, settings: Sequence[str]) -> None:
    """Trains and evaluates one arm in RANKS processes, or goes on with it; does nothing when it has ended.

    Raises:
      CheckFailed: the folder belongs to other settings; or the training failed.
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
    """Metrics of an arm that has ended, with what they are above those of REFERENCE: low and high of the interval."""
    table = compare(read_samples(run / REFERENCE), read_samples(run / name), RESAMPLES, 0, LEVEL)
    found: dict[str, Any] = {"arm": name}
    for metric in METRICS:
        key, entry = metric.replace("@", "_at_"), table[metric]
        found |= {key: entry["b"]} | {f"{key}_{part}": entry[part] for part in ("difference", "low", "high")}
    return found


def first_users(data: pathlib.Path, folder: pathlib.Path, users: int) -> pathlib.Path:
    """A folder with the ratings of the first users only."""
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
    """What benchmarks/results keeps: of all arms that have ended."""
    ended = [name for name in ARMS if (run / name / "results.json").exists()]
    experiment: Mapping[str, Any] = json.loads((run / REFERENCE / "experiment.json").read_text(encoding="utf-8"))
    test = json.loads((run / REFERENCE / "results.json").read_text(encoding="utf-8"))["test"]
    return {
        "arms": [row(name, run) for name in ended],
        "not_trained": [name for name in ARMS if name not in ended],
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
        f"dim {model['dim']}, {model['num_blocks']} blocks; against {REFERENCE} with a {result['level']:.0%} interval",
        result["arms"],
    )
    print("  by popularity: " + ", ".join(f"{name} {value:.4f}" for name, value in result["popularity"].items()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=f"one epoch of the first {QUICK_USERS} users")
    parser.add_argument("--epochs", type=int, default=3, help="of every arm (3)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="to train; sync always is")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/ml-1m")
    parser.add_argument("--run", type=pathlib.Path, help="folder of the runs; default below runs/")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if not arguments.data.is_dir():
        print(f"not measured: there is no folder {arguments.data}")
        harness.write_json(arguments.json, {"arms": [], "not_measured": f"no data at {arguments.data.name}"})
        return
    epochs, data = (1 if arguments.quick else arguments.epochs), arguments.data.resolve()
    run = (arguments.run or pathlib.Path("runs", f"schedule_quality{'_quick' * arguments.quick}_{epochs}")).resolve()
    if arguments.quick:
        data = first_users(data, run / "first_users", QUICK_USERS)
    data = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(data))}"]), run / "data")
    for name in dict.fromkeys([REFERENCE, *arguments.arms]):
        print(f"{name} ...", flush=True)
        of_all = [f"data.input={json.dumps(str(data))}", f"train.epochs={epochs}", f"train.target_tokens={TOKENS}"]
        train(run / name, [*of_all, *ARMS[name]])
    result = summary(run)
    show(result)
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    harness.run(main)
