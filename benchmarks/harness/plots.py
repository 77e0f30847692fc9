"""The plots of benchmarks/results as SVG text, which tools.docs.generate writes to docs/img.

A plot reads the fields of its benchmark by name and holds no figure of its own.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

from benchmarks.harness import harness

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = harness.ROOT / "benchmarks/results"
INK, PEER = "#1f77b4", "#b0b0b0"


def svg(figure: Any) -> str:
    """Returns the figure as SVG text, which is equal for equal data."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tf_fusedrec"}):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return stream.getvalue()


def bars(title: str, unit: str, values: Mapping[str, float], ours: Sequence[str]) -> str:
    """Draws one horizontal bar with its number per name. The names in `ours` are in colour."""
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
    """Returns the rows of the tables that harness.print_table wrote, by title. Two spaces or more part the columns."""
    found: dict[str, list[dict[str, str]]] = {}
    for block in text.split("\n\n"):
        title, *lines = block.strip("\n").splitlines()
        cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
        found[title] = [dict(zip(cells[0], row)) for row in cells[1:] if len(row) == len(cells[0])]
    return found


def _titled(page: Mapping[str, list[dict[str, str]]], beginning: str) -> list[dict[str, str]]:
    return next((rows for title, rows in page.items() if title.startswith(beginning)), [])


def table_versus_tfra(text: str) -> str:
    """Draws the ms of a step of one table, ours and TFRA's (benchmarks.table)."""
    values = {}
    for row in _titled(tables(text), "against TFRA"):
        what = f"{float(row['rows']) / 1e6:g} M rows, {row['optimizer']}"
        values[f"{what}: TFRA"], values[f"{what}: ours"] = float(row["ms_tfra"]), float(row["ms_ours"])
    return bars("a step of one table, 81,920 ids", "ms", values, [name for name in values if name.endswith("ours")])


def _curves(figure: Any, axes: Any, x: str, y: str, title: str) -> str:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def table_by_rows(text: str) -> str:
    """Draws the ns per id by resident rows (benchmarks.table)."""
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
    """Draws the time of each peer over ours (benchmarks.table --peer)."""
    rows = _titled(tables(text), "against FBGEMM")
    values = {f"{row['peer']}, {row['threads']} threads": float(row["ratio"]) for row in rows}
    return bars("time of a peer over ours; 1 is equal", "times", values, list(values))


