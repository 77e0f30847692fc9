"""The kinds of files that this package reads, as small as possible with every part of their formats."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import xxhash

import tf_fusedrec as fr
from tests.checkpoint import simulated
from tests.checkpoint.oracle import owner
from tests.checkpoint.tables import DictTable, contents
from tests.data.shards import COLUMNS, read_lists, write_folder
from tests.fuzz.files import Target, plain_json, write_plain_json
from tests.soak.exports import served_model
from tests.soak.ranks import DIM, TABLES
from tf_fusedrec import checkpoint
from tf_fusedrec.checkpoint.loading import read_tables
from tf_fusedrec.data import ParquetFolder
from tf_fusedrec.files.saves import read_manifest
from tf_fusedrec.saved_model import applying

RANKS = 2


def _tables() -> list[DictTable]:
    return [DictTable("item", "tag", dim=2, candidates=True) for _ in range(RANKS)]


def make_checkpoint(folder: pathlib.Path) -> None:
    """Writes a full save of two ranks and a delta with tombstones."""
    tables, random = _tables(), np.random.default_rng(0)
    owned = [[i for i in range(60) if owner(i, RANKS) == rank] for rank in range(RANKS)]
    for table, mine in zip(tables, owned):
        table.train("item", mine, random)
        table.train("tag", mine[:5], random)
        table.rows["candidates"]["item"][mine[0]] = np.array((3,), [("count", "<u4")])[()]
    full = simulated.save(folder, tables, extra={"epoch": 1})
    clocks = dict.fromkeys(tables[0].names, tables[0].clock)
    for table, mine in zip(tables, owned):
        table.remove("item", mine[:3])
        table.train("item", mine[3:9], random)
    simulated.save(folder, tables, full=full, since=clocks, extra={"epoch": 2})


def load_checkpoint(folder: pathlib.Path) -> Any:
    """Returns the results of a load on two ranks and the rows that one process reads."""
    tables = _tables()
    simulated.load(folder, tables)
    rows = {name: (table.ids.tolist(), table.rows.tobytes()) for name, table in read_tables(folder).items()}
    return contents(tables), [table.clock for table in tables], read_manifest(folder)["extra"], rows


def _read_sealed(data: bytes) -> Any:
    manifest = json.loads(data)
    del manifest["checksum"]
    return manifest


def _seal(_: bytes, manifest: Any) -> bytes:
    """Returns a manifest with the checksum of manifest.py."""
    plain = json.loads(json.dumps(manifest))
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())
    return json.dumps({**plain, "checksum": checksum} if isinstance(plain, dict) else plain).encode()


def _shard_header(data: bytes) -> Any:
    return json.loads(data[24 : 24 + int.from_bytes(data[8:16], "little")])


def _with_header(data: bytes, header: Any) -> bytes:
    """Returns a shard with the header and the checksum of shard_file.py."""
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(text).to_bytes(8, "little")
    return data[:8] + head + text + data[24 + int.from_bytes(data[8:16], "little") :]


def _make_exports(ops: str, folder: pathlib.Path) -> None:
    """Writes a full export "base" and a delta of it."""
    model, embedding = served_model()
    random = np.random.default_rng(0)

    def fill(ids: np.ndarray) -> None:
        for group in embedding.internals.groups:
            group.table.clear()
        for table in TABLES:
            checkpoint.warm_start(embedding, table, ids, random.random([len(ids), DIM]).astype(np.float32))

    folder.mkdir()
    fill(np.arange(40))
    fr.export(model, folder / "base", ops)
    fill(np.arange(20, 50))
    fr.export(model, folder / "delta", ops, base=folder / "base")


def _apply(folder: pathlib.Path) -> Any:
    output = folder.parent / "applied"
    assert not output.exists()
    fr.apply_delta(folder / "base", folder / "delta", output)
    rows = applying.read_tables(output)
    graph = (output / "saved_model.pb").read_bytes()
    shutil.rmtree(output)
    return {name: (ids.tolist(), of_table.tobytes()) for name, (ids, of_table) in rows.items()}, graph


def _exports(ops: str) -> Target:
    json_files = dict.fromkeys(("tables.json", "delta.json"), (plain_json, write_plain_json))
    return Target(lambda folder: _make_exports(ops, folder), _apply, ("base/assets*/*", "delta/**/*"), True, json_files)


TARGETS = {
    "checkpoint": Target(
        make_checkpoint, load_checkpoint, ("manifest.json", "save-*/*.shard"), True,
        {"manifest.json": (_read_sealed, _seal), "*.shard": (_shard_header, _with_header)},
    ),
    "exports of stock operations": _exports("stock"),
    "exports of our operations": _exports("ours"),
    "Parquet": Target(
        lambda folder: write_folder(folder, [12, 9], 5),
        lambda folder: read_lists(ParquetFolder(folder, COLUMNS)),
        ("*.parquet",), checked=False,
    ),
}  # fmt: skip
