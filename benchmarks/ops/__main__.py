"""Question: what does one op of this project cost beside a plain peer with the same result, and beside its bound?

    python -m benchmarks.ops [NAME ...] [--device cpu|gpu] [--quick] [--json FILE]

On a processor (cases.py): segment_unique, rank_partition, recovery, fuse_ids, join_messages, initial_rows, window_rows,
user_states; without NAME all of them. `cases` has a record for each, with the fields of cases.measure.

On a GPU (gpu.py), without TensorFlow: segment_unique, recovery, attention, bias_attention, table.
`results` has a line for each call and peer. `bytes`, `flops` and `host_bytes` are its least work. `bound_us` is the
longest of the three at the rates in `rates`, measured on the same device, `bound_by` names it, and `fraction_of_bound`
is bound_us / us (harness/gpu.py). `left_out` names peers that are not installed.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.harness import harness, processes


def on_processor(names: Sequence[str], quick: bool, path: pathlib.Path | None) -> None:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # for TFRA
    from benchmarks.ops import cases

    records = []
    for name in chosen(names, cases.CASES):
        found = cases.measure(name, quick)
        harness.print_table(f"{name} against {found[0]['peer']}", found)
        records += [{"op": name, **record} for record in found]
    harness.write_json(path, {"benchmark": ", ".join(names) or "ops", "cases": records})


def on_gpu(names: Sequence[str], quick: bool, path: pathlib.Path | None) -> None:
    from benchmarks.harness import gpu
    from benchmarks.ops import gpu as cases

    of_names = [cases.CASES[name] for name in chosen(names, cases.CASES)]
    kernels = gpu.open_kernels()
    libraries, left_out = gpu.libraries(dict.fromkeys(library for case in of_names for library in case.libraries))
    rates = gpu.measured_rates()
    head = {"device": gpu.device(), "rates": rates._asdict(), "left_out": left_out}
    results: list[dict[str, Any]] = []
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", flush=True)
    for case in of_names:
        case.check(kernels)
        for size in case.quick if quick else case.sizes:
            for measure in case.measures:
                lines = measure(kernels, rates, libraries, *size)
                harness.print_table(f"{measure.__name__} {size}", lines)
                results += lines
                harness.write_json(path, {**head, "results": results})  # a run that is cut off leaves what it has


def chosen(names: Sequence[str], known: Collection[str]) -> Collection[str]:
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"error: NAME {', '.join(unknown)} has no case on this device. Use {', '.join(known)}.")
    return names or known


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="op; all by default")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    arguments = parser.parse_args()
    run = on_processor if arguments.device == "cpu" else on_gpu
    run(arguments.names, arguments.quick, arguments.json)


if __name__ == "__main__":
    processes.program(main)
