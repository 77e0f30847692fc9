"""Statistics of a checkpoint's tables equal those of all rows at once, however small the parts are."""

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.forger import IDS, save_two
from tests.checkpoint.tables import DictTable
from tf_fusedrec.files import inspection
from tf_fusedrec.files.inspection import SavedTable, Tally
from tf_fusedrec.files.saves import read_manifest


def opened(folder, name, save=None):
    return SavedTable(folder, name, read_manifest(folder, save)["tables"][name])


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A full save and a delta, which are read in many parts, and their table. 50 items were looked up twice."""
    monkeypatch.setattr(inspection, "PART_BYTES", 1 << 12)
    return tmp_path / "c", save_two(tmp_path / "c")


def test_the_summary_of_many_parts_is_that_of_all_rows(saved):
    folder, table = saved
    item = opened(folder, "item")
    assert item.parts > 20
    summary, rows = item.summary(most=3), table.rows["rows"]["item"]
    norms = {i: float(np.linalg.norm(row["row"])) for i, row in rows.items()}
    assert (summary.rows, summary.dim, summary.dtype, summary.rule) == (3000, 4, "float32", "double")
    assert summary.bytes == 3000 * (8 + table.record_dtype("rows").itemsize)
    assert summary.norm_mean == pytest.approx(np.mean(list(norms.values())), rel=1e-6)
    assert summary.norm_max == pytest.approx(max(norms.values()), rel=1e-6)
    assert (summary.lookups_median, summary.lookups_max) == (1, 2)
    assert summary.histogram == ((1, 1, 2950), (2, 3, 50))
    # Three steps: all items, all users, 50 items again.
    assert (summary.step, summary.age_median, summary.age_max) == (3, 2, 2)
    assert (summary.unseen_steps, summary.unseen_share) == (1, pytest.approx(2950 / 3000))
    assert [row.id for row in summary.hottest] == sorted(IDS[:50])[:3]
    assert [row.id for row in summary.coldest] == sorted(IDS[50:])[:3]
    assert summary.hottest[0] == (min(IDS[:50]), 2, 0, pytest.approx(norms[min(IDS[:50])], rel=1e-6))


def test_one_row_is_found_without_the_others(saved):
    folder, table = saved
    for row_id in (IDS[0], IDS[-1], min(IDS), max(IDS)):  # changed, unchanged
        row, numbers = opened(folder, "item").find(row_id)
        np.testing.assert_array_equal(numbers, table.rows["rows"]["item"][row_id]["row"])
        assert row.lookups == table.rows["rows"]["item"][row_id]["count"]
    assert opened(folder, "user").find(IDS[0]) is None  # removed
    assert opened(folder, "user").find(7) is None


def test_the_nearest_rows_have_the_largest_cosines(saved):
    folder, table = saved
    rows = {i: row["row"] / np.linalg.norm(row["row"]) for i, row in table.rows["rows"]["item"].items()}
    cosines = {i: float(rows[IDS[9]] @ row) for i, row in rows.items()}
    expected = sorted(cosines, key=cosines.get)[::-1][:5]
    nearest = opened(folder, "item").nearest(table.rows["rows"]["item"][IDS[9]]["row"], 5)
    assert [i for i, _ in nearest] == expected and expected[0] == IDS[9]
    np.testing.assert_allclose([cosine for _, cosine in nearest], [cosines[i] for i in expected], rtol=1e-5)


def test_two_saves_differ_in_the_rows_that_trained_between_them(saved):
    folder, table = saved
    first = read_manifest(folder, 1)["save"]
    item = opened(folder, "item").change_since(opened(folder, "item", first), most=3)
    before = {i: opened(folder, "item", first).find(i)[1] for i in IDS[:50]}
    distances = {i: float(np.linalg.norm(table.rows["rows"]["item"][i]["row"] - row)) for i, row in before.items()}
    largest = sorted(distances, key=distances.get)[::-1][:3]
    assert item[:4] == ((3000, 3000), 0, 0, 50)
    assert item.moved_mean == pytest.approx(np.mean(list(distances.values())), rel=1e-5)
    assert [i for i, _ in item.most_moved] == largest and item.moved_max == pytest.approx(distances[largest[0]])
    user = opened(folder, "user").change_since(opened(folder, "user", first))
    assert user[:4] == ((3000, 2995), 0, 5, 0)
    back = opened(folder, "user", first).change_since(opened(folder, "user"))
    assert back[:4] == ((2995, 3000), 5, 0, 0)


def test_tables_of_another_dim_cannot_be_compared(saved, tmp_path):
    simulated.save(tmp_path / "wide", [DictTable("item", dim=5)])
    with pytest.raises(ValueError, match="table 'item' has dim 5 before and 4 after, so its rows cannot be compared"):
        opened(saved[0], "item").change_since(opened(tmp_path / "wide", "item"))


def test_a_table_without_counters_or_rows_has_a_summary(tmp_path):
    table = DictTable("item", changes=False)
    simulated.save(tmp_path / "empty", [table])
    assert opened(tmp_path / "empty", "item").summary().rows == 0
    table.train("item", [1, 2], np.random.default_rng(0))
    simulated.save(tmp_path / "two", [table])
    summary = opened(tmp_path / "two", "item").summary()
    assert summary.rows == 2 and summary.lookups_median is None and summary.norm_mean > 0
    assert opened(tmp_path / "two", "item").find(1)[0].lookups is None


def test_a_damaged_file_is_named(saved):
    folder, _ = saved
    path = next(folder.glob("save-1-*/item.rows-0.shard"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path.name} is damaged: block"):
        opened(folder, "item").summary()


def test_a_tally_counts_as_sorted_values_do():
    random = np.random.default_rng(0)
    values = np.concatenate([random.integers(0, 9, 500), random.zipf(1.5, 500).clip(0, 2**32 - 1)])
    tally = Tally()
    for part in np.split(values, 10):
        tally.add(part)
    ordered = np.sort(values)
    assert tally.total == 1000 and tally.median() == ordered[499] and tally.largest() == ordered[-1]
    assert tally.share_above(3) == pytest.approx((values > 3).mean())
    for low, high, count in tally.histogram():
        assert count == ((values >= low) & (values <= high)).sum()
    assert sum(count for *_, count in tally.histogram()) == 1000
