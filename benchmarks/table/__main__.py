"""Question: how fast is the native table beside TFRA, beside the memory, and while it grows?

    python -m benchmarks.table [--quick] [--json FILE] [--peer PYTHON]

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

--peer names an interpreter with torch and fbgemm-gpu-cpu. benchmarks/results/table.txt is the printed page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import harness, processes
from benchmarks.table import cases, peers
from benchmarks.table.work import DIM, IDS_PER_STEP, ZIPF_ALPHA

ROWS = (10**6, 10**7)
THREADS = (1, 2)
SCALING_QUICK = [(10**4, 4), (10**5, 4), (10**6, 4), (10**7, 4)]
SCALING = [*SCALING_QUICK, (10**8, 4), (10**4, DIM), (10**5, DIM), (10**6, DIM), (10**7, DIM)]


def show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Prints measured records as a table, and a line with the reason for each skipped record."""
    harness.print_table(title, [record for record in records if "skipped" not in record])
    for record in records:
        if "skipped" in record:
            case = ", ".join(f"{name} {value}" for name, value in record.items() if name != "skipped")
            print(f"  skipped: {case}: {record['skipped']}", flush=True)


def summary(
    versus: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]], growth: Mapping[str, Any],
    against: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields that the module's docstring names."""
    fields: dict[str, Any] = {}
    for rule in ("adagrad", "adam"):
        fields[f"ratio_vs_tfra_{rule}"] = min(c["ratio"] for c in versus if c["optimizer"] == rule and "ratio" in c)
    for threads in THREADS:
        name = f"ids_per_s_{threads}thread" + "s" * (threads > 1)
        fields[name] = min(rate["ids_per_s"] for rate in rates if rate["threads"] == threads)
    for peer in against:
        name = f"ratio_vs_{peer['peer']}"
        fields[name] = min(fields.get(name, peer["ratio"]), peer["ratio"])
    fields["ratio_vs_memory_floor"] = min(rate["ratio_vs_memory_floor"] for rate in rates)
    fields["bytes_per_row_overhead"] = max(rate["bytes_per_row_overhead"] for rate in rates)
    return fields | {name: growth[name] for name in ("max_growth_pause_ms", "copy_rows_ms")}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch and fbgemm-gpu-cpu to compare with")
    arguments = parser.parse_args()
    repeats, results = 20 if arguments.quick else 60, dict[str, Any]()
    print(f"table: {IDS_PER_STEP} ids per step, zipf({ZIPF_ALPHA}), {DIM} columns unless said")
    print(f"on: {harness.describe_machine()}")
    if arguments.peer:
        results["peers"] = [
            record for threads in THREADS
            for record in peers.compare(arguments.peer, rows=ROWS[0], threads=threads, repeats=repeats // 4)
        ]  # fmt: skip
        show("against FBGEMM (CPU) and torch, the same rule and form of answer", results["peers"])
    results["versus_tfra"] = [
        processes.ask(cases.versus_tfra, rows=rows, optimizer=optimizer, repeats=repeats)
        for rows in ROWS for optimizer in ("adagrad", "adam")
    ]  # fmt: skip
    show("against TFRA, the same rule, all cores", results["versus_tfra"])
    results["rates"] = [
        processes.ask(cases.rate, rows=rows, threads=threads, repeats=2 * repeats)
        for rows in ROWS for threads in THREADS
    ]  # fmt: skip
    show("ours, row-wise Adagrad, by threads", results["rates"])
    results["growth"] = processes.ask(cases.growth, rows=ROWS[-1], repeats=3)
    show("longest pause of a step while the table grows", [results["growth"]])
    sizes = SCALING_QUICK if arguments.quick else SCALING
    results["scaling"] = [processes.ask(cases.scaling, rows=rows, dim=dim, repeats=repeats) for rows, dim in sizes]
    show("time per id by rows resident, row-wise Adagrad, all cores", results["scaling"])
    fields = summary(results["versus_tfra"], results["rates"], results["growth"], results.get("peers", []))
    harness.print_fields("fields", fields)
    harness.write_json(arguments.json, {**fields, **results})


if __name__ == "__main__":
    processes.program(main)
