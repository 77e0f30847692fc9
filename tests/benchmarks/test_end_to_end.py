"""benchmarks.end_to_end on a small data set: our side in a process, the inputs of the peer, a check that can fail."""

import json
import sys

import numpy as np
import pytest

from benchmarks.end_to_end import __main__ as benchmark
from benchmarks.end_to_end import peer_torch
from benchmarks.harness import harness

USERS, ITEMS, EVENTS = 130, 40, 6  # two batches


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ml")
    generator = np.random.default_rng(0)
    lines = ["user_id,movie_id,rating,timestamp"]
    for user in range(1, USERS + 1):
        for place, movie in enumerate(generator.choice(ITEMS, EVENTS, replace=False) + 1):
            lines.append(f"{user},{movie},3,{10**9 + 60 * place}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.nightly
def test_our_side_trains_an_epoch_where_the_peer_lacks_torch(data, tmp_path, monkeypatch, capsys):
    """A module torch that cannot be imported stands before any torch of this interpreter."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = tmp_path / "r.json"
    benchmark.main(["--data", str(data), "--peer", sys.executable, "--quick", "--json", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))
    assert (result["users"], result["batch"]) == (USERS, 128)
    assert result["samples_per_s_ours"] > 0
    assert result["loss_after_ours"] < result["loss_before"]
    assert "ratio_vs_padded" not in result
    assert "the peer is skipped, since its interpreter lacks it: no torch here" in capsys.readouterr().out


def test_the_peers_positions_are_all_events_but_the_last():
    users = peer_torch.Users(np.array([7, 8, 9, 5, 3, 4]), np.array([10, 20, 30, 5, 1, 4]), np.array([0, 3, 4, 4, 6]))
    got = peer_torch.positions_of(users)
    assert got.items.tolist() == [7, 8, 3] and got.positives.tolist() == [8, 9, 4]
    assert got.offsets.tolist() == [0, 2, 2, 2, 3]
    assert got.answers.tolist() == [[10, 20], [0, 0], [0, 0], [1, 0]]
    assert got.asks.tolist() == [[20, 30], [0, 0], [0, 0], [4, 0]]
    assert got.valid.tolist() == [[True, True], [False] * 2, [False] * 2, [True, False]]


def test_another_loss_or_gradient_is_refused(tmp_path):
    gradients = {"positions": np.array([[0.5, -0.25]]), "time_bias_0": np.array([1.0, 0.0])}
    np.savez(tmp_path / "check.npz", negatives=[[1]], loss=2.0, **gradients)
    np.savez(tmp_path / "gradients_padded.npz", **{**gradients, "time_bias_0": np.array([1.0, 0.001])}, items=[3.0])
    benchmark.check(tmp_path, {"padded": 2.0001})
    with pytest.raises(harness.CheckFailed, match="loss, padded"):
        benchmark.check(tmp_path, {"padded": 2.01})
    np.savez(tmp_path / "gradients_padded.npz", **{**gradients, "positions": np.array([[0.5, -0.24]])})
    with pytest.raises(harness.CheckFailed, match="gradient of positions, padded"):
        benchmark.check(tmp_path, {"padded": 2.0})
