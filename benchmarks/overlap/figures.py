"""The figures of benchmarks.overlap: from the turns of a phase to ratios, speeds, floors and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import harness
from benchmarks.overlap.floors import Parts, floor_ms
from benchmarks.overlap.variants import VARIANTS

# Name of a field: the figure and its variant.
FIELDS = {
    "exposed_ratio_frozen_M4": ("exposed_ratio", "frozen_M4"),
    "exposed_ratio_nested_M8": ("exposed_ratio", "nested_M8"),
    "speedup_frozen_M4": ("speedup", "frozen_M4"),
    "speedup_nested_M8": ("speedup", "nested_M8"),
    "speedup_nested_M16": ("speedup", "nested_M16"),
    "speedup_dual_lookup45": ("speedup", "dual_lookup45"),
    "speedup_pipelined6": ("speedup", "pipelined6"),
    "speedup_semi_async": ("speedup", "semi_async"),
    "speedup_2d": ("speedup", "2d"),
    "speedup_nested_2d": ("speedup", "nested_2d"),
    "speedup_nested_clustered": ("speedup", "nested_clustered"),
}
AT_OTHER_RATES = (
    "exposed_ratio_frozen_M4", "exposed_ratio_nested_M8", "speedup_frozen_M4", "speedup_nested_M8",
    "speedup_semi_async", "floor_ratio_worst",
)  # fmt: skip


def case(phase: Mapping[str, Any], answer: Mapping[str, Any], layers: int, ranks: int) -> dict[str, Any]:
    """Returns the figures of one phase, by variant.

    Args:
      phase: The phase as ranks.main took it.
      answer: The phase as ranks.main returned it.
      layers: Layers of the dense part.
      ranks: Number of ranks.
    """
    variants: dict[str, dict[str, float]] = {}
    for name, turns in answer["variants"].items():
        full, parts = turns["full"], Parts(**turns["bare"]["parts"])
        floor = floor_ms(
            VARIANTS[name].schedule, parts, compute=full["compute"], lookup=full["lookup"], layers=layers
        )  # fmt: skip
        variants[name] = {
            "ms": full["step"],
            "floor_ms": floor,
            "floor_ratio": full["step"] / floor,
            "exposed_ms": full["exposed"],
            "exchange_alone_ms": parts.exchange,
            "exposed_ratio": full["exposed"] / parts.exchange if parts.exchange else 0.0,
            "compute_ms": full["compute"],
            "lookup_ms": full["lookup"],
            "free_ms": full["free"],
            "cpu_ms": full["cpu"],
            "cores": ranks * full["cpu"] / full["step"],
        }
    for name, figures in variants.items():
        baseline = variants.get(VARIANTS[name].baseline)
        if baseline is not None:
            figures["speedup"] = baseline["ms"] / figures["ms"]
    sync = variants["sync"]
    ratio = sync["compute_ms"] / sync["exchange_alone_ms"] if sync["exchange_alone_ms"] else None
    return {
        "rate": phase["rate"], "ratio": ratio, "device_cores": 1 / answer["device"], "ranks": ranks,
        "variants": variants,
        "parts": {name: turns["bare"]["parts"] for name, turns in answer["variants"].items()},
    }  # fmt: skip


def fields(one: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Returns FIELDS of the case at the main rate. A field is None without root, or where its variant did not run."""
    variants = {} if one is None else one["variants"]
    found = {
        field: variants[variant][figure] if variant in variants else None for field, (figure, variant) in FIELDS.items()
    }
    return {**found, "floor_ratio_worst": max((figures["floor_ratio"] for figures in variants.values()), default=None)}


def fields_at(rate: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns AT_OTHER_RATES of the case at this rate, with the rate behind their names. All are None without it."""
    found = fields(next((one for one in cases if one["rate"] == rate), None))
    return {f"{field}_{rate}": found[field] for field in AT_OTHER_RATES}


def show(one: Mapping[str, Any]) -> None:
    """Prints a case: a variant per line."""
    columns = {
        "ms": "ms", "speedup": "times sync", "floor_ms": "floor", "floor_ratio": "ms / floor",
        "exchange_alone_ms": "exchange alone", "exposed_ms": "exposed", "exposed_ratio": "exposed ratio",
        "compute_ms": "compute", "lookup_ms": "lookup", "free_ms": "free", "cpu_ms": "cpu per rank",
        "cores": "cores of all",
    }  # fmt: skip
    rows = [
        {"variant": name, **{title: figures.get(column, "-") for column, title in columns.items()}}
        for name, figures in one["variants"].items()
    ]
    cores = f"{one['device_cores']:.3g}"
    print(f"\nCompute is a stream of ops that take time and no core. The device is as fast as {cores} of our cores.")
    ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
    where = "one host" if one["rate"] is None else f"two hosts, {one['rate']} between them"
    harness.print_table(f"{one['ranks']} ranks, {where}; compute : exchange {ratio}; ms of a step and rank", rows)
    harness.print_table(
        "exchange alone, ms by kind", [{"variant": name, **parts} for name, parts in one["parts"].items()]
    )
