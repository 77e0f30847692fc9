"""The quality of schedules and groups in docs/schedules.md: the finished jobs of benchmarks.schedule_quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_VARIANTS = {"sync": '`"sync"`', "semi_async": "`SemiAsync()`", "nested_M4": "`Nested(4)`"}
_COLUMNS = {"HR@10": "hr_at_10", "NDCG@10": "ndcg_at_10", "NE": "ne"}


def block(results: Mapping[str, Any]) -> str:
    """Returns a table of variants, the missing jobs, the plots that have curves, and the figures after three epochs."""
    return "\n".join([*_lines(results["schedule_quality"]), "", early(results["schedule_quality_3_epochs"])])


def early(result: Mapping[str, Any]) -> str:
    """Returns a sentence with the differences of HR@10 after three epochs, of an earlier form of the benchmark."""
    variants = {"weight_sync_c1": "weight_sync_g2_c1", "weight_sync_c2": "weight_sync_g2_c2"}
    said = [
        f"{name_of(variants.get(row['variant'], row['variant']))}: {row['hr_at_10_difference']:+.3f} "
        f"[{row['hr_at_10_low']:+.3f}, {row['hr_at_10_high']:+.3f}]"
        for row in result["variants"]
        if not row["variant"].startswith("sync")
    ]
    return (
        f"After {result['epochs']} epochs on {result['ranks']} ranks with Adam, an earlier form of the benchmark found "
        f"these differences of HR@10 from {result['variants'][0]['hr_at_10']:.3f}: {'; '.join(said)}."
    )


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| variant | seeds | best epochs | " + " | ".join(_COLUMNS) + " |"
    yield "|---|---|---|" + "---|" * len(_COLUMNS)
    for variant, row in result["variants"].items():
        cells = [name_of(variant), *(", ".join(map(str, row[key])) for key in ("seeds", "epochs"))]
        cells += [figure(row, column, variant) for column in _COLUMNS.values()]
        yield "| " + " | ".join(cells) + " |"
    if result["missing"]:
        yield ""
        yield f"Not finished yet: {'; '.join(_jobs(result['missing']))}."
    yield ""
    yield "![Validation HR@10 by epoch](img/schedule_quality.svg)"
    if "measured_2" in (result["growth"] or [{}])[0]:
        yield ""
        yield "![Mean second moment by epoch](img/second_moments.svg)"


def _jobs(missing: Sequence[str]) -> Iterator[str]:
    """Yields the missing seeds of every variant, from names such as "sync seed 1"."""
    parts = [name.split(" seed ") for name in missing]
    for variant in dict.fromkeys(variant for variant, _ in parts):
        yield f"{name_of(variant)} (seed {', '.join(seed for one, seed in parts if one == variant)})"


def name_of(variant: str) -> str:
    """Returns the variant in words: "weight_sync_g2_c1" is "2 groups, `weight_sync`, moments scaled by 1"."""
    if variant in _VARIANTS:
        return _VARIANTS[variant]
    groups, scale = (part[1:] for part in variant.removeprefix("weight_sync_").split("_"))
    return f"{groups} groups, `weight_sync`, moments scaled by {scale}"


def figure(row: Mapping[str, Any], column: str, variant: str) -> str:
    """Returns the mean over the seeds and, except for `sync`, the difference from `sync` with its interval."""
    shown = f"{row[column]:.3f}"
    if variant != "sync" and f"{column}_difference" in row:
        low, high = (f"{row[f'{column}_{end}']:+.3f}" for end in ("low", "high"))
        shown += f"; {row[f'{column}_difference']:+.3f} [{low}, {high}]"
    return shown
