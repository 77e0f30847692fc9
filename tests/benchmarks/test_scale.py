"""benchmarks.scale: replays agree with closed forms, constants with their cells, and every cell has a prediction."""

import json

import numpy as np
import pytest

from benchmarks.scale import __main__ as scale
from benchmarks.scale import checks, own
from benchmarks.scale.clusters import NestPipeCluster
from benchmarks.scale.fit import AllToAll, Line
from benchmarks.scale.ops import OpCosts
from benchmarks.scale.published import cells
from benchmarks.scale.replay import PaperStep, dual_buffer, frozen_window, nested, replay, sync
from benchmarks.scale.two_d import TwoDCluster

# The costs and their sums are exact in binary.
COSTS = PaperStep(2.0, 8.0, 1.0, 1.0, synchronize=0.25)
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
    step = replay(PaperStep(0.0, 4.0, 8.0, 8.0), frozen_window(2)).step
    assert step == pytest.approx(4 + 4 + 4 + 4, **EXACT)


def test_dual_buffer_hides_lookups_and_nested_hides_both():
    assert replay(COSTS, dual_buffer).step == pytest.approx(8 + 2 + 0.25, **EXACT)
    assert replay(COSTS, nested(4)).step == pytest.approx(8 + 2 / 4 + 0.25, **EXACT)


def test_a_lookup_with_a_slow_stage_holds_the_pipeline_up():
    slow = PaperStep(4 * 20.0, 8.0, 1.0, 1.0)
    assert replay(slow, dual_buffer).step == pytest.approx(20, **EXACT)


def test_constants_pass_through_the_cells_they_were_fitted_on():
    line, exchange = Line.through(2, 5.0, 6, 7.0), AllToAll.through(4, 3.0, 64, 9.0)
    assert [line.at(2), line.at(6), line.at(4)] == pytest.approx([5, 7, 6])
    assert [exchange.at(4), exchange.at(64), exchange.at(1)] == pytest.approx([3, 9, 0])


def test_every_published_cell_has_a_prediction_and_most_were_not_fitted():
    table = scale.predictions()
    printed = list(cells())
    assert len({cell.key for cell in printed}) == len(printed)
    assert all(cell.key in table for cell in printed)
    result = scale.published_tables()
    assert result["cells_fitted"] + result["cells_predicted"] == len(printed)
    assert result["cells_predicted"] > 3 * result["cells_fitted"]
    # A larger error means that a change broke the model.
    errors = {key: abs(row["error %"]) for key, row in zip((c.key for c in printed), result["cells"])}
    checked = checks.predictions()
    main = [error for key, error in errors.items() if key not in checked and not table[key].fitted]
    assert np.median(main) < 3
    assert result["median_error_predicted_percent"] < 4
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
        assert [row["workers"] for row in alone] == list(own.WORKERS)
        assert all(np.diff([row["imbalance"] for row in alone]) > 0)
        assert all(row["semi_async ms"] <= row["sync ms"] for row in rows)
        assert all(row["dual_buffer ms"] <= row["sync ms"] for row in rows)
    printed = capsys.readouterr().out
    assert "TABLE III" in printed and "out of memory" in printed


def test_checks_take_what_their_papers_state():
    found = checks.predictions()
    assert found[("NestPipe", "TABLE II", "128 GPUs", "NestPipe exposed ms")].value == pytest.approx(312.19 / 8)
    # The delay by imbalance follows the difference of tokens: 15 ms * 31 / 623.
    assert found[("TurboGR", "Table 3", "Amazon-all", "balanced delay ms")].value == pytest.approx(15 * 31 / 623)
    # Only the dense all-reduce of Pipelined(6) lies bare: 115 of 613 ms of Table 4.
    exposed = found[("TurboGR", "Table 6", "FuXi-large", "not overlapped ms")].value
    assert exposed == pytest.approx(326.56 * 115 / 613)


def test_lookups_do_not_grow_with_the_groups():
    costs = OpCosts(0.0, 0.0, 1e-6, 0.0, 0.0, 0.0, 1e11)  # lookups take all the time
    work = own.workload(costs, 1e30, imbalance=1.0)
    lookup = own.lookups(own.DIM)[1][0].unique[0] * 1e-6
    one, two = (own.step_seconds(work, own.A100, 256, own.Topology(groups), own.Sync()) for groups in (1, 2))
    assert lookup < one
    assert lookup < two < one + 0.1 * lookup
