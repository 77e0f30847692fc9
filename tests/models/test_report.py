"""The report of a run: its numbers by independent loops, one page that needs no other file, parts that are gone."""

import html.parser
import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models.test_screen import DONE, METRICS
from tests.oracles.metrics import auc_oracle
from tests.support.shared import ROOT
from tf_fusedrec.cli.main import main
from tf_fusedrec.models import compare, report, train
from tf_fusedrec.models.data_sets.strings import write_strings

EVENTS = [3, 0, 7, 25, 1]  # training events of users 10, 11, ...


@pytest.fixture
def run(tmp_path):
    """A run of one task, without a checkpoint."""
    rng = np.random.default_rng(0)
    user = np.sort(rng.integers(10, 15, 300))
    label, logit = rng.integers(0, 2, 300).astype(float), rng.normal(size=300)
    folder, data = tmp_path / "run", tmp_path / "data"
    folder.mkdir()
    (data / "train").mkdir(parents=True)
    np.savez(
        folder / compare.SAMPLES, user=user, item=np.arange(300), time=np.arange(300), ctr_label=label, ctr_logit=logit,
        baseline_ctr=np.round(logit),
    )  # fmt: skip
    seen = {10 + number: count for number, count in enumerate(EVENTS) if count}
    rows = [(who, [1] * part) for who, count in seen.items() for part in (1, count - 1) if part]  # two rows of a user
    for number, half in enumerate((rows[::2], rows[1::2])):
        table = pa.table({"user_id": [who for who, _ in half], "exposed_item": [items for _, items in half]})
        pq.write_table(table, data / "train" / f"part-{number}.parquet")
    split = {"rows": 5, "missing": {}, "labels": {}}
    record = {
        **DONE, "folder": str(folder),
        "metrics": {name: METRICS[name] for name in ("loss", "ctr_auc")}, "labels": {"ctr": "<click>"},
        "seconds": 39.0, "started": "2026-11-25T23:42:00",
        "steps": {"step": [10, 20, 30], "loss": [0.7, 0.69, 0.68]}, "command": "fusedrec train", "versions": {},
        "data": {
            **DONE["data"], "folder": str(data), "rule": "By time.", "fingerprint": "12ab",
            "splits": {name: {**split, **of} for name, of in DONE["data"]["splits"].items()},
        },
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder, user, label, logit


def test_groups_of_users_and_bins_of_predictions_are_those_of_a_loop(run):
    folder, user, label, logit = run
    found = report.facts(folder)
    groups = {"0": [0], "1 to 4": [3, 1], "5 to 19": [7], "20 to 99": [25]}
    assert [group["users"] for group in found.activity["ctr"]] == [*groups]
    for group in found.activity["ctr"]:
        mine = np.array([EVENTS[who - 10] in groups[group["users"]] for who in user])
        assert group["events"] == mine.sum()
        assert group["auc"] == pytest.approx(auc_oracle(label[mine], logit[mine]))
        assert group["baseline"] == pytest.approx(auc_oracle(label[mine], np.round(logit[mine])))
    pairs = sorted(zip(logit, label))
    for number, bin_ in enumerate(found.calibration["ctr"]):
        part = pairs[30 * number : 30 * (number + 1)]
        assert bin_["predicted"] == pytest.approx(np.mean([1 / (1 + np.exp(-x)) for x, _ in part]))
        assert bin_["observed"] == pytest.approx(np.mean([y for _, y in part]))
        assert 0 <= bin_["low"] < bin_["observed"] < bin_["high"] <= 1
    assert len(found.calibration["ctr"]) == report.BINS and found.tables == {}


class Page(html.parser.HTMLParser):
    """Collects tags and text, and checks that tags are closed in their order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        """A tag without contents, such as a line of a plot."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_no_other_file_and_shows_what_the_text_shows(run, capsys):
    folder = run[0]
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report  {folder}/report.html\n"
    page = (folder / "report.html").read_text(encoding="utf-8")
    parsed = Page(page)
    assert parsed.open == [] and not re.search(r"https?://|src=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page and "<click>" not in page  # names of a user are no markup
    titles = [part for part in parsed.text.split("\n") if part]
    plots = [attributes["aria-label"] for tag, attributes in parsed.tags if tag == "svg"]
    assert plots == ["loss by step", "loss by epoch", "<click> AUC by epoch", "<click>: observed by predicted"], titles
    assert main(["report", str(folder), "--text"]) == 0
    shown = capsys.readouterr().out
    for group in report.facts(folder).activity["ctr"]:
        assert f"{group['auc']:.4f}" in shown and f"{group['auc']:.4f}" in parsed.text
    assert "validation loss rises since epoch 2" in shown and "validation loss rises since epoch 2" in parsed.text
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["record"]["state"] == "done"


def test_recorded_steps_are_in_the_page_with_their_picture(run, capsys):
    folder = run[0]
    (folder / "timeline").mkdir()
    step = {"number": 5, "step_ms": 12.5, "compute_ms": 8.0, "exchange_ms": 6.0, "exposed_ms": 4.0, "free_ms": 0.5}
    (folder / "timeline/steps.json").write_text(json.dumps([step]), encoding="utf-8")
    (folder / "timeline/step.png").write_bytes(b"PNG")
    assert main(["report", str(folder)]) == 0 and main(["report", str(folder), "--text"]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,UE5H"' in page and "<td>4.00</td>" in page
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["5", "12.50", "8.00", "6.00", "4.00", "0.50"] in lines


def test_tables_of_a_large_checkpoint_are_left_out_where_a_run_writes_its_report(run):
    folder = run[0]
    shutil.copytree(ROOT / "tests/golden/0.1.0/checkpoint", folder / "checkpoint")
    size = sum(path.stat().st_size for path in folder.glob("checkpoint/save-*/*"))
    words = "left out because they are large"
    for most, left_out in ((None, False), (size, False), (0, True)):
        found = report.facts(folder, most)
        assert (found.tables is None) == left_out
        assert (words in report.text(found, 100)) == (words in report.html(found)) == left_out
    assert re.search(r"\n +user +hottest +0 ", report.text(report.facts(folder), 100))
    write_strings(folder.parent / "data/strings.parquet", {"user": {0: "<ann>"}})
    found = report.facts(folder)
    assert re.search(r"\n +user +hottest +<ann> ", report.text(found, 100)) and "&lt;ann&gt;" in report.html(found)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8")) | {"epochs": [], "resumed": []}
    for state, of_this_run in (("failed", False), ("interrupted", True)):
        (folder / "run.json").write_text(json.dumps({**record, "state": state}), encoding="utf-8")
        assert bool(report.facts(folder).tables) == of_this_run


def test_a_report_that_fails_ends_no_run(run, monkeypatch):
    assert train._report(run[0]) == str(run[0] / "report.html") and (run[0] / "report.html").is_file()
    monkeypatch.setattr(report, "facts", lambda *_: {}["missing"])
    assert train._report(run[0]) == ""


def test_parts_whose_files_are_gone_are_left_out(run, tmp_path, capsys):
    folder = run[0]
    (tmp_path / "data").rename(tmp_path / "moved")
    found = report.facts(folder)
    assert found.activity == {} and found.calibration and "activity" not in report.text(found, 80)
    (folder / compare.SAMPLES).unlink()
    assert report.facts(folder).calibration == {} and "<svg" in report.html(report.facts(folder))
    (folder / "run.json").write_text(json.dumps({"state": "failed", "error": "ValueError: no file"}), encoding="utf-8")
    assert main(["report", str(folder)]) == 1
    assert "ended before its training began (ValueError: no file)" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "has no run.json. Pass a folder of `fusedrec train`" in capsys.readouterr().err
