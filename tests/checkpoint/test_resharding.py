"""Any number of ranks reads the save of any other number: equal bits, and each rank reads its share of the bytes."""

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.oracle import EDGE_IDS, OWNERS, mix64
from tests.checkpoint.tables import DictTable, contents, ranks_of
from tf_fusedrec.files import hash_order
from tf_fusedrec.files.hash_order import tfra_owner
from tf_fusedrec.files.saves import read_manifest

IDS = [*EDGE_IDS, *np.random.default_rng(0).integers(-(2**63), 2**63, 300).tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 64, 1000])
def test_ranges_and_owners_are_those_of_the_custom_ops(ranks):
    bounds = [hash_order.hash_range(rank, ranks) for rank in range(ranks)]
    assert bounds[0][0] == 0 and bounds[-1][1] == 2**64 - 1
    for rank, (first, last) in enumerate(bounds):
        assert (first * ranks >> 64, last * ranks >> 64) == (rank, rank)
    ids = np.array(IDS, np.int64)
    assert hash_order.mix64(ids).tolist() == [mix64(i) for i in IDS]
    assert hash_order.hash_range_owner(ids, ranks).tolist() == [OWNERS["hash_range"](i, ranks) for i in IDS]
    assert tfra_owner(ids, ranks).tolist() == [OWNERS["tfra"](i, ranks) for i in IDS]


class ArrayTable(DictTable):
    """A DictTable that makes a snapshot of many rows at once, and only counts restored rows."""

    def __init__(self, ids=()):
        super().__init__("item", dim=32)
        self.ids, self.restored = np.array(ids, np.int64), 0

    def snapshot(self, name, section="rows", since=None, *, in_hash_order=True):
        order = np.argsort(hash_order.mix64(self.ids))
        return self.ids[order], np.zeros(len(order), self.record_dtype("rows"))

    def restore(self, name, section, ids, records):
        self.restored += len(ids) * (8 + records.dtype.itemsize)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "then"), [(1, 1), (2, 3), (3, 1), (4, 3), (1, 16)])
def test_each_rank_reads_its_share_and_less_than_2_percent_more(ranks, then, tmp_path):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 600_000)
    owners = hash_order.hash_range_owner(ids, ranks)
    simulated.save(tmp_path, [ArrayTable(ids[owners == rank]) for rank in range(ranks)])
    read = [ArrayTable() for _ in range(then)]
    shares_read = simulated.load(tmp_path, read)
    total = sum(table.restored for table in read)
    assert total == 600_000 * (8 + read[0].record_dtype("rows").itemsize)
    for table, (share,) in zip(read, shares_read):
        assert abs(table.restored / total * then - 1) < 0.05
        assert table.restored <= share.bytes_read < 1.02 * table.restored
    # A reader opens only files whose range r / R to (r + 1) / R overlaps its own.
    for rank, (share,) in enumerate(shares_read):
        meet = [w for w in range(ranks) if w * then < (rank + 1) * ranks and rank * ranks < (w + 1) * then]
        assert [file.path.name for file in share.sections["rows"].complete] == [f"item.rows-{w}.shard" for w in meet]


def test_tables_are_found_by_name_whatever_group_they_are_in(tmp_path):
    """Loads into other groups, in another order, with one table dropped and one added."""
    first, second = DictTable("item", "tag", steps=5), DictTable("user", steps=7)
    random = np.random.default_rng(0)
    for table in (first, second):
        for name in table.names:
            table.train(name, IDS[:30], random)
    first.clock, second.clock = 9 << 32 | 3, 4 << 32 | 5
    simulated.save(tmp_path, [[first, second]])
    regrouped, alone = DictTable("user", "item"), DictTable("new")
    with pytest.raises(ValueError, match=r"holds no table 'new'. It holds \['item', 'tag', 'user'\].*partial=True"):
        simulated.load(tmp_path, [[regrouped, alone]])
    assert regrouped.calls == []
    alone.train("new", [1], random)
    simulated.load(tmp_path, [[regrouped, alone]], partial=True)
    assert contents([regrouped])["rows", "item"] == contents([first])["rows", "item"]
    assert contents([regrouped])["rows", "user"] == contents([second])["rows", "user"]
    assert alone.size("new") == 0  # a load empties a table that the checkpoint lacks
    assert regrouped.clock == 9 << 32 | 5 and regrouped.optimizer.iterations.value == 7


@pytest.mark.parametrize(("ranks", "owner"), [(1, "hash_range"), (2, "tfra"), (3, "hash_range"), (7, "hash_range")])
def test_full_saves_and_deltas_of_random_histories_are_a_dict_on_any_ranks(ranks, owner, tmp_path):
    """Trains, removes, restores and saves; loads on 1 to 8 ranks, also into a backend with another owner of rows."""
    random, count = np.random.default_rng(7), np.dtype([("count", "<u4")])

    def make(owner=owner):
        return DictTable("item", "tag", "empty", owner=owner, candidates=True)

    tables, full, since, deltas = ranks_of(make, ranks), None, {}, 0
    for step in range(60):
        name = ["item", "item", "tag"][step % 3]
        ids = random.choice(IDS, 12).tolist()
        for rank, table in enumerate(tables):
            mine = [i for i in ids if OWNERS[owner](i, ranks) == rank]
            if random.random() < 0.3:
                table.remove(name, mine[:3])
            table.train(name, mine[1:], random)
            if mine:
                table.rows["candidates"][name].pop(mine[0], None)
                table.rows["candidates"][name][mine[-1]] = np.array((step,), count)[()]
        if step % 3 == 0:
            if full is None or random.random() < 0.2:
                full, since = simulated.save(tmp_path, tables), dict.fromkeys(tables[0].names, tables[0].clock)
                for table in tables:
                    table.forget_tombstones()
            else:
                simulated.save(tmp_path, tables, full=full, since=since)
                deltas += 1
            of_readers, then = ["hash_range", "tfra"][random.integers(2)], int(random.integers(1, 9))
            read = [make(of_readers) for _ in range(then)]
            simulated.load(tmp_path, read)
            assert contents(read) == contents(tables)
            for rank, table in enumerate(read):
                assert all(OWNERS[of_readers](i, then) == rank for i in table.rows["rows"]["item"])
                assert table.clock == tables[0].clock == step + 1 << 32 | step + 1
    assert deltas > 10 and any(len(table.tombstones("item")) for table in tables)


def test_a_delta_is_as_small_as_its_rows(tmp_path):
    tables = ranks_of(
        lambda: DictTable("item", dim=64), 2, lambda table: table.train("item", IDS, np.random.default_rng(1))
    )
    full = simulated.save(tmp_path, tables)
    for table in tables:
        table.train("item", [next(iter(table.rows["rows"]["item"]))], np.random.default_rng(0))
        table.remove("item", list(table.rows["rows"]["item"])[-1:])
    delta = simulated.save(tmp_path, tables, full=full, since={"item": 1 << 32 | 1})
    size = {save: sum(f.stat().st_size for f in (tmp_path / save).glob("*.shard")) for save in (full, delta)}
    assert size[delta] < size[full] / 20
    (part, changes) = read_manifest(tmp_path)["tables"]["item"]["parts"]
    assert (part["save"], changes["save"]) == (full, delta)
    assert changes["sections"] == {"rows": False, "tombstones": False}
