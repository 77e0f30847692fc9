"""Plots of results: of the files that are kept in benchmarks/results, or of JSON files that benchmarks have written.

    python -m benchmarks.plots --output build/plots [RESULT.json ...]

A plot knows the fields of its benchmark by name and holds no figure of its own. Results of which no plot is known are
passed over and named.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
INK, PEER = "#1f77b4", "#b0b0b0"


def svg(figure: Any) -> str:
    """The figure as text, the same for the same data."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tf_fusedrec"}):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return stream.getvalue()


def bars(title: str, unit: str, values: Mapping[str, float], ours: Sequence[str]) -> str:
    """One horizontal bar for each name, those of this project in colour, with its number."""
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.42 * len(values)))
    drawn = axes.barh(list(values), list(values.values()), color=[INK if name in ours else PEER for name in values])
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Rows of the tables of a page of harness.print_table, by title: columns are parted by two spaces or more."""
    found: dict[str, list[dict[str, str]]] = {}
    for block in text.split("\n\n"):
        title, *lines = block.strip("\n").splitlines()
        cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
        found[title] = [dict(zip(cells[0], row)) for row in cells[1:] if len(row) == len(cells[0])]
    return found


def _titled(page: Mapping[str, list[dict[str, str]]], beginning: str) -> list[dict[str, str]]:
    return next((rows for title, rows in page.items() if title.startswith(beginning)), [])


def table_versus_tfra(text: str) -> str:
    """ms of a step of one table, ours and TFRA's (benchmarks.table)."""
    values = {}
    for row in _titled(tables(text), "against TFRA"):
        what = f"{float(row['rows']) / 1e6:g} M rows, {row['optimizer']}"
        values[f"{what}: TFRA"], values[f"{what}: ours"] = float(row["ms_tfra"]), float(row["ms_ours"])
    return bars("a step of one table, 81,920 ids", "ms", values, [name for name in values if name.endswith("ours")])


def _curves(figure: Any, axes: Any, x: str, y: str, title: str) -> str:
    """SVG of curves that are drawn, with words."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def table_by_rows(text: str) -> str:
    """ns per id by resident rows (benchmarks.table)."""
    rows = _titled(tables(text), "time per id by rows")
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for dim in sorted({int(row["dim"]) for row in rows}):
        mine = [row for row in rows if int(row["dim"]) == dim]
        for law, style in (("zipf", "-o"), ("uniform", "--s")):
            resident = [float(row["rows"]) for row in mine]
            axes.plot(resident, [float(row[f"ns_per_id_{law}"]) for row in mine], style, label=f"{dim} columns, {law}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    return _curves(figure, axes, "rows resident", "ns per id", "lookup and update, row-wise Adagrad, all cores")


def table_peers(text: str) -> str:
    """Time of a peer over ours (benchmarks.table --peer)."""
    rows = _titled(tables(text), "against FBGEMM")
    values = {f"{row['peer']}, {row['threads']} threads": float(row["ratio"]) for row in rows}
    return bars("time of a peer over ours; 1 is equal", "times", values, list(values))


def retrieval_curve(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """HR@10 by epoch (benchmarks.retrieval_ml1m), by model."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for name, epochs in curves.items():
        measured = [epoch for epoch in epochs if "hr_at_10" in epoch]
        axes.plot([e["epoch"] for e in measured], [e["hr_at_10"] for e in measured], "-o", markersize=3, label=name)
    return _curves(figure, axes, "epoch", "HR@10", "MovieLens-1M, the whole catalogue ranked")


def kept_plots() -> dict[str, str]:
    """SVG by name, of the results that the repository holds."""
    page = (RESULTS / "table.txt").read_text(encoding="utf-8")
    curves = {
        name: json.loads((RESULTS / f"retrieval_ml1m{file}_curve.json").read_text(encoding="utf-8"))
        for name, file in (("HSTU", ""), ("SASRec", "_sasrec"))
    }
    return {
        "table_versus_tfra": table_versus_tfra(page),
        "table_by_rows": table_by_rows(page),
        "table_peers": table_peers(page),
        "retrieval_ml1m": retrieval_curve(curves),
    }


def training_step(result: Mapping[str, Any]) -> str:
    """ms of a training step, by contender (benchmarks.train_step)."""
    values = {name[3:]: result[name] for name in result if re.fullmatch(r"ms_(?!p\d+_).*", name)}
    return bars("a training step of 26 features, two processes", "ms", values, [n for n in values if "ours" in n])


def op_cases(result: Mapping[str, Any]) -> str:
    """Time of the peer over that of the op, by case (benchmarks of single ops)."""
    values = {}
    for case in result["cases"]:
        axes = itertools.takewhile(lambda axis: axis != "peer", case)
        values[", ".join(f"{axis} {case[axis]}" for axis in axes)] = case["ratio"]
    return bars(f"{result['benchmark']}: time of the peer over ours", "times", values, list(values))


def plot_of(result: Mapping[str, Any]) -> str | None:
    """The plot of what a benchmark has written; None when there is none for it."""
    if "ms_ours" in result and "ms_tfra" in result:
        return training_step(result)
    if result.get("cases") and "ratio" in result["cases"][0]:
        return op_cases(result)
    return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FOLDER", help="where the SVG files go")
    parser.add_argument("results", type=pathlib.Path, nargs="*", help="JSON files; none: those of benchmarks/results")
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
