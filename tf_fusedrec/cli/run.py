"""Starts your own program on several processes.

    fusedrec run -n 2 train.py --epochs 3
    fusedrec run -n 2 python -m my_package.train
    fusedrec run -n 16 -H host1:8,host2:8 --network-interface eth0 train.py

A PROGRAM that ends in .py runs in this Python. The output of rank 0 is shown, and every rank has a log. The last lines
say which rank failed first, and why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import shutil
import sys
from typing import Any

from tf_fusedrec.cli import launch


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("run", description=__doc__)
    launch.add_options(parser)
    parser.add_argument(
        "--logs", type=pathlib.Path, metavar="DIR", help="folder of the logs (default: a new one in runs/.logs)"
    )
    parser.add_argument("program", metavar="PROGRAM", help="program, and its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    program = arguments.program
    if program.endswith(".py"):
        if not pathlib.Path(program).is_file():
            raise ValueError(f"PROGRAM: no such file {program!r}.")
        command = [sys.executable, program]
    elif shutil.which(program):
        command = [program]
    else:
        raise ValueError(f"PROGRAM: no such program {program!r}. Name a file that ends in .py, or a program on PATH.")
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    logs = arguments.logs or pathlib.Path("runs/.logs") / now
    code, failure = launch.launch(arguments, [*command, *arguments.arguments], logs)
    if arguments.json:
        print(json.dumps({"code": code, "logs": str(logs), "failure": failure and vars(failure)}, indent=1))
    return code
