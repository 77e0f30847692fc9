"""Compares runs with the first of them: settings, data and code that differ, and metrics with confidence intervals.

    fusedrec compare runs/clicks_dlrm/2026-11-25_2342 runs/clicks_grm
    fusedrec compare runs/a runs/b runs/c --resamples 4000
    fusedrec compare runs/a runs/b --html compared.html      also as a page, with the curves of all runs

RUN is the folder of one run, or of all runs of a name; then the newest is taken. The runs must have been evaluated on
the same users. A folder with only samples.npz, as programs of benchmarks/ write it, has metrics and no settings.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from tf_fusedrec.cli.main import write

_WIDTH = 34  # of the first column


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="two runs or more")
    parser.add_argument("--resamples", type=int, default=1000, help="number of bootstrap draws (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="also write a page that needs no other file")
    parser.add_argument("--level", type=float, default=0.95, help="level of the interval, between 0 and 1 (0.95)")


def run(arguments: argparse.Namespace) -> int:
    from tf_fusedrec.models import compare
    from tf_fusedrec.models.run_folder import RECORD, read_record, run_of

    if arguments.resamples < 0 or not 0 < arguments.level < 1:
        raise ValueError(
            f"--resamples must be at least 0 and --level between 0 and 1, got {arguments.resamples} and "
            f"{arguments.level}. Use values in these ranges."
        )
    most = len(ascii_lowercase)
    if not 2 <= len(arguments.runs) <= most:
        raise ValueError(f"RUN must name 2 to {most} runs, got {len(arguments.runs)}. `fusedrec runs` lists them.")
    folders = [path if (path / compare.SAMPLES).is_file() else run_of(path) for path in arguments.runs]
    letters = dict(zip(ascii_lowercase, folders))
    records = {letter: read_record(folder) for letter, folder in letters.items() if (folder / RECORD).is_file()}
    unequal, equal = compare.differing(records) if len(records) == len(letters) else ({}, 0)
    (first, *later), samples = letters, {letter: compare.read_samples(folder) for letter, folder in letters.items()}
    tables = {
        letter: compare.compare(samples[first], samples[letter], arguments.resamples, arguments.seed, arguments.level)
        for letter in later
    }
    if arguments.html is not None:
        write("--html", arguments.html, compare.html(letters, records, unequal, tables, arguments.level))
    users = len({*samples[first]["user"].tolist()})
    if arguments.json:
        answer = {"runs": {letter: str(folder) for letter, folder in letters.items()}, "differences": unequal}
        answer |= {"users": users, "level": arguments.level, "resamples": arguments.resamples, "metrics": tables}
        print(json.dumps(answer, indent=1))
        return 0
    for letter, folder in letters.items():
        print(f"{letter}  {folder}")
    if len(records) == len(letters):
        print("\n".join(["", *_settings(unequal, equal, records)]))
    labels = records[first]["labels"] if first in records else {}
    print(f"\n{users:,} users, the same rows of the test")
    for letter, table in tables.items():
        print("\n".join(_metrics(letter, table, labels, arguments.level)))
    if arguments.html is not None:
        print(f"\npage  {arguments.html}")
    return 0


def _settings(unequal: Mapping[str, Sequence[Any]], equal: int, records: Mapping[str, Any]) -> list[str]:
    from tf_fusedrec.models.screen import duration

    rows = {"": [*records]} | {name: [str(value) for value in row] for name, row in unequal.items()}
    rows["time"] = [duration(record["seconds"]) for record in records.values()]
    width = max(len(cell) for row in rows.values() for cell in row) + 2
    lines = [f"{name:<{_WIDTH}}" + "".join(f"{cell:<{width}}" for cell in row).rstrip() for name, row in rows.items()]
    return [*lines[:-1], f"({equal} other settings and facts are equal)", lines[-1]]


def _metrics(
    letter: str, table: Mapping[str, Mapping[str, float]], labels: Mapping[str, str], level: float
) -> list[str]:
    from tf_fusedrec.models.compare import words

    lines = [f"{'metric':<{_WIDTH}}{'a':>9}{letter:>9}{f'{letter} - a':>10}    {100 * level:g} % interval"]
    for title, a, b, difference, interval, verdict in words(table, labels):
        lines.append(f"{title:<{_WIDTH}}{a:>9}{b:>9}{difference:>10}    {interval}  {verdict}".rstrip())
    return lines
