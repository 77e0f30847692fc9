"""benchmarks.overlap computes its figures, writes nulls without root, and runs on a tiny model with root."""

import json

import numpy as np
import pytest

from benchmarks.harness import network
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import compute_times, contended, figures
from benchmarks.overlap.device_model import Compute, DeviceSize
from benchmarks.overlap.device_stream import DEVICE, MEMORY
from benchmarks.overlap.floors import Parts, exposed_ms, floor_ms, free_ms, kind_of, parts_of
from benchmarks.overlap.model import Size
from benchmarks.overlap.variants import VARIANTS
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, SemiAsync, Sync

WHY_NOT = network.why_not()
PARTS = Parts(ids=2, rows=60, gradients=60, dense=20, average=0, other=5)


@pytest.mark.parametrize(
    ("schedule", "compute", "lookup", "want"),
    [
        (Sync(), 200, 50, 2 + 50 + 60 + 200 + 60 + 5),
        (FrozenWindow(1), 200, 50, 2 + 50 + 60 + 200 + 60 + 5),
        (FrozenWindow(4), 200, 50, 2 + 50 + 10 + 200 + 10 + 5),
        (FrozenWindow(4), 80, 50, 2 + 50 + 10 + (100 + 15) + 10 + 5),  # the exchange is longer than the compute
        (DualBuffer(), 200, 50, 60 + 200 + 60 + 5),
        (DualBuffer(), 200, 500, 2 + 500),
        (Nested(4), 200, 50, 10 + 200 + 10 + 5),
        (Nested(4), 200, 400, 2 + 400),
        (SemiAsync(), 200, 50, 200 + 5),
        (SemiAsync(), 120, 50, 60 + 50 + 60),
        (SemiAsync(), 120, 0, 2 + 60 + 60 + 20),
        (Pipelined(6), 200, 50, 200 + 5),
        (Pipelined(3), 200, 50, 50 + 60 + 200 + 60 + 5),
        (Pipelined(2), 200, 50, 2 + 50 + 60 + 200 + 60 + 5),
    ],
)
def test_floor_of_a_schedule(schedule, compute, lookup, want):
    assert floor_ms(schedule, PARTS, compute=compute, lookup=lookup, layers=4) == pytest.approx(want)


def test_replicas_are_averaged_at_the_end():
    averaged = Parts(ids=2, rows=60, gradients=60, dense=20, average=7)
    for schedule in (Sync(), FrozenWindow(4), Nested(4), DualBuffer(), Pipelined(3)):
        without = floor_ms(schedule, PARTS, compute=200, lookup=0, layers=4)
        assert floor_ms(schedule, averaged, compute=200, lookup=0, layers=4) == pytest.approx(without + 7)


def test_replicas_sum_behind_the_gradients_and_learn_the_ids_under_the_compute():
    shared = Parts(ids=2, rows=60, gradients=60, dense=20, replicas=30, replica_ids=8)
    for schedule, pieces in ((Sync(), 1), (FrozenWindow(4), 4), (Nested(4), 4), (DualBuffer(), 1), (Pipelined(3), 1)):
        without = floor_ms(schedule, PARTS, compute=300, lookup=0, layers=4)
        longer = 30 if pieces == 1 else 30 / 6
        assert floor_ms(schedule, shared, compute=300, lookup=0, layers=4) == pytest.approx(without + longer)
    assert floor_ms(Sync(), shared, compute=5, lookup=0, layers=4) == 2 + 60 + 8 + 60 + 30 + 5
    assert floor_ms(SemiAsync(), shared, compute=5, lookup=0, layers=4) == 2 + 8 + 60 + 60 + 30 + 20


def test_a_record_is_parted_by_kind():
    record = {
        "sync.item.0.ids": [(0.000, 0.002)],
        "sync.item.0.rows": [(0.001, 0.012)],  # waits for the ids, then takes 10 ms
        "sync.item.0.gradients": [(0.020, 0.030)],
        "HorovodAllreduce_grads_0": [(0.022, 0.035)],
        DEVICE: [(0.010, 0.016), (0.025, 0.032)],
        MEMORY: [(0.0, 1.0)],
    }
    found = parts_of(record)
    for name, want in {"ids": 2, "rows": 10, "gradients": 10, "dense": 5, "other": 0}.items():
        assert getattr(found, name) == pytest.approx(want)
    # Exchanges run from 0 to 12 and from 20 to 35 ms; the device hides 2 and 7 of them.
    assert exposed_ms(record) == pytest.approx(27 - 9)
    del record[MEMORY]
    assert free_ms(record, 0.0, 0.04) == pytest.approx(4 + 5)  # from 16 to 20 ms, and behind the last exchange


