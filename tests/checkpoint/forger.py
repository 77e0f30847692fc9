"""Writes checkpoint files with wrong contents and right checksums, and loads them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xxhash

from tests.checkpoint.tables import DictTable, contents, embedding_of
from tf_fusedrec import checkpoint, keras

IDS = np.random.default_rng(3).integers(-(2**63), 2**63, 3000).tolist()


def model(value, units=2):
    dense = keras.Sequential([keras.layers.Dense(units, input_shape=(3,))])
    dense.set_weights([np.full_like(w, value) for w in dense.get_weights()])
    return dense


def table_of(*ids, **options):
    table = DictTable("item", "user", **{"candidates": True, **options})
    for name in table.names if ids else ():
        table.train(name, ids, np.random.default_rng(5))
    return table


def save_two(directory):
    """Writes a full save and a delta. Returns their table."""
    table = table_of(*IDS)
    job = checkpoint.Checkpointer(directory, model(1.0), layers=[embedding_of(table)], full_every=2)
    job.save("full")
    table.train("item", IDS[:50], np.random.default_rng(6))
    table.remove("user", IDS[:5])
    job.save("delta")
    job.wait()
    return table


def refused(directory, words):
    """Returns the refusal by loads into full and empty tables, and by read_tables for forged rows."""
    for table in (table_of(*IDS[:7]), table_of()):
        rows, clock, dense = contents([table]), table.clock, model(5.0)
        with pytest.raises(ValueError, match=words):
            checkpoint.load(directory, dense, layers=[embedding_of(table)])
        assert contents([table]) == rows and table.clock == clock and table.optimizer.iterations.value == 0
        assert all((w == 5.0).all() for w in dense.get_weights())


def sign(path, manifest):
    data = json.dumps(manifest, sort_keys=True).encode()
    path.write_text(json.dumps({**manifest, "checksum": xxhash.xxh3_64_hexdigest(data)}), encoding="utf-8")


def forge_manifest(path, change):
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest.pop("checksum")
    change(manifest)
    sign(path, manifest)


def forge_shard(path, change=lambda header, ids, records: None, index=lambda index: None):
    """Rewrites a shard with other contents and right checksums."""
    data = path.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[24 : 24 + length])
    record = np.dtype([(name, kind, tuple(*shape)) for name, kind, *shape in header["record"]])
    rows = header["rows"]
    ids = np.frombuffer(data, "<i8", rows, 24 + length).copy()
    records = (
        np.frombuffer(data, record, rows, 24 + length + 8 * rows).copy() if record.itemsize else np.empty(rows, record)
    )
    block = header["block"]
    given = change(header, ids, records)
    header = given if given is not None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    entries = np.empty(-(-rows // block), [("first_hash", "<u8"), ("checksum", "<u8")])
    hashed = ids.view(np.uint64).copy()
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashed = (hashed ^ (hashed >> np.uint64(33))) * np.uint64(factor)
    entries["first_hash"] = (hashed ^ (hashed >> np.uint64(33)))[::block]
    for b in range(len(entries)):
        part = slice(b * block, (b + 1) * block)
        entries["checksum"][b] = xxhash.xxh3_64_intdigest(ids[part].tobytes() + records[part].tobytes())
    index(entries)
    parts = [b"FUSEDREC", len(text).to_bytes(8, "little"), xxhash.xxh3_64_intdigest(text).to_bytes(8, "little"), text]
    parts += [ids.tobytes(), records.tobytes(), entries.tobytes()]
    path.write_bytes(b"".join([*parts, xxhash.xxh3_64_intdigest(entries.tobytes()).to_bytes(8, "little")]))
