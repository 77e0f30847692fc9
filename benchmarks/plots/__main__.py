"""Plots the results of benchmarks/results, or of JSON files that benchmarks have written.

    python -m benchmarks.plots --output build/plots [RESULT.json ...]

The program prints the name of a result that has no plot, and omits it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

from benchmarks.plots.figures import kept_plots, plot_of


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FOLDER", help="folder for the SVG files")
    parser.add_argument("results", type=pathlib.Path, nargs="*", help="JSON files (default: benchmarks/results)")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    plots: dict[str, str | None] = dict(kept_plots()) if not arguments.results else {}
    for path in arguments.results:
        plots[path.stem] = plot_of(json.loads(path.read_text(encoding="utf-8")))
    for name, plot in plots.items():
        if plot is None:
            print(f"{name}: no plot is known for it")
        else:
            (arguments.output / f"{name}.svg").write_text(plot, encoding="utf-8")
            print(arguments.output / f"{name}.svg")


if __name__ == "__main__":
    main()
