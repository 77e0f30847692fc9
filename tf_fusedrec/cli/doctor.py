"""Prints versions, builds, kernels in use and GPUs, and trains ten steps on one and on two processes.

Put the output at the top of every report of a fault. The exit code is 1 if something that is installed does not work.

    fusedrec doctor
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tf_fusedrec.cli.main import say


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("doctor", description=__doc__)


def run(arguments: argparse.Namespace) -> int:
    say(arguments, "looking at the installation")
    from tf_fusedrec.doctor.report import report

    parts = report((lambda line: None) if arguments.json else (lambda line: print(line, flush=True)))
    failed = parts["failed"]
    if arguments.json:
        print(json.dumps(parts, indent=1))
    else:
        print(f"result: {', '.join(failed)} failed" if failed else "result: all that is installed works")
    return 1 if failed else 0
