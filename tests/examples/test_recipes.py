"""The recipes of the pages find a planted answer, and the Criteo example the signal of the Criteo sample."""

import numpy as np
import pytest

from tests.docs.commands import ROOT, programs
from tests.examples.test_criteo_dlrm import example, write_log
from tests.support.shared import shared_path
from tf_fusedrec.cli.main import main
from tf_fusedrec.metrics import exact
from tf_fusedrec.models.run_folder import read_record


@pytest.mark.slow
def test_the_program_for_a_file_of_clicks_finds_the_tastes_of_users_and_items(tmp_path, monkeypatch):
    """The log has more users, and a larger batch, than the page's. With Adagrad(0.1), rows hardly train: 0.66."""
    monkeypatch.chdir(tmp_path)
    random, lines = np.random.default_rng(0), 20000
    users, items = random.integers(0, 1000, lines), random.integers(0, 300, lines)
    log_odds = random.normal(0, 1.2, 1000)[users] + random.normal(0, 1.2, 300)[items] - 1
    clicked = random.random(lines) < 1 / (1 + np.exp(-log_odds))
    rows = [f"{user},{item},30,{int(click)}\n" for user, item, click in zip(users, items, clicked)]
    (tmp_path / "clicks.csv").write_text("user,items,age,clicked\n" + "".join(rows).replace(",30,", ",,", 1))
    code = programs(ROOT / "docs/your_data.md")[-1].code
    sizes = "SAMPLES, HELD_OUT, BATCH = 2000, 400, 40"
    assert sizes in code
    names = {"__name__": "docs"}
    exec(compile(code.replace(sizes, "SAMPLES, HELD_OUT, BATCH = 20000, 2000, 256"), "your_data.md", "exec"), names)
    possible = exact.auc(clicked[-2000:], log_odds[-2000:])
    assert 0.75 <= names["history"]["val_auc"][-1] < possible + 0.02


@pytest.mark.slow
def test_the_criteo_example_learns_from_the_sample(tmp_path):
    with np.load(shared_path("data/criteo_sample/criteo.npz")) as sample:
        labels, integers, ids = (sample[name][:30000] for name in ("label", "dense", "cat"))
    strings = np.where(ids < 0, "", np.char.mod("%x", ids))
    write_log(tmp_path / "log.txt", labels, integers, strings)
    history = example().main(["--data", str(tmp_path / "log.txt"), "--output", str(tmp_path / "out")])
    assert history["val_auc"][-1] >= 0.63


def test_what_fusedrec_new_writes_finds_the_tastes_of_users(tmp_path, monkeypatch):
    """Each user clicks one category more often than the three others."""
    monkeypatch.chdir(tmp_path)
    random, lines = np.random.default_rng(0), 20000
    users, items = random.integers(0, 300, lines), random.integers(0, 100, lines)
    category, taste = random.integers(0, 4, 100)[items], random.integers(0, 4, 300)[users]
    clicked = random.random(lines) < np.where(category == taste, 0.5, 0.1)
    columns = (users, items, 1_700_000_000 + 60 * np.arange(lines), category, clicked.astype(int))
    table = "".join(f"u{u},i{i},{time},c{c},{click}\n" for u, i, time, c, click in zip(*columns))
    (tmp_path / "clicks.csv").write_text("user,item,time,category,clicked\n" + table)
    assert main(["new", "clicks.csv"]) == 0
    assert main(["train", "clicks.yaml", "--output", "run", "--set", "train.epochs=4"]) == 0
    assert read_record(tmp_path / "run")["results"]["test"]["ctr_auc"] >= 0.62