def retrieval_curve(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Draws HR@10 by epoch and model (benchmarks.retrieval_ml1m)."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for name, epochs in curves.items():
        measured = [epoch for epoch in epochs if "hr_at_10" in epoch]
        axes.plot([e["epoch"] for e in measured], [e["hr_at_10"] for e in measured], "-o", markersize=3, label=name)
    return _curves(figure, axes, "epoch", "HR@10", "MovieLens-1M, the whole catalogue ranked")


def validation_curves(result: Mapping[str, Any]) -> str:
    """Draws the validation HR@10 by epoch, one curve per variant and seed (benchmarks.schedule_quality)."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    variants = list(dict.fromkeys(curve["variant"] for curve in result["curves"]))
    styles = ("-", "--", ":")
    seeds = sorted({curve["seed"] for curve in result["curves"]})
    for curve in result["curves"]:
        epochs = [entry["epoch"] for entry in curve["epochs"]]
        hits = [entry["validation"]["hr@10"] for entry in curve["epochs"]]
        style, label = styles[seeds.index(curve["seed"])], f"{curve['variant']}, seed {curve['seed']}"
        axes.plot(epochs, hits, style, color=f"C{variants.index(curve['variant'])}", linewidth=1, label=label)
    return _curves(figure, axes, "epoch", "validation HR@10", "MovieLens-1M, until validation stops improving")


def second_moments(growth: Sequence[Mapping[str, float]]) -> str:
    """Draws the mean second moment by epoch and number of groups, beside Proposition 1 of 2D sparse parallelism."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    epochs = [entry["epoch"] for entry in growth]
    for name in [name for name in growth[0] if name.startswith("measured_")]:
        groups = int(name[len("measured_") :])
        axes.plot(epochs, [entry[name] for entry in growth], label=f"measured, groups: {groups}")
    one = [entry["measured_1"] for entry in growth]
    axes.fill_between(epochs, one, [4 * value for value in one], color=PEER, alpha=0.25, label="bounds of 4 groups")
    if "expected_4" in growth[0]:
        expected = [entry["expected_4"] for entry in growth]
        axes.plot(epochs, expected, "k--", label="expected of 4 groups from 1 and 2")
    axes.set_ylim(bottom=0)
    return _curves(
        figure, axes, "epoch", "mean v of all rows", "row-wise Adagrad, moments scaled by the number of groups"
    )


def quality_by_flops(result: Mapping[str, Any]) -> str:
    """Draws the GAUC of the click task by forward FLOPs, one curve per model (benchmarks.quality --sizes)."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for model in dict.fromkeys(entry["model"] for entry in result["sizes"]):
        mine = [entry for entry in result["sizes"] if entry["model"] == model]
        axes.plot([one["forward_mflops"] for one in mine], [one["gauc"] for one in mine], "-o", label=model)
        for one in mine:
            at = one["forward_mflops"], one["gauc"]
            axes.annotate(f"{one['gauc']:.4f}", at, (0, 5), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xscale("log")
    return _curves(figure, axes, "MFLOPs forward, of a row of a user's exposures", "GAUC", f"{result['data']}, clicks")


def quality_by_step(result: Mapping[str, Any]) -> str:
    """Draws the GAUC of the click task by step, one curve per table and seed (benchmarks.quality --tables)."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    name = f"{result['tasks'][0]}_gauc"
    for curve in result["curves"]:
        steps, gauc = zip(*((point["step"], point[name]) for point in curve["points"]))
        label = f"{'ours' if curve['backend'] == 'native' else 'TFRA'}, seed {curve['seed']}"
        axes.plot(steps, gauc, "-o" if curve["seed"] == 0 else "--", markersize=3, label=label)
    return _curves(figure, axes, "step", "GAUC", f"{result['data']}, clicks, by the table that holds the rows")


def kept_plots(parse: Callable[[str], Any] = json.loads) -> dict[str, str]:
    def result(name: str) -> Any:
        return parse((RESULTS / f"{name}.json").read_text(encoding="utf-8"))

    page, quality = (RESULTS / "table.txt").read_text(encoding="utf-8"), result("schedule_quality")
    models = {"HSTU": "", "HSTU-large": "_hstu_large", "SASRec": "_sasrec"}
    return {
        "table_versus_tfra": table_versus_tfra(page),
        "table_by_rows": table_by_rows(page),
        "table_peers": table_peers(page),
        "retrieval_ml1m": retrieval_curve({m: result(f"curves/retrieval_ml1m{end}") for m, end in models.items()}),
        "schedule_quality": validation_curves(quality),
        "second_moments": second_moments(quality["growth"]),
        "overlap_scaling": weak_scaling(result("overlap")["weak_scaling"]),
        "ranking_sizes_kuairand": quality_by_flops(result("sizes/ranking_kuairand_sizes")),
        "ranking_sizes_ml1m": quality_by_flops(result("sizes/ranking_ml1m_sizes")),
        "convergence": quality_by_step(result("convergence")),
    }


def weak_scaling(rows: Sequence[Mapping[str, float]]) -> str:
    """Draws the ms of a step by number of ranks, one curve per schedule (benchmarks.overlap)."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    ranks = [str(row["ranks"]) for row in rows]
    for column in [name for name in rows[0] if name.startswith("ms_")]:
        axes.plot(ranks, [row[column] for row in rows], "-o", label=column[len("ms_") :])
        for x, row in zip(ranks, rows):
            axes.annotate(f"{row[column]:.3g}", (x, row[column]), (0, 5), textcoords="offset points", ha="center")
    axes.set_ylim(bottom=0)
    return _curves(figure, axes, "ranks on two hosts, equal work for each", "ms", "a step, one cable for all ranks")
