"""Runs have folders and records of their own. `fusedrec runs` lists them, and clears data that no job reads."""

import json
import subprocess
import sys

import pytest

from tests.models.test_screen import DONE
from tests.support.shared import ROOT
from tf_fusedrec.cli.main import main
from tf_fusedrec.models import run_folder


def recorded(folder, **fields):
    """Writes a record, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.lock").touch()
    record = {**DONE, "name": "clicks", "seconds": 75.0, "started": "2026-11-25T23:42:00+00:00", **fields}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def data_set(folder):
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text("{}" * 500, encoding="utf-8")
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    used = data_set(tmp_path / "runs/.data/table-1")
    data_set(tmp_path / "runs/.data/table-2")
    recorded(tmp_path / "runs/clicks/2026-11-25_2342", data={**DONE["data"], "folder": str(used)})
    running = {"started": "2026-11-26T10:00:00+00:00", "state": "running", "metrics": {}}
    recorded(tmp_path / "runs/mine", name="other", data={**DONE["data"], "folder": "runs/.data/table-2"}, **running)
    (tmp_path / "runs/clicks/latest").symlink_to("2026-11-25_2342")
    early = {"name": "early", "state": "failed", "seconds": 1.0, "started": "2026-11-24", "epochs": []}
    (tmp_path / "runs/early").mkdir()
    (tmp_path / "runs/early/run.json").write_text(json.dumps(early), encoding="utf-8")
    return tmp_path / "runs"


def test_the_newest_run_comes_first_and_data_tell_their_size(root, capsys):
    assert main(["runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["runs/mine", "killed", "1:15", "3/3"]  # no process holds the lock of the running job
    assert lines[2][:4] == ["runs/clicks/2026-11-25_2342", "done", "1:15", "3/3"]
    assert lines[2][4:] == ["click", "AUC", "0.6539", "(0.6533)"] and len(lines) == 6
    assert lines[3] == ["runs/early", "failed", "1", "s", "0"]
    assert " ".join(lines[5]) == "converted data: 2 sets, 0.0 MB in runs/.data"
    assert main(["runs", "clicks", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [*answer["runs"]] == ["runs/clicks/2026-11-25_2342"] and [*answer["data"].values()] == [1000, 1000]


def test_data_that_a_process_holds_are_not_cleared(root):
    """A job of another folder of runs holds them, too."""
    program = "import pathlib; from tf_fusedrec.models import data_cache; "
    program += f"data_cache.hold(pathlib.Path({str(root / '.data/table-2')!r})); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as job:
        job.stdout.readline()
        assert main(["runs", "--clear-data"]) == 0
        job.communicate(b"\n")
    assert [path.name for path in (root / ".data").iterdir() if path.is_dir()] == ["table-2"]
    assert main(["runs", "--clear-data"]) == 0 and not [path for path in (root / ".data").iterdir() if path.is_dir()]


def test_a_damaged_record_and_a_missing_folder_are_named(root, capsys):
    (root / "mine/run.json").write_text('{"state": ', encoding="utf-8")
    assert main(["runs"]) == 1 and "runs/mine/run.json is damaged" in capsys.readouterr().err
    assert main(["runs", "--root", "nothing"]) == 1 and "--root 'nothing' is no folder" in capsys.readouterr().err


def test_runs_of_one_minute_have_folders_of_their_own_and_the_name_means_the_newest(tmp_path):
    first, second = (run_folder.new_folder("clicks", tmp_path) for _ in range(2))
    assert first != second and first.parent == second.parent == tmp_path / "clicks"
    with pytest.raises(ValueError, match="'.*clicks' has no run.json. Pass a folder of `fusedrec train`"):
        run_folder.run_of(tmp_path / "clicks")
    recorded(first), recorded(second)
    assert run_folder.run_of(tmp_path / "clicks") == second and run_folder.run_of(first) == first


def test_a_record_is_whole_as_the_run_goes_and_goes_on_when_it_is_resumed(tmp_path):
    record = run_folder.RunRecord(tmp_path)
    record.update(state="running", epochs=[{"epoch": 1}])
    assert not (tmp_path / "run.json.new").exists()
    began = run_folder.read_record(tmp_path)["started"]
    record.fields["seconds"] = 100.0
    (tmp_path / "run.json").write_text(json.dumps({**record.fields, "state": "interrupted"}), encoding="utf-8")
    again = run_folder.RunRecord(tmp_path, resumed=True)
    again.update(state="done")
    found = run_folder.read_record(tmp_path)
    assert found["started"] == began and len(found["resumed"]) == 1 and found["epochs"] == [{"epoch": 1}]
    assert 100 <= found["seconds"] < 110
    again.begin_new_data()
    again.update(epochs=[{"epoch": 1, "loss": 0.5}])
    assert run_folder.read_record(tmp_path)["epochs_of_earlier_data"] == [[{"epoch": 1}]]
    assert run_folder.RunRecord(tmp_path).fields["epochs"] == []  # a new run in an old folder


def test_the_record_names_commit_and_changed_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder.circumstances()["code"] == {}

    def git(*words):
        names = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *names, *words], check=True, capture_output=True, encoding="utf-8")
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1", encoding="utf-8")
    git("add", "a")
    git("commit", "-qm", "x")
    (tmp_path / "a").write_text("2", encoding="utf-8")
    (tmp_path / "untracked").touch()
    facts = run_folder.circumstances()
    assert facts["code"] == {"commit": git("rev-parse", "HEAD"), "changed_files": 1}
    assert facts["ranks"] == len(facts["hosts"]) == 1 and facts["versions"]["numpy"]