def test_kinds_of_collectives():
    kinds = {
        "nested_M8.item.3.rows": "rows", "2d.item.0.gradients": "gradients", "2d.item.0.ids": "ids",
        "2d.item.0.replicas.gradients": "replicas", "2d.item.0.replicas.sums": "replicas",
        "2d.item.0.replicas.ids": "replica_ids", "2d.item.0.replicas.ranges": "replica_ids",
        "2d_weight_8.item.average.rows": "average", "HorovodAllreduce_x_0": "dense", "model_of_sync.weights": "other",
        "model_of_sync.has_data.0": "other",
    }  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds


def turn(step, exposed=0.0, free=0.0, compute=0.0, lookup=0.0, **parts):
    all_parts = {name: parts.get(name, 0.0) for name in Parts.__dataclass_fields__}
    return {
        "step": step, "cpu": 20.0, "exposed": exposed, "free": free, "compute": compute, "lookup": lookup,
        "parts": all_parts,
    }  # fmt: skip


def test_figures_are_made_of_turns():
    bare = turn(110, rows=50, gradients=50)
    answer = {
        "device": 0.5,
        "variants": {
            "sync": {"full": turn(250, exposed=100, free=10, compute=140), "bare": bare},
            "frozen_M4": {"full": turn(200, exposed=20, compute=140), "bare": bare},
            "sync_lookup45": {"full": turn(400, exposed=100, compute=140, lookup=200), "bare": bare},
            "dual_lookup45": {"full": turn(300, exposed=100, compute=140, lookup=200), "bare": bare},
        },
    }
    one = figures.case({"rate": "1gbit"}, answer, layers=4, ranks=4)
    assert one["ratio"] == 1.4 and one["device_cores"] == 2
    found = figures.fields(one)
    assert found["exposed_ratio_frozen_M4"] == 0.2 and found["speedup_frozen_M4"] == 1.25
    assert found["speedup_dual_lookup45"] == 400 / 300 and found["speedup_2d"] is None
    floors = {"sync": 240, "frozen_M4": 140 + 100 / 6, "sync_lookup45": 440, "dual_lookup45": 240}
    assert {name: variant["floor_ms"] for name, variant in one["variants"].items()} == pytest.approx(floors)
    assert found["floor_ratio_worst"] == pytest.approx(200 / (140 + 100 / 6))
    assert one["variants"]["sync"]["cores"] == 4 * 20 / 250 and one["variants"]["sync"]["free_ms"] == 10
    other = {**one, "rate": "250mbit", "variants": {"frozen_M4": {**one["variants"]["frozen_M4"], "speedup": 1.5}}}
    slow = figures.fields_at("250mbit", [one, other])
    assert slow["speedup_frozen_M4_250mbit"] == 1.5 and slow["exposed_ratio_frozen_M4_250mbit"] == 0.2
    assert slow["speedup_semi_async_250mbit"] is None


def test_contended_figures_are_made_of_medians():
    ms = {
        "dense_only": [90, 100, 300], "exchange_only": [80, 80, 81], "sync": [190, 180, 170],
        "frozen_M4": [120, 120, 125], "dual": [170, 180, 180], "nested_M4": [110, 112.5, 115],
        "semi_async": [144, 144, 144],
    }  # fmt: skip
    one = contended.case(ms)
    assert one["ratio"] == 100 / 80
    assert contended.fields(one) == {
        "contended_exposed_ratio_frozen_M4": 0.25,
        "contended_exposed_ratio_nested_M4": 12.5 / 80,
        "contended_speedup_frozen_M4": 1.5,
        "contended_speedup_nested_M4": 1.6,
        "contended_speedup_dual": 1.0,
        "contended_speedup_semi_async": 1.25,
    }


def test_every_field_has_a_variant():
    assert all(variant in VARIANTS for _, variant in figures.FIELDS.values())
    assert set(figures.AT_OTHER_RATES) <= {"floor_ratio_worst", *figures.FIELDS}
    others = {variant for name in figures.AT_OTHER_RATES for _, variant in (figures.FIELDS.get(name, ("", "sync")),)}
    assert others <= set(overlap.OTHER_VARIANTS)
    assert all(variant.model in VARIANTS for variant in VARIANTS.values() if variant.model)
    assert all(variant.baseline in VARIANTS for variant in VARIANTS.values())


