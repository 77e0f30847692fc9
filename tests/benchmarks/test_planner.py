"""benchmarks.planner: its figures, nulls without root, and the forecasts of a tiny model in a process of its own."""

import dataclasses
import json
import types

import pytest

from benchmarks.harness import children, network
from benchmarks.overlap import device_stream
from benchmarks.overlap.device_model import DeviceSize
from benchmarks.overlap.variants import VARIANTS
from benchmarks.planner import __main__ as planner
from benchmarks.planner import ranks
from benchmarks.planner.workloads import CHOICES, NETWORKS, QUICK_CHOICES, SIZES

TINY = DeviceSize(users=16, tokens_per_user=4, dim=8, layers=2, weights=64, vocabulary=50, ids_of_topic=5)


def measured(**ms):
    return {"message_s": 0.001, "bytes": {"sync": 1000.0}, "ms": ms}


def test_twelve_workloads_and_every_choice_is_an_arm_that_trains_alike():
    assert len(SIZES) * len(NETWORKS) == 12
    assert set(QUICK_CHOICES) < set(CHOICES) < set(VARIANTS)
    assert not any("lookup" in name or "clustered" in name for name in CHOICES)
    assert "nested_M16" not in CHOICES


def test_the_regret_is_that_of_the_measured_steps():
    forecasts = [{"choice": "dual", "ms": 90.0, "bytes": 0.0}, {"choice": "sync", "ms": 99.0, "bytes": 1010.0}]
    one = planner.case(NETWORKS[0], measured(sync=120.0, dual=110.0, frozen_M4=100.0), forecasts)
    assert (one["best"], one["chosen"]) == ("frozen_M4", "dual")
    assert one["regret"] == pytest.approx(0.1)
    assert one["error"] == pytest.approx(90 / 110 - 1)
    assert one["bytes_error"] == pytest.approx(0.01)
    fields = planner.fields([one, {**one, "regret": 0.0}])
    assert (fields["workloads"], fields["within_5_percent"]) == (2, 1)
    assert fields["worst_regret"] == pytest.approx(0.1)


def test_choices_far_from_the_best_stop_after_two_rounds(monkeypatch):
    ms = {"sync": 130.0, "dual": 100.0, "semi_async": 131.0}
    turns = []

    def take_turn(step, steps):
        turns.append(step)
        return types.SimpleNamespace(step=ms[step] + len(turns) / 1000)

    monkeypatch.setattr(ranks, "take_turn", take_turn)
    found = ranks.measure({name: name for name in ms}, list(ms), 5)
    assert [turns.count(name) for name in ms] == [5, 5, 2]
    for name in ms:
        assert found[name] == pytest.approx(ms[name], abs=0.02)


def test_without_root_the_fields_are_null(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    path = tmp_path / "planner.json"
    monkeypatch.setattr("sys.argv", ["planner", "--quick", "--json", str(path)])
    planner.main()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["not_measured"] == "network namespaces need root"
    assert all(result[name] is None for name in planner.fields([]))
    assert "not measured: network namespaces need root" in capsys.readouterr().out


def test_a_slow_cable_calls_for_less_bytes():
    device_stream.compiled()
    pace = {"device": 1.0, "memory": 0.0, "message_s": 0.0}
    names = ["sync", "sync_bf16", "2d"]
    compute = {"fixed": (0.0, 0.0), "per_token": (1e-5, 2e-5)}
    (found,) = children.ask(
        "benchmarks.planner.choose", size=dataclasses.asdict(TINY), compute=compute, names=names,
        paces=[{**pace, "bytes_per_s": 1e3}],
    )  # fmt: skip
    by_name = {one["choice"]: one for one in found}
    assert set(by_name) == set(names)
    assert by_name["sync_bf16"]["bytes"] < by_name["sync"]["bytes"]
    assert by_name["sync_bf16"]["ms"] < by_name["sync"]["ms"]
    assert by_name["sync"]["ms"] > 1e3 * 64 * 3e-5  # the compute of 64 tokens on the device stream
