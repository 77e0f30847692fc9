"""The tables of docs/gpu.md that say what works where, from custom_ops/hash_table/options.h
and tf_fusedrec/tables/places.py.

tests/schedules/test_places.py makes a layer and a model for every cell of both tables together.
"""

from __future__ import annotations

import dataclasses

from tf_fusedrec.config import RECORDS, TableConfig
from tf_fusedrec.ops.table import table_schema
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, Schedule, SemiAsync, Sync
from tf_fusedrec.tables.places import HOST_ROWS, PLACES, Place

# Options that a TableConfig needs in addition to the first one. A file tier is one option of two fields.
TOGETHER = {
    "storage.stochastic_rounding": ("storage.dtype",),
    "storage.hot_after": ("storage.dtype",),
    "limits.eviction": ("limits.max_rows_per_rank",),
    "limits.max_candidates_per_rank": ("limits.admission_count",),
    "limits.frequency_decay_steps": ("limits.eviction", "limits.max_rows_per_rank"),
    "limits.exact_eviction": ("limits.eviction", "limits.max_rows_per_rank"),
    "tier.memory_budget_per_rank": ("tier.folder",),
    "tier.folder": ("tier.memory_budget_per_rank",),
    "external.table": ("external.folder",),
    "tier.hot_rows_per_rank": ("tier.host_rows",),
}
OPTIONS = [
    path
    for field in dataclasses.fields(TableConfig)
    for path in (
        [f"{field.name}.{inner.name}" for inner in dataclasses.fields(RECORDS[field.name])]
        if field.name in RECORDS
        else [field.name]
    )
    if path != "tier.host_rows"
]
TOPOLOGIES = ("one group", "gradient_sync", "weight_sync")
SCHEDULES = {
    "sync": Sync(),
    "FrozenWindow(2)": FrozenWindow(2),
    "DualBuffer()": DualBuffer(),
    "Nested(2)": Nested(2),
    "SemiAsync()": SemiAsync(),
    "Pipelined(6)": Pipelined(6),
}
_HEAD = ["CPU", "device", "`host_rows`"]


def option_works(option: str, place: Place, topology: str) -> bool:
    """Returns whether tables with this option can be made at a place under a topology."""
    if option.startswith("external.") and place is HOST_ROWS:
        return False  # rows of another model have no tier
    lacking = {place.name, *(["averaged"] if topology == "weight_sync" else [])}
    paths = {option, *TOGETHER.get(option, ())}
    return not any(lacking & {*table_schema().get(path, {"lacks": ()})["lacks"]} for path in paths)


def schedule_works(schedule: Schedule, place: Place, topology: str) -> bool:
    """Returns whether tables without options can train at a place under a schedule and a topology."""
    if topology == "weight_sync" and place.name in table_schema()["averaged"]["lacks"]:
        return False
    return place.lookups_per_update is None or schedule.stages.lookups_per_update <= place.lookups_per_update


def block() -> str:
    """Both tables; options that work everywhere have no row."""
    schedules = [
        [f"`{name}`", *(_cell([schedule_works(one, place, t) for t in TOPOLOGIES]) for place in PLACES)]
        for name, one in SCHEDULES.items()
    ]
    options = [
        [f"`{name}`", *(_cell([option_works(name, place, t) for t in TOPOLOGIES]) for place in PLACES)]
        for name in OPTIONS
    ]
    differ = [row for row in options if {*row[1:]} != {"works"}]
    return "\n".join([*_table("schedule", schedules), "", *_table("option of `TableConfig`", differ)])


def _cell(works: list[bool]) -> str:
    """works: by topology."""
    if all(works):
        return "works"
    return "not under `weight_sync`" if any(works) else "refused"


def _table(what: str, rows: list[list[str]]) -> list[str]:
    lines = [[what, *_HEAD], ["---"] * 4, *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
