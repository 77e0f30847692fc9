"""Question: how much quality do schedules and topologies lose that are not equal to synchronous training?

    python -m benchmarks.schedule_quality [--quick] [--json FILE] [--run DIR] [--data DIR]
                                         [--variants V ...] [--seeds S ...]

Retrieval on MovieLens-1M is trained on 4 ranks until validation stops improving, once per variant and seed:
  sync                   the baseline
  semi_async             rows lack one update
  nested_M4              equal to accumulation over 4 micro-batches
  weight_sync_g*_c*      g groups of ranks, averaged after every step; moments are scaled by c. 2D-SP recommends c = g
A user's last item is for test and the one before for validation. Training stops after 5 epochs without a better
validation NDCG@10; the figures are the best epoch's on the test split. Rows are trained by row-wise Adagrad.

HR@10 and NDCG@10 count all movies that a user has not rated. NE is the normalized entropy: the target's cross entropy
under the softmax over all movies, over its cross entropy under the popularity. The difference from `sync` of the same
seed has the 95 % interval of a paired bootstrap over users, which draws a user with the samples of all seeds that both
variants have finished (NestPipe, figure 6; TurboGR, table 5; 2D-SP, figure 4). `growth` has the mean second moment by
epoch, beside 2D-SP's Proposition 1 (expected_moment).

Every variant and seed is a job with a folder below --run, whose name holds a hash of settings and data. The same
command keeps finished jobs, and resumes a stopped one from its last epoch. It may be stopped at any time. The JSON has
what is finished, and `missing` names the rest. --quick trains 2 epochs of the first users with one seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.harness import harness, processes
from benchmarks.harness.training import content_of
from benchmarks.schedule_quality.job import METRICS, Entry, on_rank
from benchmarks.schedule_quality.splits import first_users, validation_of
from models.compare import compare, read_samples
from models.experiment import load
from models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/hstu_ml1m_tiny.yaml"
RANKS, SEEDS, PATIENCE = 4, (1, 2), 5
EPOCHS, QUICK_EPOCHS, QUICK_USERS = 60, 2, 300
SETTINGS = (
    "embedding.optimizer=rowwise_adagrad", "embedding.learning_rate=0.1", "embedding.arguments={variant: 2d_sp}",
    "model.dropout=0.2", "train.target_tokens=2048",
)  # fmt: skip


def weight_sync(groups: int, scale: int) -> tuple[str, ...]:
    """Returns the settings of `groups` replicas that are averaged after every step."""
    return (f"embedding.groups={groups}", "embedding.rule=weight_sync", f"embedding.moment_scale={scale}")


# In the order of training.
VARIANTS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "semi_async": ("train.schedule=semi_async",),
    "nested_M4": ("train.schedule=nested(4)",),
    **{f"weight_sync_g{g}_c{c}": weight_sync(g, c) for g, c in ((2, 2), (4, 4), (2, 1), (4, 1), (4, 2))},
}


class Job(NamedTuple):
    """One variant with one seed."""

    variant: str
    seed: int
    folder: pathlib.Path
    request: dict[str, Any]  # arguments of job.on_rank, without the folder

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").exists()


def job_of(variant: str, seed: int, run: pathlib.Path, epochs: int, splits: dict[str, pathlib.Path]) -> Job:
    """Returns the job. Jobs of different settings, data or ranks have different folders."""
    settings = [*SETTINGS, f"train.epochs={epochs}", f"seed={seed}", *VARIANTS[variant]]
    contents = {name: content_of(split) for name, split in splits.items()}
    # Settings as they are written: a field that the project gains later leaves the folder its name.
    written = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    facts = {"config": written, "settings": settings, "splits": contents, "patience": PATIENCE, "ranks": RANKS}
    folder = f"{variant}_seed{seed}_{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]}"
    paths = {name: str(split) for name, split in splits.items()}
    request = {"experiment": load(CONFIG, settings).to_dict(), "splits": paths, "patience": PATIENCE}
    return Job(variant, seed, run / folder, request)


def train(job: Job) -> None:
    """Trains a job on its ranks, or resumes it."""
    print(f"{job.folder.name} ...", flush=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    one_thread = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}  # the ranks share the cores
    processes.ask_ranks(
        on_rank, RANKS, variables=one_thread, timeout_s=24 * 3600, folder=str(job.folder), **job.request
    )  # fmt: skip


def prepared(data: pathlib.Path, run: pathlib.Path, users: int | None) -> dict[str, pathlib.Path]:
    """Returns the data sets of the validation and the test split."""
    whole = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(data))}"]), run / "data")
    if users is not None:
        whole = first_users(whole, run / "data" / f"{whole.name}_users{users}", users)
    return {"validation": validation_of(whole, run / "data" / f"{whole.name}_validation"), "test": whole}


BASELINE = "sync"
RESAMPLES, LEVEL = 1000, 0.95
# The variant of each number of groups whose steps are nearest to the baseline's: its moments are scaled by that number.
OF_GROUPS = {1: BASELINE, 2: "weight_sync_g2_c2", 4: "weight_sync_g4_c4"}


def expected_moment(groups: int, of_one: float | np.ndarray, of_two: float | np.ndarray) -> np.ndarray:
    """Returns E[v] of `groups` groups, <float>[...], from E[v] of one group and of two groups with the same batches.

    Proposition 1 (Zhang et al., "Two-dimensional Sparse Parallelism", section 3.2): with gradients that are i.i.d. over
    groups, E[v] is equal in all groups and grows at least as fast as in one group. The proof says more. Let s be the
    mean gradient of a row and n the noise of the gradient over all ranks. A step adds |s|^2 + E|n|^2 to v in one group.
    A group of the M-th part of the ranks has M times the variance, so it adds |s|^2 + M E|n|^2. Hence E[v] is linear in
    M, between its value in one group and M times that value. The upper end is the paper's Scaling Rule 1.
    """
    return of_one + (groups - 1) * (np.asarray(of_two) - of_one)


def summary(jobs: Sequence[Job], ranks: int, patience: int) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    done = {(job.variant, job.seed): job.folder for job in jobs if job.finished}
    curves = {key: json.loads((folder / "curve.json").read_text(encoding="utf-8")) for key, folder in done.items()}
    variants = {variant: row(variant, done) for variant in dict.fromkeys(job.variant for job in jobs if job.finished)}
    experiment = jobs[0].request["experiment"]
    return {
        "variants": variants,
        "missing": [f"{job.variant} seed {job.seed}" for job in jobs if not job.finished],
        "curves": [{"variant": variant, "seed": seed, "epochs": of} for (variant, seed), of in curves.items()],
        "growth": growth({groups: curves.get((variant, jobs[0].seed)) for groups, variant in OF_GROUPS.items()}),
        "users": next((len(read_samples(folder)["user"]) for folder in done.values()), 0),
        "ranks": ranks,
        "patience": patience,
        "tokens_per_batch_of_a_rank": experiment["train"]["target_tokens"],
        "model": experiment["model"],
        "embedding": {name: experiment["embedding"][name] for name in ("optimizer", "learning_rate")},
        "level": LEVEL,
        "resamples": RESAMPLES,
    }


def row(variant: str, done: Mapping[tuple[str, int], pathlib.Path]) -> dict[str, Any]:
    """Returns means over the finished seeds, and differences from BASELINE over the seeds that both have finished."""
    seeds = [seed for name, seed in done if name == variant]
    results = [json.loads((done[variant, seed] / "result.json").read_text(encoding="utf-8")) for seed in seeds]
    pairs = [seed for seed in seeds if (BASELINE, seed) in done]
    table = {}
    if pairs:
        a, b = ([read_samples(done[name, seed]) for seed in pairs] for name in (BASELINE, variant))
        table = compare(joined(a), joined(b), RESAMPLES, 0, LEVEL)
    found: dict[str, Any] = {
        "seeds": seeds,
        "epochs": [result["epoch"] for result in results],
        "pairs": pairs,
        "commits": sorted({result["commit"] for result in results}),
    }
    for metric in METRICS:
        key, of_seeds = metric.replace("@", "_at_"), [result["test"][metric] for result in results]
        found |= {key: float(np.mean(of_seeds)), f"{key}_by_seed": of_seeds}
        if pairs:
            found |= {f"{key}_{part}": table[metric][part] for part in ("difference", "low", "high")}
    return found


def joined(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the samples of several seeds as one run, in which a user has one sample per seed."""
    return {name: np.concatenate([one[name] for one in samples]) for name in samples[0]}


