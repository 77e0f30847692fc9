"""Question: what do logits in segments cost and save, beside a gathered row for every negative?

    python -m benchmarks.negatives [--quick] [--json FILE]

A step computes loss and gradients of P positions, each with its own negatives from a table (step.py). A check comes
first: both forms must give the same loss and, in a smaller case, the same gradients. Peak memory is the memory that a
step adds, in a process of its own that returns freed memory to the system. For times the forms take turns.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks.harness import children, harness, processes
from benchmarks.negatives import step as negatives_step
from benchmarks.negatives import wire as negatives_wire
from benchmarks.negatives.step import DIM, ITEMS, RETURN_MEMORY, Case

NEGATIVES = (32, 64, 128)
QUICK_NEGATIVES = (128,)
POSITIONS, QUICK_POSITIONS = 4096, 2048
PEAK_PROCESSES = 3
# In float32, logits up to 20 are rounded by 20 * 2**-24, and losses are means of thousands.
LOSS_TOLERANCE = 1e-5


def check_gradients() -> None:
    """Compares both forms' gradients of a small case in float64. The table's gradients are summed by row."""
    case = Case(positions=96, negatives=16, items=300)
    results = {form: case.step(form)() for form in ("plain", "ours")}
    dense = {}
    for form, (_, of_query, values, rows) in results.items():
        dense[form] = np.zeros([300, DIM])
        np.add.at(dense[form], rows.numpy(), values.numpy())
        dense[form] = np.concatenate([dense[form], of_query.numpy()])
    harness.check_close("gradients", dense["ours"], dense["plain"], relative=1e-4, reason="float32 sums in other order")


def peak_bytes(**request: Any) -> float:
    """Returns the median over processes of the memory that a step adds. TensorFlow runs ops in varying orders."""
    module = negatives_step.__name__
    return float(np.median([children.ask(module, variables=RETURN_MEMORY, **request) for _ in range(PEAK_PROCESSES)]))


def measure(positions: int, negatives: int, repeats: int) -> dict[str, Any]:
    """Returns one record: losses, times, peaks, and the ratios of our form to the plain form."""
    case = Case(positions, negatives)
    steps = {form: case.step(form) for form in ("plain", "ours")}
    losses = {form: float(step()[0]) for form, step in steps.items()}
    harness.check_close("loss", losses["ours"], losses["plain"], relative=LOSS_TOLERANCE, reason="float32 logits to 20")
    half = float(case.step("ours", "float16")()[0])
    times = harness.measure(steps, warmup=1, repeats=repeats)
    rows = int(np.unique(case.negatives).size)
    del case, steps
    peaks = {
        name: peak_bytes(form=form, row_dtype=dtype, positions=positions, negatives=negatives)
        for name, form, dtype in (
            ("plain", "plain", "float32"),
            ("ours", "ours", "float32"),
            ("half", "ours", "float16"),
        )
    }
    return {
        "negatives": negatives,
        "positions": positions,
        "rows": rows,
        "dim": DIM,
        "loss_plain": losses["plain"],
        "loss_ours": losses["ours"],
        "loss_float16_rows": half,
        "ms_plain": 1e3 * times["plain"].median_s,
        "ms_ours": 1e3 * times["ours"].median_s,
        "step_time_ratio": times["ours"].median_s / times["plain"].median_s,
        "peak_bytes_plain": peaks["plain"],
        "peak_bytes_ours": peaks["ours"],
        "peak_bytes_float16_rows": peaks["half"],
        "peak_memory_ratio": peaks["ours"] / peaks["plain"],
    }


def wire_bytes() -> dict[str, Any]:
    """Returns the bytes of one step on 2 ranks with float32 and with float16 negatives, and their ratio.

    In float32 both features share an exchange, so that an id of both travels once. Hence the ratio is over all rows.
    """
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    command = [horovodrun, "-np", str(negatives_wire.RANKS), "--gloo", sys.executable, "-m", negatives_wire.__name__]
    done = processes.run(command, env=children.environment(), cwd=harness.ROOT)
    found = [line.partition(negatives_wire.MARK)[2] for line in done.stdout.splitlines() if negatives_wire.MARK in line]
    if done.returncode != 0 or not found:
        raise harness.CheckFailed(f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    answers = json.loads(found[0])
    payload = {
        dtype: sum(count for name, count in counts.items() if not name.endswith("ids"))
        for dtype, counts in answers.items()
    }
    return {
        "wire_bytes_float32": answers["float32"],
        "wire_bytes_float16": answers["float16"],
        "wire_ratio": payload["float16"] / payload["float32"],
    }


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    check_gradients()
    positions, repeats = (QUICK_POSITIONS, 5) if arguments.quick else (POSITIONS, 15)
    cases = [measure(positions, n, repeats) for n in (QUICK_NEGATIVES if arguments.quick else NEGATIVES)]
    last = cases[-1]
    harness.print_table(f"sampled negatives of {positions} positions out of {ITEMS} items", cases)
    wire = wire_bytes()
    for dtype in ("float32", "float16"):
        harness.print_table(f"bytes of a step on 2 ranks, negatives in {dtype}", [wire[f"wire_bytes_{dtype}"]])
    figures = {name: last[name] for name in ("peak_memory_ratio", "step_time_ratio")}
    harness.write_json(arguments.json, {"benchmark": "negatives", **figures, **wire, "cases": cases})


if __name__ == "__main__":
    harness.run(main)
