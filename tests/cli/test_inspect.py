"""`fusedrec inspect` shows tables, rows and changes of checkpoints, and what exports and data sets hold."""

import json
import re
import shutil

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.tables import DictTable
from tests.support.ranks import ROOT
from tf_fusedrec.cli.main import main

GOLDEN = ROOT / "tests/golden/0.1.0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns two checkpoints of one job. All 100 items trained once before the first, and 0 to 4 twice after it."""
    root = tmp_path_factory.mktemp("inspect")
    table, random = DictTable("item", "user"), np.random.default_rng(0)
    table.train("item", range(100), random)
    table.train("user", range(10), random)
    simulated.save(root / "monday/checkpoint", [table], extra={"epoch": 1})
    for _ in range(2):
        table.train("item", range(5), random)
    table.train("item", [200], random)
    table.remove("item", [99])
    simulated.save(root / "tuesday/checkpoint", [table], extra={"epoch": 2})
    for name, data in simulated.DENSE.items():
        for save in root.glob("*/checkpoint/save-*"):
            (save / name).write_bytes(data)
    return root


def shown(capsys, *words):
    """Returns what the command prints, without blanks at the ends of lines."""
    assert main(["inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_overview_has_a_line_for_each_table(saved, capsys):
    about, save, _, *table = shown(capsys, saved / "tuesday").splitlines()
    assert about.startswith(f"{saved}/tuesday/checkpoint: format 2, 1 rank, ") and save.startswith("save    save-1-")
    cells = [re.split("  +", line)[:-1] for line in table]
    assert cells == [
        ["table", "rows", "dim", "dtype", "rule", "bytes", "lookups: median / max", "not seen for"],
        ["item", "100", "4", "float32", "double", "5.9 KiB", "1 / 3", "94% > 2 steps"],
        ["user", "10", "4", "float32", "double", "600 B", "1 / 1", "100% > 2 steps"],
    ]
    assert max(map(len, table)) <= 100


def test_a_table_in_detail_has_a_histogram_and_its_hottest_and_coldest_rows(saved, capsys):
    text = shown(capsys, saved / "tuesday", "--table", "item", "--rows", 2)
    assert re.search(r"\n +1 +95 +#{30}\n 2 to 3 +5 +##\n", text)
    hottest, coldest = text.split("hottest")[1].split("coldest")
    assert [line.split()[:3] for line in hottest.strip().splitlines()[1:]] == [["0", "3", "1"], ["1", "3", "1"]]
    assert [line.split()[:3] for line in coldest.strip().splitlines()[1:]] == [["5", "1", "4"], ["6", "1", "4"]]


def test_json_has_all_that_the_screen_has(saved, capsys):
    answer = json.loads(shown(capsys, saved / "tuesday", "--json"))
    assert answer["extra"] == {"epoch": 2} and answer["save"] in answer["kept"]
    item = answer["tables"]["item"]
    assert (item["rows"], item["lookups_max"], item["histogram"]) == (100, 3, [[1, 1, 95], [2, 3, 5]])
    assert item["hottest"][0]["id"] == 0 and item["unseen_share"] == pytest.approx(0.94)


def test_one_row_has_its_numbers_and_its_neighbors(saved, capsys):
    answer = json.loads(shown(capsys, saved / "tuesday", "--table", "item", "--id", "3", "--rows", "4", "--json"))
    assert (answer["id"], answer["lookups"], len(answer["row"]), len(answer["nearest"])) == (3, 3, 4, 4)
    cosines = [near["cosine"] for near in answer["nearest"]]
    assert cosines == sorted(cosines)[::-1] and 3 not in [near["id"] for near in answer["nearest"]]
    assert "nearest" in shown(capsys, saved / "tuesday", "--table", "item", "--id", "3")


def test_ids_have_the_text_that_the_data_set_of_the_run_keeps(saved, tmp_path, capsys):
    from tf_fusedrec.data.rows import Ragged, Rows
    from tf_fusedrec.models.data_sets.layouts import write_dataset

    rows = Rows({"exposed_item": Ragged(np.arange(2), np.array([0, 2]))}, 1)
    strings = {"user": {0: "ann"}, "item": {0: "red shoe", 3: "hat"}}
    write_dataset(
        tmp_path / "data", task="ranking", source="", split="", users=1, train=rows, test=rows, item_ids=np.arange(2),
        train_items=np.arange(2), strings=strings, codes={"user": ["bo"]},
    )  # fmt: skip
    words = [saved / "tuesday", "--data", tmp_path / "data", "--table"]
    assert re.search(r"\nred shoe +3 +1 .*\n1 +3 +1 ", shown(capsys, *words, "item"))
    answer = json.loads(shown(capsys, *words, "item", "--id", "hat", "--json"))
    assert (answer["id"], answer["text"]) == (3, "hat")
    names = [row["text"] for row in json.loads(shown(capsys, *words, "user", "--json"))["tables"]["user"]["hottest"]]
    assert names[:3] == ["ann", "bo", None]


def test_two_checkpoints_are_compared(saved, capsys):
    lines = shown(capsys, saved / "tuesday", "--against", saved / "monday", "--table", "item").splitlines()
    assert lines[3].split()[:5] == ["item", "100", "1", "1", "5"]
    assert {line.split()[0] for line in lines[6:]} == set("01234")


def test_exports_and_data_sets_are_described(tmp_path, capsys):
    from tf_fusedrec.models.data_sets.synthetic import write_synthetic_ranking

    text = shown(capsys, GOLDEN / "export-stock")
    assert "ops 'stock'" in text and re.search(r"\nuser +14 +2 +bfloat16 +168 B", text)
    write_synthetic_ranking(tmp_path / "data", users=40, items=30)
    text = shown(capsys, tmp_path / "data")
    assert "ranking data, 40 users, 30 items" in text and re.search(r"\nexposed_item +list<int64> +list<int64>", text)


def test_a_delta_says_what_it_changes_and_names_a_damaged_file(tmp_path, capsys):
    delta = tmp_path / "delta"
    shutil.copytree(GOLDEN / "delta-ours", delta)
    shutil.copy(GOLDEN / "apply_delta.py", delta)
    text = shown(capsys, delta)
    assert "a delta of an export, format 2\nversion None -> None\n" in text  # of a time without versions
    ids, removed = (np.load(delta / f"changes/user.{part}.npy") for part in ("ids", "removed"))
    size = sum((delta / f"changes/user.{part}.npy").stat().st_size for part in ("ids", "removed", "rows"))
    assert re.search(rf"\nuser +{len(ids)} +{len(removed)} +2 +bfloat16 +{size} B", text), text
    (delta / "changes/user.ids.npy").write_bytes(b"")
    assert main(["inspect", str(delta)]) == 1
    assert re.search("^error: file '.*user.ids.npy' is damaged", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such folder: nowhere. Name a run, a checkpoint"),
        (["."], ". is none of what this command reads: a run"),
        (["{saved}/tuesday", "--table", "itm"], "--table is 'itm', but .* has the tables \\['item', 'user'\\]"),
        (["{saved}/tuesday", "--id", "3"], "--id is '3' without --table"),
        (["{saved}/tuesday", "--table", "item", "--id", "99"], "--id is '99' \\(id 99\\), which table 'item' does n"),
        (["{saved}/tuesday", "--save", "7"], "save 7 is not one of the saves in"),
        (["{saved}/tuesday", "--rows", "0"], "--rows is 0, want at least 1"),
        (["{saved}/tuesday", "--against", "."], "--against is ., which has no checkpoint"),
        (["{save}"], "folder must hold a checkpoint, but .* is one of its saves. Use .*/tuesday/checkpoint, and n"),
        ([str(GOLDEN / "export-ours"), "--table", "item"], "--table is for checkpoints, and .* is none"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(saved, capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    save = next((saved / "tuesday/checkpoint").glob("save-*"))
    assert main(["inspect", *(word.format(saved=saved, save=save) for word in words)]) == 1
    assert re.match(f"error: {message}", capsys.readouterr().err)


def test_a_damaged_file_is_named(saved, capsys):
    path = next((saved / "monday/checkpoint").glob("save-*/dense.index"))
    path.write_bytes(b"x")
    assert main(["inspect", str(saved / "monday")]) == 1
    assert f"error: Checkpoint file {path} has too much: 1 bytes, want 0." in capsys.readouterr().err
