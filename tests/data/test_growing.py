"""GrowingFolder in one process: the partitions that count, their order, waiting, the end, and messages."""

import logging
import os
import threading
import time

import pytest

from tests.data.shards import COLUMNS, read_lists, write_folder
from tf_fusedrec.data import GrowingFolder, ParquetFolder
from tf_fusedrec.data.growing import Partition, check_same_files
from tf_fusedrec.exchange import collectives


def add(path, name, rows=3, marker="_SUCCESS"):
    folder = path / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_folder(folder, [rows], 2)
    if marker:
        (folder / marker).touch()


def names(path, **options):
    options = {"poll_s": 0.01, "timeout_s": 0, **options}
    return [partition.name for partition in GrowingFolder(path, **options)]


def test_complete_partitions_come_in_the_order_of_their_names(tmp_path):
    for hour in ("day=1/hour=10", "day=1/hour=9", "day=2/hour=0", "_temporary/hour=1", "day=1/.hour=8"):
        add(tmp_path, hour)
    add(tmp_path, "day=1/hour=11", marker=None)
    add(tmp_path, "day=1/hour=12", marker="_DONE")
    complete = ["day=1/hour=9", "day=1/hour=10", "day=2/hour=0"]
    assert names(tmp_path) == complete
    assert names(tmp_path, marker="_DONE") == ["day=1/hour=12"]
    assert names(tmp_path, marker=None) == [*complete[:2], "day=1/hour=11", "day=1/hour=12", complete[2]]
    assert names(tmp_path, max_partitions=2) == complete[:2]
    after = Partition(4, "day=1/hour=9", "")
    assert names(tmp_path, after=after) == complete[1:]
    assert names(tmp_path, after=after, max_partitions=6) == complete[1:2]
    assert names(tmp_path, after=after, max_partitions=5) == []
    first, second = list(GrowingFolder(tmp_path, poll_s=1, max_partitions=2))
    assert (first.number, second.number) == (0, 1)
    assert second == Partition(1, "day=1/hour=10", f"{tmp_path}/day=1/hour=10")
    assert len(read_lists(ParquetFolder(first.path, COLUMNS))) == 3


def test_it_waits_for_what_comes_and_ends_at_the_stop_file(tmp_path, caplog):
    add(tmp_path, "h=0")
    (tmp_path / "h=1").mkdir()  # begun; its marker comes last

    def write():
        for number in (1, 2):
            add(tmp_path, f"h={number}")
        (tmp_path / "_STOP").touch()

    found, writer = [], threading.Timer(0.2, write)
    with caplog.at_level(logging.INFO, "tf_fusedrec.data"):
        for partition in GrowingFolder(tmp_path, poll_s=0.02):  # else it would wait for ever
            found.append(partition.name)
            if len(found) == 1:
                writer.start()
    writer.join()
    assert found == ["h=0", "h=1", "h=2"]
    assert f"{tmp_path} ends after 3 partitions: _STOP exists" in caplog.text
    with caplog.at_level(logging.INFO, "tf_fusedrec.data"):
        (tmp_path / "_STOP").unlink()
        assert names(tmp_path, timeout_s=0.05) == found
    assert "ends after 3 partitions: no new partition arrived in 0.05 s" in caplog.text


def test_files_are_partitions_when_two_polls_find_them_equal(tmp_path):
    for name in ("day10.csv", "day9.csv", ".day8.csv", "_day7.csv", "day6.csv.tmp", "day11.parquet"):
        (tmp_path / name).write_text("a\n", encoding="utf-8")
    complete = ["day9.csv", "day10.csv", "day11.parquet"]
    growing = GrowingFolder(tmp_path, files=(".csv", ".parquet"), poll_s=0.01, timeout_s=0)
    found = [*growing]
    assert [partition.name for partition in found] == complete
    assert growing.before(found[2]) == [f"{tmp_path}/day9.csv", f"{tmp_path}/day10.csv"]


def test_a_file_that_is_written_slowly_is_whole_and_those_after_it_wait(tmp_path):
    def write():
        for _ in range(20):
            with (tmp_path / "day1.csv").open("a", encoding="utf-8") as file:
                file.write("line\n")
            time.sleep(0.02)
        (tmp_path / "_STOP").touch()

    (tmp_path / "day1.csv").touch()
    (tmp_path / "day2.csv").touch()
    writer = threading.Thread(target=write)
    writer.start()
    found = [(one.name, os.path.getsize(one.path)) for one in GrowingFolder(tmp_path, files=[".csv"], poll_s=0.3)]
    writer.join()
    assert found == [("day1.csv", 100), ("day2.csv", 0)]


def test_a_partition_that_comes_too_late_is_named_once(tmp_path, caplog):
    add(tmp_path, "h=5")
    growing = iter(GrowingFolder(tmp_path, poll_s=0.01, timeout_s=0.05))
    assert next(growing).name == "h=5"
    add(tmp_path, "h=4")
    assert list(growing) == []
    assert caplog.text.count("h=4: it arrived after its successor h=5") == 1


def test_refusals(tmp_path, monkeypatch):
    for wrong, message in [
        ({"poll_s": 0}, "poll_s must be > 0, got 0"),
        ({"timeout_s": -1}, "timeout_s must be >= 0, or None"),
        ({"max_partitions": 0}, "max_partitions must be >= 1, or None"),
    ]:
        with pytest.raises(ValueError, match=message):
            GrowingFolder(tmp_path, **wrong)
    with pytest.raises(ValueError, match="gone: cannot list new partitions .*missing"):
        names(tmp_path / "gone")
    add(tmp_path, "h=0")
    folder = ParquetFolder(tmp_path / "h=0", COLUMNS)
    check_same_files(folder)
    monkeypatch.setattr(collectives, "all_gather_object", lambda mine: [mine, mine, "another"])
    with pytest.raises(ValueError, match="h=0: rank 2 sees other Parquet files or row groups than rank 0"):
        check_same_files(folder)
    (tmp_path / "h=0" / "part-0.parquet").unlink()
    with pytest.raises(ValueError, match="h=0/part-0.parquet, row group 0: the file is gone"):
        read_lists(folder)
