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
    # tests/docs compare the files of docs/img with these.
    results = {"overlap": "overlap_scaling", "convergence": "convergence", "schedule_quality": "schedule_quality"}
    results |= {f"sizes/ranking_{data}_sizes": f"ranking_sizes_{data}" for data in ("kuairand", "ml1m")}
    for result, name in results.items():
        fields = json.loads((figures.RESULTS / f"{result}.json").read_text(encoding="utf-8"))
        assert figures.plot_of(fields) == kept[name], "the same result is the same file"


def test_results_of_a_benchmark_and_of_an_unknown_one(tmp_path, capsys):
    cases = [{"n_ids": 7, "peer": "x", "ratio": 1.25}, {"n_ids": 8, "peer": "x", "ratio": 0.5}]
    harness.write_json(tmp_path / "op.json", {"benchmark": "op", "cases": cases})
    (tmp_path / "step.json").write_text(
        json.dumps({"ms_ours": 2.0, "ms_p90_ours": 9.0, "ms_tfra": 3.0}), encoding="utf-8"
    )
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    plots.main(
        [
            "--output",
            str(tmp_path / "out"),
            *(str(tmp_path / f"{name}.json") for name in ("op", "step", "other")),
        ]
    )
    assert "other: no plot is known for it" in capsys.readouterr().out
    assert {"n_ids 7", "1.25", "0.5"} <= set(texts((tmp_path / "out/op.svg").read_text(encoding="utf-8")))
    step = texts((tmp_path / "out/step.svg").read_text(encoding="utf-8"))
    assert {"ours", "tfra"} <= set(step) and "p90_ours" not in step
    assert not (tmp_path / "out/other.svg").exists()
