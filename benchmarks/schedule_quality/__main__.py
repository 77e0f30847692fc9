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

The JSON has the given variants and seeds (all by default). The same command keeps finished jobs and resumes a stopped
one from its last epoch (harness/training.py). --quick trains 2 epochs of the first users with one seed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes, training
from tf_fusedrec.models.experiment import load
from tf_fusedrec.models.prepare import prepare_data

CONFIG = harness.ROOT / "configs/hstu_ml1m_tiny.yaml"
RANKS, SEEDS, PATIENCE = 4, (1, 2), 5
EPOCHS, QUICK_EPOCHS, QUICK_USERS = 60, 2, 300
METRICS = ("hr@10", "ndcg@10", "ne")
SETTINGS = (
    "embedding.optimizer=rowwise_adagrad", "embedding.learning_rate=0.1", "embedding.arguments={variant: 2d_sp}",
    "model.dropout=0.2", "train.target_tokens_per_rank=2048",
)  # fmt: skip


def weight_sync(groups: int, scale: int) -> tuple[str, ...]:
    """Returns the settings of `groups` replicas that are averaged after every step."""
    return (f"embedding.groups={groups}", "embedding.rule=weight_sync", f"embedding.moment_scale={scale}")


BASELINE = "sync"
# In the order of training.
VARIANTS: dict[str, tuple[str, ...]] = {
    BASELINE: (),
    "semi_async": ("train.schedule=semi_async",),
    "nested_M4": ("train.schedule=nested(4)",),
    **{f"weight_sync_g{g}_c{c}": weight_sync(g, c) for g, c in ((2, 2), (4, 4), (2, 1), (4, 1), (4, 2))},
}
# The variant of each number of groups whose steps are nearest to the baseline's: its moments are scaled by that number.
OF_GROUPS = {1: BASELINE, 2: "weight_sync_g2_c2", 4: "weight_sync_g4_c4"}
Jobs = Mapping[tuple[str, int], training.Job]  # by variant and seed


def jobs_of(
    variants: Sequence[str], seeds: Sequence[int], run: pathlib.Path, epochs: int, splits: Mapping[str, pathlib.Path]
) -> Jobs:  # fmt: skip
    def job(variant: str, seed: int) -> training.Job:
        experiment = load(CONFIG, [*SETTINGS, f"train.epochs={epochs}", f"seed={seed}", *VARIANTS[variant]])
        return training.job_of(
            variant, experiment, run, splits["validation"], splits, deciding=["ndcg@10"], patience=PATIENCE,
            ranks=RANKS,
        )  # fmt: skip

    return {(variant, seed): job(variant, seed) for seed in seeds for variant in variants}


def expected_moment(groups: int, of_one: float | np.ndarray, of_two: float | np.ndarray) -> np.ndarray:
    """Returns E[v] of `groups` groups, <float>[...], from E[v] of one group and of two groups with the same batches.

    Proposition 1 (2D-SP, section 3.2): E[v] is equal in all groups and grows at least as fast as in one. Let s be the
    mean gradient of a row and n its noise over all ranks. A step adds |s|^2 + E|n|^2 to v in one group. A group of the
    M-th part of the ranks adds |s|^2 + M E|n|^2. Hence E[v] is linear in M, at most M times that of one group.
    """
    return of_one + (groups - 1) * (np.asarray(of_two) - of_one)


def summary(jobs: Jobs) -> dict[str, Any]:
    curves = {key: job.epochs() for key, job in jobs.items()}
    first = next(iter(jobs.values()))
    experiment, seed = first.request["experiment"], next(iter(jobs))[1]
    return {
        "variants": {variant: row(variant, jobs) for variant, _ in jobs},
        "curves": [{"variant": variant, "seed": seed, "epochs": of} for (variant, seed), of in curves.items()],
        "growth": growth({groups: curves.get((variant, seed), []) for groups, variant in OF_GROUPS.items()}),
        "users": len(first.samples()["user"]), "ranks": RANKS, "patience": PATIENCE, "model": experiment["model"],
        "tokens_per_batch_of_a_rank": experiment["train"]["target_tokens_per_rank"],
    }  # fmt: skip


def row(variant: str, jobs: Jobs) -> dict[str, Any]:
    """Returns means over the seeds, and differences from BASELINE with the same seeds."""
    seeds = [seed for name, seed in jobs if name == variant]
    best = [training.best(jobs[variant, seed].epochs()) for seed in seeds]
    fields: dict[str, Any] = {"seeds": seeds, "epochs": [entry["epoch"] for entry in best]}
    table = {}
    if (BASELINE, seeds[0]) in jobs:
        baseline, own = ([jobs[name, seed].samples() for seed in seeds] for name in (BASELINE, variant))
        table = training.differences(baseline, own, METRICS)
    for metric in METRICS:
        field, of_seeds = metric.replace("@", "_at_"), [entry["test"][metric] for entry in best]
        fields |= {field: float(np.mean(of_seeds)), f"{field}_by_seed": of_seeds}
        fields |= {f"{field}_{part}": value for part, value in table.get(metric, {}).items()}
    return fields


def growth(curves: Mapping[int, Sequence[training.Entry]]) -> list[dict[str, float]]:
    """Returns the mean second moment by epoch, `measured_M` for every trained number of groups M and `expected_4`."""
    measured = {groups: [entry["moment"] for entry in curve] for groups, curve in curves.items() if curve}
    entries: list[dict[str, float]] = []
    for epoch, moments in enumerate(zip(*measured.values()), start=1):
        of_groups = dict(zip(measured, moments))
        entries.append({"epoch": epoch, **{f"measured_{groups}": moment for groups, moment in of_groups.items()}})
        if {1, 2} <= set(of_groups):
            entries[-1]["expected_4"] = float(expected_moment(4, of_groups[1], of_groups[2]))
    return entries


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, f"{QUICK_EPOCHS} epochs of the first {QUICK_USERS} users")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train (all)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, help="seeds to train (all)")
    parser.add_argument("--data", type=pathlib.Path, default=harness.ROOT.parent / "shared/data/ml-1m")
    parser.add_argument("--run", type=pathlib.Path, default="runs/schedule_quality", help="folder of the jobs")
    arguments = parser.parse_args(argv)
    if not arguments.data.is_dir():
        print(f"not measured: the folder {arguments.data} does not exist")
        harness.write_json(arguments.json, {"variants": {}, "not_measured": f"no data at {arguments.data.name}"})
        return
    run = arguments.run.resolve()
    whole = prepare_data(load(CONFIG, [f"data.input={json.dumps(str(arguments.data.resolve()))}"]), run / "data")
    splits = training.held_out(whole, run / "data", QUICK_USERS if arguments.quick else None)
    epochs, seeds = (QUICK_EPOCHS, SEEDS[:1]) if arguments.quick else (EPOCHS, SEEDS)
    jobs = jobs_of(arguments.variants, arguments.seeds or seeds, run, epochs, splits)
    training.train(jobs.values())
    result = summary(jobs)
    ends = ("", "_difference", "_low", "_high")
    shown = ["seeds", "epochs", *(metric.replace("@", "_at_") + end for metric in METRICS for end in ends)]
    rows = [{"variant": name, **{key: one.get(key, "") for key in shown}} for name, one in result["variants"].items()]
    title = f"MovieLens-1M, {result['users']} users, {RANKS} ranks; against {BASELINE} of the same seeds"
    harness.print_table(f"{title} with a {training.LEVEL:.0%} interval", rows)
    harness.write_json(arguments.json, result)


if __name__ == "__main__":
    processes.program(main)
