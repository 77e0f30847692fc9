"""Computes the metrics of a run on its test split or on other data, beside a baseline.

    fusedrec evaluate runs/clicks
    fusedrec evaluate runs/clicks --data day15.csv

Without --data, the metrics are those at the end of training. With raw files of a table, every event in them is scored,
after the earlier events of its user in the run's own data.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from tf_fusedrec.cli.main import say


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("evaluate", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="output folder of fusedrec train, or checkpoint")
    parser.add_argument("--data", help="raw files or converted data set to use instead of the run's")


def run(arguments: argparse.Namespace) -> int:
    if arguments.data is not None and not pathlib.Path(arguments.data).exists():
        raise ValueError(f"--data: no such file or folder: {arguments.data}.")
    if not arguments.run.is_dir():
        raise ValueError(f"RUN: no such folder: {arguments.run}. Name the output folder of fusedrec train.")
    from tf_fusedrec.models.run_folder import checkpoint_of
    from tf_fusedrec.models.saved_run import check_whole, experiment_of

    checkpoint = checkpoint_of(arguments.run) or arguments.run
    check_whole(checkpoint)
    say(arguments, f"evaluating {arguments.run}")
    from tf_fusedrec.exchange import collectives, topology
    from tf_fusedrec.models.evaluate import evaluate_run, table

    topology.init()
    results = evaluate_run(arguments.run, arguments.data).results
    if collectives.rank() == 0:
        labels = getattr(experiment_of(checkpoint).model, "label_of_task", {})
        facts = {"run": str(arguments.run), "data": arguments.data, "test": results}
        print(json.dumps(facts, indent=1) if arguments.json else table(results, labels), flush=True)
    collectives.barrier()  # The first rank to leave ends the others, and rank 0 may still be writing.
    return 0
