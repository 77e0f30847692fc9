"""What a FusedEmbedding makes of its arguments: the tables of its groups, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_fusedrec.config import TableConfig
from tf_fusedrec.embedding.group_lookup import GroupLookup
from tf_fusedrec.embedding.groups import Group
from tf_fusedrec.exchange.topology import Place
from tf_fusedrec.tables import ExternalTable, NativeTable, TfraTable


def make_table(
    layer_name: str, group: Group, config: Mapping[str, Any], place: Place
) -> NativeTable | TfraTable | ExternalTable:
    """The table of a group on this rank, as the layer's config says."""
    if group.external:
        mine = place.group
        return ExternalTable(f"{layer_name}/{group.name}", group.tables, mine.index, mine.size)
    if config["backend"] == "native":
        return NativeTable(
            f"{layer_name}/{group.name}",
            group.tables,
            seed=config["seed"],
            accumulate_steps=config["accumulate_steps"],
            average=config["gradient_op"] == "average",
            lookups_per_update=config["lookups_per_update"],
            averaged=place.averages,
            moment_scale=place.topology.scale_of_moments,
        )
    return TfraTable(
        f"{layer_name}/{group.name}",
        group.tables,
        key_encoding=config["key_encoding"],
        seed=config["seed"],
        init_capacity=config["init_capacity"],
        keep_reverse_map=config["keep_reverse_map"],
    )


def check_backend(backend: str, tables: Sequence[TableConfig], **counts: int) -> None:
    if backend not in ("native", "tfra"):
        raise ValueError(f"backend must be 'native' or 'tfra', got {backend!r}.")
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an int >= 1, got {count!r}.")
    if backend == "native":
        return
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{name} {count} needs backend='native'.")
    for table in tables:
        if table.stores_natively:
            raise ValueError(f"table {table.name!r} has {table.stores_natively}, which need backend='native'.")


def check_lanes(groups: Sequence[Group], backend: str) -> None:
    """Features of another output dtype travel beside the others, which native tables know."""
    for group in groups:
        spec = group.tables[0]
        dtypes = {feature.name: feature.output_dtype or spec.dtype for feature in group.features}
        own = [name for name, dtype in dtypes.items() if dtype != spec.dtype]
        if own and not group.external and backend != "native":
            raise ValueError(f"output_dtype of features {own} needs backend='native', got {backend!r}.")


def check_deferrable(name: str, config: Mapping[str, Any], groups: Sequence[GroupLookup], lookups: int) -> None:
    """Raises ValueError unless the lookups of that many steps may come before the update of the first."""
    if config["backend"] != "native":
        raise ValueError(
            f"lookups ahead of their step, or several before one update, need backend='native', and {name!r} has "
            f"{config['backend']!r}."
        )
    for lookup in groups:
        moves = isinstance(lookup.table, NativeTable) and lookup.table.moves_rows
        if moves and config["lookups_per_update"] < lookups:
            raise ValueError(
                f"tables {lookup.table.names} of {name!r} may evict or move rows (eviction, ttl, hot_after, "
                f"memory_budget or host_rows) between the lookups of {lookups} steps, which come before the update of "
                f"the first. Remedy: FusedEmbedding(lookups_per_update={lookups})."
            )
