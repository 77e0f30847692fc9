"""Figures of the pages come from benchmarks/results, and the pages tell both sides of a comparison."""

import json

import pytest

from tests.docs.commands import PAGES
from tools.docs import figure_tables, figures, headlines, quality
from tools.docs.figures import Results, Row

RESULTS = Results({"a": {"ms": {"k": 2.5}, "machine": "m"}, "b": {"ms": 4, "machine": "m"}}, frozenset({"a"}))


def test_a_figure_of_an_earlier_state_has_an_asterisk():
    assert figures.said("{a[ms][k]:.1f} ms", RESULTS) == r"2.5 ms \*"
    assert figures.said("{b[ms]} ms", RESULTS) == "4 ms"


def test_a_command_is_shown_once_for_the_rows_that_share_it():
    rows = [Row("x", "{b[ms]}", "run"), Row("y", "{b[ms]}", "run"), Row("z", "{b[ms]}", "other")]
    assert list(figures.table(rows, RESULTS))[2:] == ["| x | 4 | `run` |", "| y | 4 |  |", "| z | 4 | `other` |"]


def test_a_file_replaces_the_figure_of_an_earlier_state(tmp_path):
    for path in figures.RESULTS.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    kept["figures"]["new"] = {"ms": 1}
    (tmp_path / "figures.json").write_text(json.dumps(kept), encoding="utf-8")
    before = figures.load(tmp_path)
    assert before.values["new"] == {"ms": 1, "machine": kept["machine"]} and "new" in before.earlier
    (tmp_path / "new.json").write_text('{"ms": 3, "machine": "m"}', encoding="utf-8")
    after = figures.load(tmp_path)
    assert after.values["new"]["ms"] == 3 and "new" not in after.earlier


def test_a_page_without_the_block_is_refused():
    page = "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb\n"
    made = figures.filled(page, {"x": "new"})
    assert made == "a\n<!-- generated: x -->\n\nnew\n\n<!-- end: x -->\nb\n"
    assert figures.filled(made, {"x": "new"}) == made
    with pytest.raises(ValueError, match="without the block 'y'"):
        figures.filled(page, {"y": "new"})


def test_five_themes_and_six_headlines():
    assert len(figure_tables.THEMES) == 5 and len(headlines.HEADLINES) == 6
    assert len(headlines.WHY.splitlines()) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_compares_with_tfra_tells_both_ratios(page):
    step = figures.load().values["train_step"]
    ratios = [f"{step[name]:.1f} times" for name in ("ratio_vs_tfra_as_launched", "ratio_vs_tfra")]
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert len({ratio in text for ratio in ratios}) == 1, f"wanted both of {ratios}, or none"


def test_the_quality_of_schedules_is_told_for_finished_jobs_only():
    def row(seeds, epochs, value):
        names = ("hr_at_10", "ndcg_at_10", "ne")
        ends = {f"{name}_{end}": number for name in names for end, number in (("low", -0.03), ("high", 0.01))}
        return {"seeds": seeds, "epochs": epochs, **dict.fromkeys(names, value), **ends} | {
            f"{name}_difference": -0.01 for name in names
        }

    variants = {"sync": row([1, 2], [30, 28], 0.25), "weight_sync_g4_c2": row([1], [9], 0.24)}
    result = {"variants": variants, "missing": ["nested_M4 seed 1", "nested_M4 seed 2", "sync seed 2"], "growth": []}
    early = {"variant": "weight_sync_c1", "hr_at_10_difference": -0.5, "hr_at_10_low": -0.6, "hr_at_10_high": -0.4}
    first = {"epochs": 3, "ranks": 2, "variants": [{"variant": "sync", "hr_at_10": 0.2}, early]}
    lines = quality.block({"schedule_quality": result, "schedule_quality_3_epochs": first}).splitlines()
    assert lines[-1].endswith("from 0.200: 2 groups, `weight_sync`, moments scaled by 1: -0.500 [-0.600, -0.400].")
    assert lines[2] == '| `"sync"` | 1, 2 | 30, 28 | 0.250 | 0.250 | 0.250 |'
    cell = "0.240; -0.010 [-0.030, +0.010]"
    assert lines[3] == f"| 4 groups, `weight_sync`, moments scaled by 2 | 1 | 9 | {cell} | {cell} | {cell} |"
    assert 'Not finished yet: `Nested(4)` (seed 1, 2); `"sync"` (seed 2).' in lines
    assert not any("second_moments" in line for line in lines)
    result |= {"missing": [], "growth": [{"epoch": 1, "measured_1": 1.0, "measured_2": 2.0}]}
    grown = quality.block({"schedule_quality": result, "schedule_quality_3_epochs": first})
    assert "second_moments" in grown and "Not finished" not in grown