def test_times_of_compute_are_a_line():
    assert compute_times.line([10, 20, 40], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 0.2))
    assert compute_times.line([10, 20], [1.0, 2.5])[0] == 0, "no time is negative"
    assert Compute(fixed=(1, 2), per_token=(0.1, 0.2)).seconds(10, 4) == pytest.approx(4 * 3 + 10 * 0.3)


def test_without_root_fields_are_null_and_the_reason_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(overlap.bytes_sent, "headline", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["overlap", "--quick", "--json", str(tmp_path / "overlap.json")])
    overlap.main()
    result = json.loads((tmp_path / "overlap.json").read_text(encoding="utf-8"))
    slow = figures.fields_at(overlap.SLOW_RATE, [])
    names = (*figures.fields(None), *slow, *contended.fields(None), "bytes_ratio_clustered", "clustering_ms")
    assert all(result[name] is None for name in names)
    assert result["not_measured"] == "network namespaces need root" and result["cases"] == []
    assert "not measured: network namespaces need root" in capsys.readouterr().out


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_tiny_run(capsys):
    size = DeviceSize(users=8, tokens_per_user=64, dim=512, weights=1000, batches=2)
    compute = {"fixed": [0.001, 0.001], "per_token": [1e-4, 1e-4]}
    variants = ["sync", "dual", "sync_lookup45", "dual_lookup45"]
    phases = [
        overlap.phase("200mbit", variants, 3, 2, device=1.0),
        overlap.phase("20mbit", ["sync"], 1, 2),
    ]
    fast, slow = overlap.run_ranks(4, size, compute, phases)
    # The device takes its time, whatever the variant.
    seconds = Compute(**compute).seconds(size.tokens)
    assert all(variant["compute_ms"] == pytest.approx(1e3 * seconds) for variant in fast["variants"].values())
    # Half of the rows and gradients pass the cable, 1 MB from each host: 40 or 400 ms.
    assert slow["parts"]["sync"]["rows"] > 2 * fast["parts"]["sync"]["rows"]
    assert slow["parts"]["sync"]["gradients"] > 0 and slow["parts"]["sync"]["dense"] > 0
    # Lookups take 45 % of the step that they make longer; that is the ranks' mean, on a machine that others use.
    sync = fast["variants"]["sync_lookup45"]
    assert 0.25 < sync["lookup_ms"] / sync["ms"] < 0.65
    assert fast["variants"]["sync"]["lookup_ms"] == 0
    for variant in fast["variants"].values():
        assert (
            0 < variant["exposed_ms"] < variant["ms"]
            and variant["cpu_ms"] > 0
            and variant["floor_ms"] > variant["compute_ms"]
        )
    figures.show(fast)
    said = capsys.readouterr().out
    assert "dual: traced" in said and "exposed ratio" in said and "take time and no core" in said


def test_weak_scaling_is_against_one_rank(monkeypatch):
    def run_ranks(ranks, size, compute, phases):
        (one,) = phases
        assert (one["rate"] is None) == (ranks == 1) and one["device"] == 0.5
        return [figures_of(ranks, 100.0 * ranks)]

    def figures_of(ranks, ms):
        return {
            "ranks": ranks,
            "device_cores": 2.0,
            "variants": dict.fromkeys(overlap.SCALING_VARIANTS, {"ms": ms, "cores": 0.5}),
        }

    monkeypatch.setattr(overlap, "run_ranks", run_ranks)
    rows = overlap.weak_scaling(overlap.DEVICE_SIZE, {}, figures_of(4, 250.0))
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    assert [row["efficiency_sync"] for row in rows] == [1.0, 0.5, 0.4, 0.125]


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_tiny_contended_run():
    size = Size(users=8, history=60, exposures=4, dim=512, heads=2, batches=2)
    one = contended.ask(size, ["sync"], repeats=2)
    # 1 MB each way takes 2 x 8 ms on the wire.
    assert one["ms"]["exchange_only"] > 8 and one["speedup"] == {"sync": 1.0}


def test_the_real_model_is_timed():
    found = compute_times.measured(Size(users=0, history=4, exposures=2, dim=16, heads=1), repeats=1)
    assert np.shape(found["fixed"]) == np.shape(found["per_token"]) == (2,)
