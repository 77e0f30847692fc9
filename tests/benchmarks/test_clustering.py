"""benchmarks.clustering counts ids on a small log, and checks the clustered samples first."""

import gzip

import numpy as np
import pytest

from benchmarks.clustering import bytes_sent
from benchmarks.harness import harness
from tf_fusedrec.data.rows import Ragged

CASE = bytes_sent.Case("amazon_sports", "sequence", 2500)


@pytest.fixture
def data(tmp_path):
    """A log of 400 users of two alternating kinds. Each has 5 to 12 of the 12 items of its kind."""
    rng, lines = np.random.default_rng(0), ["user_id,item_id,timestamp"]
    for user in range(400):
        items = rng.permutation(12)[: rng.integers(5, 13)] + 100 * (user % 2)
        lines += [f"{user},{item},{time}" for time, item in enumerate(items)]
    (tmp_path / "amazon_sports").mkdir()
    with gzip.open(tmp_path / "amazon_sports" / "interactions.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path


def test_bytes_are_of_ids_rows_and_gradients(data):
    result = bytes_sent.measure(CASE, 1, data)
    assert result["bytes_m1"] == 24 * (8 + 2 * 4 * 64)
    assert result["bytes_m1"] < result["bytes_clustered"] == result["ratio"] * result["bytes_naive"]
    assert result["ratio"] < 0.8, "the two kinds of users were not parted"
    assert result["imbalance_clustered"] < 1.1 and result["clustering_ms"] > 0


def test_ids_of_pieces_are_counted_once_each():
    batch = Ragged(np.array([1, 1, 2, 2, 3, 1, 4]), np.array([0, 2, 3, 5, 7]))  # 1 1 | 2 || 2 3 | 1 4
    assert bytes_sent.ids_sent(batch, 2) == 2 + 4 and bytes_sent.ids_sent(batch, 1) == 4
    assert bytes_sent.imbalance(batch, 2) == 4 / 3.5


def test_windows_begin_every_25_from_the_newest_back(data, monkeypatch):
    long = Ragged(np.arange(130), np.array([0, 120, 130]))
    monkeypatch.setattr(bytes_sent, "sequences", lambda name, data: long)
    windows = bytes_sent.samples_of(CASE._replace(sample="window"), data)
    assert windows.values[windows.row_splits[:-1]].tolist() == [70, 45, 20, 120]
    assert windows.lengths().tolist() == [50, 50, 50, 10]


def test_a_lost_sample_is_not_measured(data, monkeypatch):
    monkeypatch.setattr(bytes_sent, "clustered", lambda batch, micro_batches: batch.slice(0, 3))
    with pytest.raises(harness.CheckFailed, match="samples of a clustered batch"):
        bytes_sent.measure(CASE, 1, data)
    assert bytes_sent.headline(data=data / "nowhere") is None
