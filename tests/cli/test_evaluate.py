"""`fusedrec evaluate` refuses paths that do not exist. tests/models/test_train.py compares its metrics with a job's."""

import pytest

from tf_fusedrec.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "error: RUN: no such folder: nowhere. Name the output folder of fusedrec train.\n"),
        ([".", "--data", "nowhere.csv"], "error: --data: no such file or folder: nowhere.csv.\n"),
        (["."], "error: folder must hold a checkpoint, but manifest.json is missing"),
    ],
)
def test_wrong_paths_are_refused(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *words]) == 1
    assert capsys.readouterr().err.startswith(message)
