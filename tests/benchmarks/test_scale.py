"""benchmarks.scale: replays agree with closed forms, constants with their cells, and every cell has a prediction."""

import json

import numpy as np
import pytest

from benchmarks.scale import __main__ as scale
from benchmarks.scale.clusters import NestPipeCluster, predictions
from benchmarks.scale.fit import AllToAll, Line
from benchmarks.scale.ops import OpCosts
from benchmarks.scale.published import cells
from benchmarks.scale.replay import StepCosts, dual_buffer, frozen_window, nested, replay, semi_async, sync
from benchmarks.scale.two_d import TwoDCluster

# The costs and their sums are exact in binary.
COSTS = StepCosts(2.0, 8.0, 1.0, 1.0, synchronize=0.25, refresh=0.125)
EXACT = {"rel": 0, "abs": 1e-9}  # a handful of additions


def test_sync_is_the_sum_of_its_parts():
    run = replay(COSTS, sync)
    assert run.step == pytest.approx(2 + 8 + 1 + 1 + 0.25, **EXACT)
    assert run.lookup_exposed == pytest.approx(2, **EXACT)
    assert run.exposed == pytest.approx(2.25, **EXACT)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_frozen_window_exposes_the_first_and_the_last_exchange(micro_batches):
    part = 1 / micro_batches
    step = replay(COSTS, frozen_window(micro_batches)).step
    assert step == pytest.approx(2 + part + 8 + part + 0.25, **EXACT)  # one lookup for all micro-batches


def test_frozen_window_is_no_faster_than_its_network():
    # Two computes of 2 are under exchanges of 4: rows 0, rows 1 beside compute 0, then the gradients.
    step = replay(StepCosts(0.0, 4.0, 8.0, 8.0), frozen_window(2)).step
    assert step == pytest.approx(4 + 4 + 4 + 4, **EXACT)


def test_dual_buffer_hides_lookups_and_nested_hides_both():
    assert replay(COSTS, dual_buffer).step == pytest.approx(8 + 2 + 0.25 + 0.125, **EXACT)
    assert replay(COSTS, nested(4)).step == pytest.approx(8 + 2 / 4 + 0.25 + 0.125, **EXACT)


def test_a_lookup_with_a_slow_stage_holds_the_pipeline_up():
    slow = StepCosts(4 * 20.0, 8.0, 1.0, 1.0)
    assert replay(slow, dual_buffer).step == pytest.approx(20, **EXACT)


def test_semi_async_is_as_slow_as_the_slower_of_compute_and_network():
    assert replay(StepCosts(2.0, 8.0, 1.0, 1.0), semi_async).step == pytest.approx(8, **EXACT)
    assert replay(StepCosts(2.0, 8.0, 7.0, 6.0), semi_async).step == pytest.approx(13, **EXACT)


def test_constants_pass_through_the_cells_they_were_fitted_on():
    line, exchange = Line.through(2, 5.0, 6, 7.0), AllToAll.through(4, 3.0, 64, 9.0)
    assert [line.at(2), line.at(6), line.at(4)] == pytest.approx([5, 7, 6])
    assert [exchange.at(4), exchange.at(64), exchange.at(1)] == pytest.approx([3, 9, 0])


def test_every_published_cell_has_a_prediction_and_most_were_not_fitted():
    table = predictions()
    printed = list(cells())
    assert len({cell.key for cell in printed}) == len(printed)
    assert all(cell.key in table for cell in printed)
    result = scale.published_tables()
    assert result["cells_fitted"] + result["cells_predicted"] == len(printed)
    assert result["cells_predicted"] > 3 * result["cells_fitted"]
    # A larger error means that a change broke the model.
    assert result["median_error_predicted_percent"] < 3
    fitted = [row["error %"] for row in result["cells"] if row["kind"] == "fitted"]
    assert np.max(np.abs(fitted)) < 4  # numbers of micro-batches and groups are rounded, all other constants are exact


def test_clusters_know_the_figures_by_hand():
    cluster = NestPipeCluster()
    assert cluster.compute == pytest.approx(5.79383 - 2.87099 - 1.20785)
    assert cluster.qps("UniEmb", 1536) == pytest.approx(1536 * 512 / (cluster.compute + 1.20785) / 1e5)
    two_d = TwoDCluster()
    step_2048 = 256 * 1152 / 1.76e5 + 2 * 1.7e12 * 7 / 2048 / two_d.replica_bytes_per_s
    qps = two_d.predictions()[("2D-SP", "Table 2", "2048 GPUs", "2D QPS")].value
    assert qps == pytest.approx(2048 * 1152 / step_2048)


def test_own_table_and_json(tmp_path, monkeypatch, capsys):
    costs = OpCosts(1e-8, 1e-8, 1e-7, 1e-7, 1e-8, 1e-8, 1e11)
    monkeypatch.setattr(scale, "measure", lambda *_: costs)
    monkeypatch.setattr("sys.argv", ["scale", "--quick", "--json", str(tmp_path / "scale.json")])
    scale.main()
    result = json.loads((tmp_path / "scale.json").read_text(encoding="utf-8"))
    for rows in result["own"].values():
        alone = [row for row in rows if row["groups"] == 1]
        assert [row["workers"] for row in alone] == list(scale.WORKERS)
        assert all(np.diff([row["imbalance"] for row in alone]) > 0)
        assert all(row["nested(4) ms"] <= min(row["frozen_window(4) ms"], row["dual_buffer ms"]) for row in rows)
    printed = capsys.readouterr().out
    assert "TABLE III" in printed and "out of memory" in printed
