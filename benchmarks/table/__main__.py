"""Question: how fast is the native table beside TFRA, beside the memory, and while it grows?

    python -m benchmarks.table [--quick] [--json FILE] [--ablation] [--peer PYTHON] [--keep FOLDER]

A step takes 81,920 ids by zipf(1.05) out of 1 or 10 million resident rows of 64 columns. It returns their rows [N, D]
in the order of the ids, takes gradients [N, D], and updates the table. Our variant is FusedEmbedding with one table.
TFRA's is its Keras layer over a CuckooHashTable, under its DynamicEmbeddingOptimizer. Rates count ids with duplicates.
Every case runs in a process of its own, with its variants in turns. The results are compared before any timing.

Fields of the JSON file, each the worst over 1 and 10 million rows (and, for the floor, over 1 and 2 threads):
  ratio_vs_tfra_adagrad, ratio_vs_tfra_adam   time of TFRA's step / time of ours, under the same rule
  ids_per_s_1thread, ids_per_s_2threads       our rate under row-wise Adagrad
  ratio_vs_memory_floor                       time to copy as many bytes as a step must move / time of our step
  bytes_per_row_overhead                      bytes mapped for keys and rows, beyond row and slots
  ratio_vs_fbgemm_sequence, _fbgemm_pooled, _torch_sgd, _torch_adam: with --peer, under the same rule
  max_growth_pause_ms, copy_rows_ms           longest step beyond the median while 10 million rows are inserted; the
                                              time to copy these rows

--peer names an interpreter with torch, fbgemm-gpu-cpu and psutil. --ablation also runs dedup.py and dimensions.py.
--keep names a folder for the printed tables.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import children, harness, machine, processes
from benchmarks.table import peers as table_peers
from benchmarks.table.work import DIM, IDS_PER_STEP, ZIPF_ALPHA

ROWS = (10**6, 10**7)
THREADS = (1, 2)
SCALING_QUICK = [(10**4, 4), (10**5, 4), (10**6, 4), (10**7, 4)]
SCALING = [*SCALING_QUICK, (10**8, 4), (10**4, DIM), (10**5, DIM), (10**6, DIM), (10**7, DIM)]
ABLATIONS = ("dedup", "dimensions")


class Arguments(NamedTuple):
    """The command line."""

    quick: bool
    json: pathlib.Path | None
    ablation: bool
    peer: str | None
    keep: pathlib.Path | None


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--ablation", action="store_true", help="also run table.dedup and table.dimensions")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch and fbgemm-gpu-cpu to compare with")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="also write the printed tables there")
    return Arguments(**vars(parser.parse_args(argv)))


class Page:
    """Prints lines and tables, and keeps their text."""

    def __init__(self) -> None:
        self.text = ""

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.text += text + "\n"

    def table(self, title: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Prints measured records as a table, and a line with the reason for each skipped record."""
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            harness.print_table(title, [record for record in records if "skipped" not in record])
        self.line(captured.getvalue().rstrip("\n"))
        for record in records:
            if "skipped" in record:
                case = ", ".join(f"{name} {value}" for name, value in record.items() if name != "skipped")
                self.line(f"  skipped: {case}: {record['skipped']}")


