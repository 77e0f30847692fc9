"""A table backend in a dict, for tests of checkpoints. Each simulated rank has one object."""

from __future__ import annotations

import types

import numpy as np

import tf_fusedrec as fr
from tests.checkpoint.oracle import OWNERS, mix64
from tf_fusedrec import keras
from tf_fusedrec.exchange.topology import RankLayout

ABOUT = [("last", "<u4"), ("count", "<u4"), ("updated", "<u4"), ("pool", "<u4")]


class DictTable:
    """Tables `names` of one group; `rows[section][name][id]` is a record. `clock` is changes << 32 | training lookups.

    Args:
      changes: whether it knows what has changed (as the native table), or not (as TFRA's).
      candidates: whether it has that section.
      dim, slot: of a record.
      steps: that the optimizer has counted.
    """

    records_tombstones = True

    def __init__(self, *names, dim=4, owner="hash_range", changes=True, candidates=False, slot="accumulator", steps=0):
        self.names, self.owner, self.clock, self.calls, self.clears = list(names), owner, 0, [], 0
        about = ABOUT if changes else []
        row = np.dtype([*about, ("row", "<f4", (dim,)), (slot, "<f4", (dim,)), ("scale", "<f4")])
        self._records = {"rows": row}
        if candidates:
            self._records["candidates"] = np.dtype([("count", "<u4")])
        self.rows = {section: {name: {} for name in names} for section in self._records}
        self.removed = {name: set() for name in names}
        self.optimizer = types.SimpleNamespace(iterations=Counter(steps))

    def sections_of(self, name):
        return tuple(self._records)

    def spec(self, name):
        row = self._records["rows"]
        slots = tuple(field for field in row.names if field not in ("row", *dict(ABOUT)))
        return {"dim": row["row"].shape[0], "storage": "float32", "optimizer": {"rule": "double"}, "slots": slots}

    def record_dtype(self, section):
        return self._records[section]

    def size(self, name):
        return len(self.rows["rows"][name])

    def snapshot(self, name, section="rows", since=None, *, in_hash_order=True):
        rows = self.rows[section][name]
        ids = [i for i in rows if since is None or rows[i]["updated"] > since >> 32]
        ids.sort(key=mix64)
        records = np.array([rows[i] for i in ids], self._records[section])
        return np.array(ids, np.int64), records

    def restore(self, name, section, ids, records):
        assert records.dtype == self._records[section] and len(ids) == len(records)
        self.calls.append(("restore", name, section, len(ids)))
        for i, record in zip(ids.tolist(), records):
            self.rows[section][name][i] = record.copy()

    def new_records(self, name, n):
        return np.zeros(n, self._records["rows"])

    def remove(self, name, ids):
        for i in np.asarray(ids).tolist():
            if self.rows["rows"][name].pop(i, None) is not None:
                self.removed[name].add(i)

    def tombstones(self, name):
        return np.array(sorted(self.removed[name] - set(self.rows["rows"][name])), np.int64)

    def forget_tombstones(self):
        self.removed = {name: set() for name in self.names}

    def clear(self):
        self.calls.append(("clear",))
        self.clears += 1
        for tables in self.rows.values():
            for name in tables:
                tables[name].clear()

    def train(self, name, ids, random):
        """Makes one step, which changes the rows of these ids and inserts new ids."""
        self.clock += (1 << 32) + 1
        rows, record = self.rows["rows"][name], self._records["rows"]
        for i in ids:
            new = rows.get(i, np.zeros([], record)).copy()
            new["row"] = random.random(new["row"].shape)
            new[record.names[-2]] = random.random(new["row"].shape)
            new["scale"] = random.random()
            if "updated" in record.names:
                new["last"], new["count"], new["updated"] = self.clock & 0xFFFFFFFF, new["count"] + 1, self.clock >> 32
            rows[i] = new


class Counter:
    """The `iterations` of an optimizer."""

    def __init__(self, value):
        self.value = value

    def numpy(self):
        return np.int64(self.value)

    def assign(self, value):
        self.value = value


class Double(fr.FusedEmbedding):
    """Stands for a FusedEmbedding with given tables. It has only the members that save, load and warm_start use."""

    def __init__(self, tables, topology, name):
        keras.layers.Layer.__init__(self, name=name)
        groups = [types.SimpleNamespace(table=table) for table in tables]
        internals = types.SimpleNamespace(groups=groups, layout=RankLayout(topology))
        object.__setattr__(self, "internals", internals)  # Keras would track the tables

    def synchronize(self):
        return None


def embedding_of(*tables, topology=None, name="double"):
    """Returns a layer whose tables are dicts."""
    return Double(tables, topology or fr.Topology(), name)


def contents(tables):
    """Returns (section, table) -> {id: bytes of the record} over all simulated ranks. No id may occur twice."""
    merged = {}
    for table in tables:
        for section, by_name in table.rows.items():
            for name, rows in by_name.items():
                of_table = merged.setdefault((section, name), {})
                assert not set(of_table) & set(rows)
                of_table.update({i: record.tobytes() for i, record in rows.items()})
    return merged


def ranks_of(make, ranks, fill=None):
    """Returns one table per simulated rank. `fill(table)` inserts all rows, and each rank keeps its own."""
    tables = [make() for _ in range(ranks)]
    if fill is not None:
        whole = make()
        fill(whole)
        for section, by_name in whole.rows.items():
            for name, rows in by_name.items():
                for i, record in rows.items():
                    tables[OWNERS[whole.owner](i, ranks)].rows[section][name][i] = record
        for table in tables:
            table.clock = whole.clock
    return tables
