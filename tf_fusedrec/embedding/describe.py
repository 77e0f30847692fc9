"""Describes the tables of a layer for a user."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding.group import TableGroup
from tf_fusedrec.exchange import collectives

_COLUMNS = ("table", "rows", "bytes", "features", "options")
_NUMBERS = _COLUMNS[1:3]


def describe(layer_name: str, layer: Any, *, all_ranks: bool) -> str:
    """The text of FusedEmbedding.describe for a layer's name and its internals. Eager; collective with all_ranks."""
    counts = [group.table.size(name) for group in layer.all_groups for name in group.table.names]
    rows, size = np.array(counts, np.int64), collectives.size()
    owner = f"rank {collectives.rank()} of {size}"
    if all_ranks:
        rows, owner = collectives.all_gather(rows[np.newaxis]).sum(axis=0), f"all {size} ranks"
    groups = len(layer.all_groups)
    each = "" if collectives.joins(groups, layer.layout.group) else " each"
    lines = [
        f"{layer_name}: {len(layer.tables)} tables, {groups} groups (one exchange of rows{each}), "
        f"{len(layer.features)} features, backend {layer.options.backend}; rows of {owner}"
    ]
    rows_of_table = iter(rows.tolist())
    for group in layer.all_groups:
        lines += ["", _group(group)]
        entries = [_table(group, config, next(rows_of_table)) for config in group.config.tables]
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *entries)]
        lines += [_line(cells, widths) for cells in (_COLUMNS, *entries)]
    return "\n".join(lines)


def _group(group: TableGroup) -> str:
    spec, optimizer = group.config.tables[0], group.table.optimizer
    parts = [f"dim {spec.dim}", spec.dtype]
    if spec.external is not None:
        return f"group {group.config.name}: {', '.join([*parts, 'read only'])}"
    rate: Any = getattr(optimizer, "learning_rate", None)
    parts.append(type(spec.optimizer).__name__)
    if tf.is_tensor(rate):  # TF1 optimizers show none
        parts.append(f"learning rate {float(rate):.6g}")
    return f"group {group.config.name}: {', '.join([*parts, str(spec.initializer)])}"


def _table(group: TableGroup, config: TableConfig, rows: int) -> tuple[str, ...]:
    options = [f"{path}={value!r}" for path, value in config.options.items()]
    if not config.trainable:
        options.append("trainable=False")
    if config.external is not None:
        options = [f"external={config.external.folder!r}"]
    read_by = [_feature(feature) for feature in group.config.features if feature.table_name == config.name]
    return config.name, f"{rows:,}", f"{rows * group.table.row_bytes:,}", ", ".join(read_by), ", ".join(options)


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
