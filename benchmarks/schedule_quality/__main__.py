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
epoch, beside 2D-SP's Proposition 1 (moments.py).

Every variant and seed is a job with a folder below --run, whose name holds a hash of settings and data. The same
command keeps finished jobs, and resumes a stopped one from its last epoch. It may be stopped at any time. The JSON has
what is finished, and `missing` names the rest. A finished job is result.json, curve.json and samples.npz. Copied to
benchmarks/results/schedule_quality, its folder counts on every machine. --quick trains 2 epochs of the first users
with one seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from benchmarks.harness import children, harness
from benchmarks.harness.content import content_of
from benchmarks.schedule_quality.job import METRICS
from benchmarks.schedule_quality.splits import first_users, validation_of
from benchmarks.schedule_quality.summary import LEVEL, summary
from models.experiment import load
from models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/hstu_ml1m_tiny.yaml"
KEPT = harness.ROOT / "benchmarks/results/schedule_quality"  # finished jobs of earlier machines
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
    request: dict[str, Any]  # arguments of job.main, without the folder

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
    kept = Job(variant, seed, KEPT / folder, request)
    return kept if kept.finished else kept._replace(folder=run / folder)


def train(job: Job) -> None:
    """Trains a job on its ranks, or resumes it.

    Raises:
      CheckFailed: The training failed.
    """
    print(f"{job.folder.name} ...", flush=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    one_thread = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}  # the ranks share the cores
    children.ask_ranks(
        "benchmarks.schedule_quality.job", RANKS, variables=one_thread, timeout_s=24 * 3600, folder=str(job.folder),
        **job.request,
    )  # fmt: skip


def prepared(data: pathlib.Path, run: pathlib.Path, users: int | None) -> dict[str, pathlib.Path]:
    """Returns the data sets of the validation and the test split."""
    whole = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(data))}"]), run / "data")
    if users is not None:
        whole = first_users(whole, run / "data" / f"{whole.name}_users{users}", users)
    return {"validation": validation_of(whole, run / "data" / f"{whole.name}_validation"), "test": whole}


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EPOCHS} epochs of the first {QUICK_USERS} users")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train (all)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, help="seeds to train (all)")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/ml-1m")
    parser.add_argument("--run", type=pathlib.Path, default="runs/schedule_quality", help="folder of the jobs")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file for the result")
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
    harness.run(main)
