"""Writes the report of a run: one HTML page with curves, test, calibration, activity of users, tables and settings.

    fusedrec report runs/clicks_dlrm/2026-11-25_2342
    fusedrec report runs/clicks_dlrm                     the newest run of a name
    fusedrec report runs/clicks_dlrm --text              the same on this terminal

The page needs no other file. All tables of the checkpoint are read once. The page that `fusedrec train` writes leaves
tables out if the checkpoint has more than 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from typing import Any

from tf_fusedrec.cli.main import write


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of a run, or of all runs of a name")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="page to write (RUN/report.html)")
    parser.add_argument("--text", action="store_true", help="print the report, and write no page")


def run(arguments: argparse.Namespace) -> int:
    from tf_fusedrec.models import report
    from tf_fusedrec.models.run_folder import run_of

    folder = run_of(arguments.run)
    facts = report.facts(folder)
    if arguments.json:
        print(json.dumps(facts._asdict(), indent=1))
    elif arguments.text:
        print(report.text(facts, min(max(shutil.get_terminal_size().columns, 80), 100)))
    else:
        output = arguments.output or folder / "report.html"
        write("--output", output, report.html(facts))
        print(f"report  {output}")
    return 0
