"""Step 5 of 7 (docs/concepts.md): rows of other models, which are never trained (FusedRec, section 2).

    TableConfig(name="author", dim=16, external=External("runs/authors/checkpoint", table="user"))

The owner looks rows up by (table, id), as in the model's own tables. Deferred hashing makes this possible, because the
owner receives the id itself. Any number of ranks, with either backend, may have written the checkpoint.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tf_fusedrec import optimizers
from tf_fusedrec.config import TableConfig, Zeros
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.files.table_reader import TableReader
from tf_fusedrec.tables.native import NativeTable
from tf_fusedrec.tables.records import numbers, put_numbers


def external_table(name: str, tables: Sequence[TableConfig], shard: int, shards: int) -> NativeTable:
    """A table filled with part `shard` of `shards` of external tables of equal dim and dtype, each from its checkpoint.

    Nothing updates it; an unknown id has a row of zeros.
    """
    rule, zeros = optimizers.SGD(0.0), Zeros()
    filled = NativeTable(
        name, [TableConfig(table.name, table.dim, rule, zeros, table.dtype) for table in tables], seed=0
    )
    for config in tables:
        for ids, saved in _reader(config, shard, shards).chunks():
            records = filled.new_records(config.name, len(ids))
            put_numbers(records, "row", numbers(saved["row"]))
            filled.restore(config.name, "rows", ids, records)
    return filled


def _reader(config: TableConfig, shard: int, shards: int) -> TableReader:
    assert config.external is not None
    directory, name = pathlib.Path(config.external.folder), config.external.table or config.name
    tables = read_manifest(directory)["tables"]
    if name not in tables:
        raise ValueError(
            f"Checkpoint {directory} holds no table {name!r} for the external table {config.name!r}. It holds "
            f"{sorted(tables)}. Name one of them in External.table."
        )
    dim = tables[name]["spec"]["dim"]
    if dim != config.dim:
        raise ValueError(
            f"TableConfig.dim of the external table {config.name!r} is {config.dim}, but table {name!r} of checkpoint "
            f"{directory} has {dim}. Use dim={dim}."
        )
    return TableReader(directory, name, tables[name], shard, shards)
