"""Chooses groups, schedule, wire and tier for a cluster that you do not have yet, by timing steps on this machine.

    fusedrec plan grm_4g --ranks 16 --ranks-per-host 8 --memory-bytes-per-rank 60e9
    fusedrec plan clicks.yaml --ranks 4 --memory-bytes-per-rank 16e9 --tolerate stale_rows

This machine needs the dense compute of a rank. CONFIG is as for `fusedrec train`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tf_fusedrec.cli.train import add_experiment, config_file, overrides_of

# Fields of tf_fusedrec.Cluster.
CLUSTER = {
    "ranks": "processes of the job",
    "memory_bytes_per_rank": "memory of one rank for rows and their slots",
    "ranks_per_host": "ranks on one host",
    "inside_bytes_per_s": "bandwidth of a rank to the others of its host",
    "between_bytes_per_s": "bandwidth of a host to all others, in one direction",
    "latency_s": "seconds of one message beside its bytes",
    "file_bytes_per_rank": "disk of one rank for rows beyond its memory",
    "file_bytes_per_s": "rate of reads from that disk",
}
COUNTS = ("ranks", "ranks_per_host")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", description=__doc__)
    add_experiment(parser)
    for name, text in CLUSTER.items():
        needed = name in ("ranks", "memory_bytes_per_rank")
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int if name in COUNTS else float, required=needed, metavar="N", help=text)
    parser.add_argument(
        "--tolerate", action="append", default=[], choices=["stale_rows", "bfloat16_wire", "weight_sync"],
        help="allowed difference from the schedule sync; repeatable",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from tf_fusedrec.models.experiment import load

    experiment = load(config_file(arguments.config, arguments.data), overrides_of(arguments))
    from tf_fusedrec.models.train import model_and_batch
    from tf_fusedrec.schedules import planning

    model, batch = model_and_batch(experiment)
    fields = {name: getattr(arguments, name) for name in CLUSTER if getattr(arguments, name) is not None}
    plan = planning.plan(model, batch, planning.Cluster(**fields), tolerate=arguments.tolerate)
    print(json.dumps(plan.to_dict(), indent=1) if arguments.json else plan)
    return 0
