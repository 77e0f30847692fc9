"""Describes the tables of a layer for a user: a text, and the number of parameters that model.summary() shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding.group_lookup import GroupLookup
from tf_fusedrec.exchange import collectives

_COLUMNS = ("table", "rows", "bytes", "features", "options")
_NUMBERS = _COLUMNS[1:3]


class Described:
    """A base of the layer, which describes the layer. Eager."""

    name: str
    _config: Any
    _holder: Any

    def describe(self, all_ranks: bool = False) -> str:
        """The groups, tables and features as a text to print.

        A row's bytes include slots and counters, without the key. All rows of storage "mixed" count as float32. Rows on
        disk (memory_budget) count, too.

        Args:
          all_ranks: True to count the rows of all ranks, each replica once. The call is collective then.
        """
        lookups: Sequence[GroupLookup] = self._holder.value
        config, size = self._config.value, collectives.size()
        rows = np.array([lookup.table.size(name) for lookup in lookups for name in lookup.table.names], np.int64)
        whose = f"rank {collectives.rank()} of {size}"
        if all_ranks:
            rows, whose = collectives.all_gather(rows[np.newaxis]).sum(axis=0), f"all {size} ranks"
        lines = [
            f"{self.name}: {len(config['tables'])} tables, {len(lookups)} groups (one exchange of rows each), "
            f"{len(config['features'])} features, backend {config['backend']}; rows of {whose}"
        ]
        left = iter(rows.tolist())
        for lookup in lookups:
            lines += ["", _group(lookup)]
            entries = [_table(lookup, config, next(left)) for config in lookup.group.tables]
            widths = [max(map(len, column)) for column in zip(_COLUMNS, *entries)]
            lines += [_line(cells, widths) for cells in (_COLUMNS, *entries)]
        return "\n".join(lines)

    def count_params(self) -> int:
        """The number of weights in the rows of this rank, without slots. It changes as ids come and leave."""
        tables = [(lookup.group.tables[0].dim, lookup.table) for lookup in self._holder.value]
        return sum(dim * table.size(name) for dim, table in tables for name in table.names)


def _group(lookup: GroupLookup) -> str:
    spec, optimizer = lookup.group.tables[0], lookup.table.optimizer
    parts = [f"dim {spec.dim}", spec.dtype]
    if spec.external is not None:
        return f"group {lookup.group.name}: {', '.join([*parts, 'read only'])}"
    rate: Any = getattr(optimizer, "learning_rate", None)
    parts.append(type(spec.optimizer).__name__)
    if tf.is_tensor(rate):  # TF1 optimizers show none
        parts.append(f"learning rate {float(rate):.6g}")
    return f"group {lookup.group.name}: {', '.join([*parts, str(spec.initializer)])}"


def _table(lookup: GroupLookup, config: TableConfig, rows: int) -> tuple[str, ...]:
    options = [f"{name}={getattr(config, name)!r}" for name in config.stores_natively]
    if not config.trainable:
        options.append("trainable=False")
    if config.external is not None:
        options = [f"external={config.external!r}"]
    read_by = [_feature(feature) for feature in lookup.group.features if feature.table == config.name]
    return config.name, f"{rows:,}", f"{rows * lookup.table.row_bytes:,}", ", ".join(read_by), ", ".join(options)


def _feature(feature: FeatureConfig) -> str:
    shown = {"combiner": "", "output_dtype": "", "padding_id": "padding "}
    given = [f"{shown[f.name]}{getattr(feature, f.name)}" for f in dataclasses.fields(feature) if f.name in shown]
    used = [text for text in given if not text.endswith("None")]
    return f"{feature.name} ({', '.join(used)})" if used else feature.name


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
        for column, cell, width in zip(_COLUMNS, cells, widths)
    ]
    return ("  " + "  ".join(aligned)).rstrip()
