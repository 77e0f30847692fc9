"""Plots show the numbers of the results. tests/docs compares the files of docs/img with them."""

import re

from benchmarks.harness import plots


def test_plots_of_the_kept_results_show_their_numbers():
    kept = plots.kept_plots()
    rows = plots.tables((plots.RESULTS / "table.txt").read_text(encoding="utf-8"))
    versus = next(table for title, table in rows.items() if title.startswith("against TFRA"))
    texts = {name: re.findall(r">([^<>]+)</text>", svg) for name, svg in kept.items()}
    for row in versus:
        for column in ("ms_ours", "ms_tfra"):
            assert f"{float(row[column]):.3g}" in texts["table_versus_tfra"]
    assert "HSTU" in texts["retrieval_ml1m"] and "64 columns, uniform" in texts["table_by_rows"]