def summary(
    versus: Sequence[Mapping[str, Any]],
    rates: Sequence[Mapping[str, Any]],
    growth: Mapping[str, Any],
    peers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the fields that the module's docstring names."""
    fields: dict[str, Any] = {}
    for rule in ("adagrad", "adam"):
        fields[f"ratio_vs_tfra_{rule}"] = min(c["ratio"] for c in versus if c["optimizer"] == rule and "ratio" in c)
    for threads in THREADS:
        name = f"ids_per_s_{threads}thread" + "s" * (threads > 1)
        fields[name] = min(rate["ids_per_s"] for rate in rates if rate["threads"] == threads)
    for peer in peers:
        name = f"ratio_vs_{peer['peer']}"
        fields[name] = min(fields.get(name, peer["ratio"]), peer["ratio"])
    return {
        **fields,
        "ratio_vs_memory_floor": min(rate["ratio_vs_memory_floor"] for rate in rates),
        "bytes_per_row_overhead": max(rate["bytes_per_row_overhead"] for rate in rates),
        "max_growth_pause_ms": growth["max_growth_pause_ms"],
        "copy_rows_ms": growth["copy_rows_ms"],
    }


def show_rates(page: Page, rates: Sequence[Mapping[str, Any]]) -> None:
    """Prints three tables: rates, bytes of the floor, times of stages."""
    parts = ("floor_bytes", "stages_ms")
    page.table(
        "ours, row-wise Adagrad, by threads",
        [{name: value for name, value in rate.items() if name not in parts} for rate in rates],
    )
    page.table(
        "bytes of the memory floor, MB per step: ids read, a cache line of keys per distinct id, distinct rows read, "
        "rows written, gradients read, rows and slots of the update read and written",
        [
            {"resident": rate["rows"], **{part: count / 1e6 for part, count in rate["floor_bytes"].items()}}
            for rate in rates
            if rate["threads"] == THREADS[0]
        ],
    )
    by_case = {f"{rate['rows']:.0e} rows, {rate['threads']} threads": rate["stages_ms"] for rate in rates}
    page.table(
        "ms that each stage adds to the step",
        [
            {"stage": stage, **{case: ms.get(stage, 0.0) for case, ms in by_case.items()}}
            for stage in rates[0]["stages_ms"]
        ],
    )


def run_ablation(module: str, quick: bool) -> dict[str, Any]:
    """Runs a benchmark that starts ranks of its own. Returns {"benchmark": title, "cases": [...]}."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "results.json"
        command = [sys.executable, "-m", f"benchmarks.table.{module}", "--json", str(path), *["--quick"] * quick]
        done = processes.run(command, env=children.environment(), cwd=harness.ROOT)
        if done.returncode != 0:
            raise harness.CheckFailed(
                f"benchmarks.table.{module} ended with code {done.returncode}:\n{done.stdout[-3000:]}"
            )
        return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    arguments = parse_arguments()
    page, results = Page(), dict[str, Any]()
    page.line(f"table: {IDS_PER_STEP} ids per step, zipf({ZIPF_ALPHA}), {DIM} columns unless said")
    page.line(f"on: {machine.describe()}")
    repeats = 20 if arguments.quick else 60
    results["versus_tfra"] = versus = [
        children.ask("benchmarks.table.versus_tfra", rows=rows, optimizer=optimizer, repeats=repeats)
        for rows in ROWS for optimizer in ("adagrad", "adam")
    ]  # fmt: skip
    page.table("against TFRA, the same rule, all cores", versus)
    results["rates"] = rates = [
        children.ask("benchmarks.table.rate", rows=rows, threads=threads, repeats=2 * repeats)
        for rows in ROWS for threads in THREADS
    ]  # fmt: skip
    show_rates(page, rates)
    results["growth"] = growth = children.ask("benchmarks.table.growth", rows=ROWS[-1], repeats=3)
    page.table("longest pause of a step while the table grows", [growth])
    results["scaling"] = [
        children.ask("benchmarks.table.scaling", rows=rows, dim=dim, repeats=repeats)
        for rows, dim in (SCALING_QUICK if arguments.quick else SCALING)
    ]  # fmt: skip
    page.table("time per id by rows resident, row-wise Adagrad, all cores", results["scaling"])
    if arguments.peer:
        results["peers"] = _peers(page, arguments.peer, repeats)
    _keep(arguments.keep, "table.txt", page)
    if arguments.ablation:
        ablation = Page()
        ablation.line(f"on {machine.describe()}")
        for module in ABLATIONS:
            found = run_ablation(module, arguments.quick)
            results[f"table_{module}"] = found["cases"]
            ablation.table(found["benchmark"], found["cases"])
        _keep(arguments.keep, "printed/table_ablation.txt", ablation)
    fields = summary(versus, rates, growth, results.get("peers", []))
    harness.print_table("fields", [{"field": name, "value": value} for name, value in fields.items()])
    harness.write_json(arguments.json, {**fields, **results})


def _peers(page: Page, python: str, repeats: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for threads in THREADS:
        found = table_peers.compare(python, rows=ROWS[0], threads=threads, repeats=repeats // 4)
        if isinstance(found, str):
            page.line(f"peers skipped, since the interpreter lacks them: {found}")
            return []
        records += found
    page.table("against FBGEMM (CPU) and torch, the same rule and form of answer", records)
    return records


def _keep(folder: pathlib.Path | None, name: str, page: Page) -> None:
    if folder is not None:
        where = harness.environment()
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{page.text}\nload {where['load_average']}, commit {where['commit']}\n", encoding="utf-8")


if __name__ == "__main__":
    harness.run(main)
