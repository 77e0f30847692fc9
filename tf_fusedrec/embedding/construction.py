"""The tables of a FusedEmbedding's groups, made from the layer's config, and checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.embedding.group_lookup import GroupLookup
from tf_fusedrec.embedding.groups import Group
from tf_fusedrec.embedding.replicas import Replica
from tf_fusedrec.embedding.routed_ids import LookupRequest
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.optimizers import Rule
from tf_fusedrec.tables import NativeTable, Table, external_table
from tf_fusedrec.tables.table import backend_table


def make_lookup(layer_name: str, group: Group, config: Mapping[str, Any], layout: RankLayout) -> GroupLookup:
    """The lookup of a group with its table on this rank, as the layer's config says."""
    scale = _gradient_scale(config["gradient_op"], layout.loss_ranks.size)
    wire = None if config["wire_dtype"] is None else tf.as_dtype(config["wire_dtype"])
    table = _make_table(layer_name, group, config, layout)
    replica = None
    if layout.averages and isinstance(table, NativeTable) and not group.external:
        replica = Replica(table, layout, f"{layer_name}.{group.name}.average")
    return GroupLookup(layer_name, group, table, scale, layout, wire, replica)


def _make_table(layer_name: str, group: Group, config: Mapping[str, Any], layout: RankLayout) -> Table:
    name = f"{layer_name}/{group.name}"
    if group.external:
        return external_table(name, group.tables, layout.group.index, layout.group.size)
    if config["backend"] == "native":
        return NativeTable(
            name,
            group.tables,
            seed=config["seed"],
            accumulate_steps=config["accumulate_steps"],
            average=config["gradient_op"] == "average",
            lookups_per_update=config["lookups_per_update"],
            averaged=layout.averages,
            moment_scale=layout.topology.scale_of_moments,
        )
    return backend_table(config["backend"])(
        name,
        group.tables,
        key_encoding=config["key_encoding"],
        seed=config["seed"],
        init_capacity=config["init_capacity"],
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
        if isinstance(table.optimizer, Rule):
            raise ValueError(
                f"table {table.name!r} has optimizers.{type(table.optimizer).__name__} of tf_fusedrec, which needs "
                "backend='native'. Backend 'tfra' takes a tf_keras or TF1 optimizer, such as keras.optimizers.Adam."
            )
    backend_table(backend)


def check_deferrable(layer_name: str, config: Mapping[str, Any], groups: Sequence[GroupLookup], steps: int) -> None:
    """Raises ValueError unless the lookups of `steps` steps may come before the update of the first."""
    for lookup in groups:
        table = lookup.table
        if not table.can_defer:
            raise ValueError(
                f"lookups ahead of their step, or several before one update, need backend='native', and "
                f"{layer_name!r} has {config['backend']!r}."
            )
        most = table.most_lookups_per_update
        if most is not None and steps > most:
            raise ValueError(
                f"tables {table.names} of {layer_name!r} have host_rows on a GPU, which holds the rows of one lookup. "
                f"The lookups of {steps} steps come before the update of the first. Remedy: a schedule whose rows "
                "are fresh, such as DualBuffer(), or make the layer under tf.device('/CPU:0')."
            )
        if table.moves_rows and config["lookups_per_update"] < steps:
            raise ValueError(
                f"tables {table.names} of {layer_name!r} may evict or move rows (eviction, ttl, hot_after "
                f"or memory_budget). The lookups of {steps} steps come before the update of the first. "
                f"Remedy: FusedEmbedding(lookups_per_update={steps})."
            )


def check_calls(
    layer_name: str,
    config: Mapping[str, Any],
    groups: Sequence[Sequence[LookupRequest]],
    calls_by_group: Mapping[int, int],
) -> None:
    """Raises ValueError unless the tables of these lookups can be looked up by one more call of a training step.

    Args:
      layer_name, config: Name and config of the layer.
      groups: The lookups of a training call by group.
      calls_by_group: TrainingStep.calls_by_group, before this call.
    """
    for requests in groups:
        lookup = requests[0].lookup
        calls = calls_by_group.get(id(lookup), 0) + 1
        if calls == 1 or not requests[0].training:
            continue
        called = f"FusedEmbedding {layer_name!r} was called {calls} times in one training step"
        most = lookup.table.most_lookups_per_update
        if most is not None and calls > most:
            raise ValueError(
                f"{called}, and tables {lookup.table.names} have host_rows on a GPU, which holds the rows of one "
                "lookup. Remedy: one call with all features of a step, or make the layer under tf.device('/CPU:0')."
            )
        if lookup.table.moves_rows and config["lookups_per_update"] < calls:
            raise ValueError(
                f"{called}, and tables {lookup.table.names} may evict or move rows (eviction, ttl, hot_after or "
                "memory_budget) between the calls. Remedy: one call with all features of a step, or "
                f"FusedEmbedding(lookups_per_update={calls})."
            )


def check_output_dtypes(layer_name: str, groups: Sequence[GroupLookup]) -> None:
    """Raises ValueError unless one lookup of the tables can answer in all output dtypes."""
    for lookup in groups:
        if len(lookup.output_dtypes) > 1 and not lookup.table.splits_answers and not lookup.group.external:
            raise ValueError(
                f"tables {lookup.table.names} of {layer_name!r} cannot answer several output dtypes in one lookup. "
                "Remedy: one output_dtype for all features of a group; or backend='native'."
            )


def _gradient_scale(gradient_op: str, ranks: int) -> float:
    """Factor that turns sums over `ranks` ranks into `gradient_op` over them: "sum" or "average"."""
    if gradient_op not in ("average", "sum"):
        raise ValueError(f"gradient_op must be 'average' or 'sum', got {gradient_op!r}.")
    return 1.0 / ranks if gradient_op == "average" else 1.0
