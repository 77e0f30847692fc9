"""Plots show the numbers of the results, and a result without a plot is named."""

import json
import re

from benchmarks.harness import harness
from benchmarks.plots import __main__ as plots
from benchmarks.plots import figures


def texts(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_plots_of_the_kept_results_show_their_numbers():
    kept = figures.kept_plots()
    rows = figures.tables((figures.RESULTS / "table.txt").read_text(encoding="utf-8"))
    versus = next(table for title, table in rows.items() if title.startswith("against TFRA"))
    shown = texts(kept["table_versus_tfra"])
    for row in versus:
        for column in ("ms_ours", "ms_tfra"):
            assert f"{float(row[column]):.3g}" in shown
    assert "HSTU" in texts(kept["retrieval_ml1m"]) and "64 columns, uniform" in texts(kept["table_by_rows"])
    for data in ("kuairand", "ml1m"):
        assert {"grm", "dlrm"} <= set(texts(kept[f"ranking_sizes_{data}"]))
    assert {"TFRA, seed 0", "ours, seed 0", "ours, seed 1"} <= set(texts(kept["convergence"]))
    assert kept == figures.kept_plots(), "the same results are the same file"


def test_results_of_a_benchmark_and_of_an_unknown_one(tmp_path, capsys):
    cases = [{"n_ids": 7, "peer": "x", "ratio": 1.25}, {"n_ids": 8, "peer": "x", "ratio": 0.5}]
    harness.write_json(tmp_path / "op.json", {"benchmark": "op", "cases": cases})
    (tmp_path / "step.json").write_text(
        json.dumps({"ms_ours": 2.0, "ms_p90_ours": 9.0, "ms_tfra": 3.0}), encoding="utf-8"
    )
    entries = [
        {"model": "grm", "forward_mflops": 2.0, "gauc": 0.71234},
        {"model": "dlrm", "forward_mflops": 9.0, "gauc": 0.7},
    ]
    (tmp_path / "sizes.json").write_text(json.dumps({"data": "d", "sizes": entries}), encoding="utf-8")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    plots.main(
        [
            "--output",
            str(tmp_path / "out"),
            *(str(tmp_path / f"{name}.json") for name in ("op", "step", "sizes", "other")),
        ]
    )
    assert "other: no plot is known for it" in capsys.readouterr().out
    assert {"n_ids 7", "1.25", "0.5"} <= set(texts((tmp_path / "out/op.svg").read_text(encoding="utf-8")))
    step = texts((tmp_path / "out/step.svg").read_text(encoding="utf-8"))
    assert {"ours", "tfra"} <= set(step) and "p90_ours" not in step
    by_flops = texts((tmp_path / "out/sizes.svg").read_text(encoding="utf-8"))
    assert {"grm", "dlrm", "0.7123", "0.7000", "d, clicks"} <= set(by_flops)
    assert not (tmp_path / "out/other.svg").exists()


def test_weak_scaling_shows_every_step():
    rows = [{"ranks": 1, "ms_sync": 310.0, "cores": 0.1}, {"ranks": 8, "ms_sync": 1234.0, "cores": 0.9}]
    plot = figures.plot_of({"weak_scaling": rows, "cases": [{"ratio": 1.4}]})
    assert {"1", "8", "310", "1.23e+03", "sync"} <= set(texts(plot))


def test_curves_of_arms_and_moments_of_groups_are_named():
    epochs = [{"epoch": n, "validation": {"hr@10": 0.1 * n}} for n in (1, 2)]
    curves = [{"variant": variant, "seed": 1, "epochs": epochs} for variant in ("sync", "semi_async")]
    assert {"sync, seed 1", "semi_async, seed 1"} <= set(texts(figures.plot_of({"variants": {}, "curves": curves})))
    growth = [{"epoch": n, "measured_1": 1.0 * n, "measured_2": 1.5 * n, "expected_4": 2.5 * n} for n in (1, 2)]
    shown = texts(figures.second_moments(growth))
    assert "measured, groups: 2" in shown and "expected of 4 groups from 1 and 2" in shown
