"""benchmarks.checkpoint finds lost and mixed rows, and a small measurement has the documented fields."""

import json

import numpy as np
import pytest

from benchmarks.checkpoint import __main__ as checkpoint
from benchmarks.harness import harness
from tf_fusedrec.checkpoint import resharding
from tf_fusedrec.tables import NativeTable


def test_the_round_trip_ends_with_the_rows_that_it_began_with(tmp_path):
    assert 0 < checkpoint.round_trip(tmp_path, 20_000) < 0.1  # small shares: two blocks are 2 % of 20,000 / 4 rows


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda ids, records: (ids[1:], records[1:]), r"2 -> 3 ranks: ids: shape \(\d+,\), want"),
        (lambda ids, records: (ids, np.roll(records, 1)), "2 -> 3 ranks: count: .* entries differ"),
    ],
    ids=["a row is lost", "rows are mixed up"],
)
def test_rows_that_do_not_come_back_end_the_run(spoil, words, tmp_path, monkeypatch):
    chunks = resharding.SectionReader.chunks
    monkeypatch.setattr(resharding.SectionReader, "chunks", lambda self: (spoil(*chunk) for chunk in chunks(self)))
    with pytest.raises(harness.CheckFailed, match=words):
        checkpoint.round_trip(tmp_path, 2_000)


def test_rows_at_another_rank_end_the_run():
    table = NativeTable("test_rows_at_another_rank", [checkpoint.table_config()], seed=0)
    ids, records = checkpoint.random_rows(table, 100)
    checkpoint.check_rows("all", [(ids, records)], ids, records)
    half = len(ids) // 2
    with pytest.raises(harness.CheckFailed, match="owners of the rows of rank 0"):
        checkpoint.check_rows("halves", [(ids[half:], records[half:]), (ids[:half], records[:half])], ids, records)


def test_the_fields_are_those_that_are_promised():
    seconds = {"save": [2.0], "plain_write": [1.0], "load": [4.0], "plain_read": [0.5], "copy": [0.25]}
    fields = checkpoint.summary(seconds, 4 * 10**9, {"full": [0.3], "delta": [0.01]})
    assert fields == {
        "save_gb_per_s": 2.0,
        "load_gb_per_s": 1.0,
        "disk_write_gb_per_s": 4.0,
        "disk_read_gb_per_s": 8.0,
        "save_ratio_vs_disk": 0.5,
        "load_ratio_vs_disk": 0.125,
        "snapshot_pause_ms": pytest.approx(300),
        "delta_pause_ms": pytest.approx(10),
        "copy_rows_ms": pytest.approx(250),
    }


def test_a_measurement_from_beginning_to_end(tmp_path, capsys):
    fields = checkpoint.measure(tmp_path, 2_000, repeats=1)
    assert fields["bytes"] == 2_000 * (8 + 16 + 2 * 4 * checkpoint.DIM)
    assert all(np.isfinite(value) and value > 0 for value in fields.values())
    checkpoint.report({**fields, "extra_bytes_fraction": 0.0})
    assert "plain write" in capsys.readouterr().out
    json.dumps(fields)