def growth(curves: Mapping[int, Sequence[Entry] | None]) -> list[dict[str, float]]:
    """Returns the mean second moment by epoch, `measured_M` for every finished number of groups M and `expected_4`."""
    measured = {groups: [entry["moment"] for entry in curve] for groups, curve in curves.items() if curve}
    epochs = min(map(len, measured.values()), default=0)
    found = []
    for epoch in range(epochs):
        entry: dict[str, float] = {"epoch": epoch + 1}
        entry |= {f"measured_{groups}": moments[epoch] for groups, moments in measured.items()}
        if {1, 2} <= set(measured):
            entry["expected_4"] = float(expected_moment(4, measured[1][epoch], measured[2][epoch]))
        found.append(entry)
    return found


def show(result: dict[str, Any]) -> None:
    model = result["model"]
    names = [name.replace("@", "_at_") for name in METRICS]
    shown = ["seeds", "epochs", *names, *(f"{name}_{part}" for name in names for part in ("difference", "low", "high"))]
    rows = [
        {"variant": variant, **{key: row.get(key, "") for key in shown}} for variant, row in result["variants"].items()
    ]
    harness.print_table(
        f"MovieLens-1M, {result['users']} users, {result['ranks']} ranks, dim {model['dim']}, {model['num_blocks']} "
        f"blocks; against sync of the same seeds with a {LEVEL:.0%} interval",
        rows,
    )
    print("  missing: " + (", ".join(result["missing"]) or "nothing"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__, f"{QUICK_EPOCHS} epochs of the first {QUICK_USERS} users")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train (all)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, help="seeds to train (all)")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/ml-1m")
    parser.add_argument("--run", type=pathlib.Path, default="runs/schedule_quality", help="folder of the jobs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if not arguments.data.is_dir():
        print(f"not measured: the folder {arguments.data} does not exist")
        harness.write_json(arguments.json, {"variants": {}, "not_measured": f"no data at {arguments.data.name}"})
        return
    quick, run = arguments.quick, arguments.run.resolve()
    splits = prepared(arguments.data.resolve(), run, QUICK_USERS if quick else None)
    epochs, seeds = (QUICK_EPOCHS, SEEDS[:1]) if quick else (EPOCHS, SEEDS)
    jobs = [job_of(variant, seed, run, epochs, splits) for seed in seeds for variant in VARIANTS]
    for job in jobs:
        if job.variant in arguments.variants and job.seed in (arguments.seeds or seeds) and not job.finished:
            train(job)
            harness.write_json(arguments.json, summary(jobs, RANKS, PATIENCE))
    result = summary(jobs, RANKS, PATIENCE)
    show(result)
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    processes.program(main)
