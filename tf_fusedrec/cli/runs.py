"""Lists runs, newest first: state, length, epochs and the main metric of the test beside its baseline.

    fusedrec runs
    fusedrec runs clicks_dlrm              the runs of a name
    fusedrec runs --clear-data             removes converted data that no running job reads

The last line has the size of the converted data that all runs share (data.cache).
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from tf_fusedrec.models import data_cache, screen
from tf_fusedrec.models.run_folder import RUNS, runs


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("runs", description=__doc__)
    parser.add_argument("name", nargs="?", help="name of an experiment; default: all")
    parser.add_argument("--root", type=pathlib.Path, default=RUNS, metavar="FOLDER", help=f"folder of runs ({RUNS})")
    parser.add_argument("--cache", type=pathlib.Path, metavar="FOLDER", help="data.cache (ROOT/.data)")
    parser.add_argument("--clear-data", action="store_true", help="remove converted data that no running job reads")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.root.is_dir():
        raise ValueError(f"--root {str(arguments.root)!r} is no folder. Use `fusedrec train` first, or another --root.")
    records = runs(arguments.root).items()
    shown = {str(path): record for path, record in records if arguments.name in (None, record["name"])}
    cache = arguments.cache or arguments.root / ".data"
    sizes = data_cache.cached(cache)
    if arguments.clear_data:
        sizes = {folder: size for folder, size in sizes.items() if not data_cache.clear(folder)}
    if arguments.json:
        data = {str(folder): size for folder, size in sizes.items()}
        print(json.dumps({"runs": shown, "data": data}, indent=1))
        return 0
    width = max([20, *map(len, shown)]) + 2
    print(f"{'run':<{width}}{'state':<13}{'time':>9}{'epochs':>9}  test (baseline)")
    for name, record in shown.items():
        print(f"{name:<{width}}{_line(record)}".rstrip())
    print(f"\nconverted data: {len(sizes)} sets, {sum(sizes.values()) / 1e6:,.1f} MB in {cache}")
    return 0


def _line(record: dict[str, Any]) -> str:
    total = f"/{record['epochs_wanted']}" if record.get("epochs_wanted") else ""
    epochs = f"{len(record['epochs'])}{total}"
    line = f"{record['state']:<13}{screen.duration(record['seconds']):>9}{epochs:>9}  "
    compared = {name: row for name, row in record.get("metrics", {}).items() if "baseline" in row}
    for name, row in list(compared.items())[:1]:
        line += f"{screen.title_of(name, record['labels'])} {row['value']:.4f} ({row['baseline']:.4f})"
    return line
