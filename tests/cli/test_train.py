"""`fusedrec train` chooses the experiment for the data, and refuses what cannot work before it starts ranks."""

import pytest

from tests.support.shared import ROOT
from tf_fusedrec.cli import train
from tf_fusedrec.cli.main import main


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("ratings.dat", "hstu_ml1m_tiny"),
        ("ratings.csv.gz", "hstu_ml1m_tiny"),
        ("u.data", "hstu_ml1m_tiny"),
        ("log.csv", "grm_kuairand"),
        (None, "grm_tiny"),
    ],
)
def test_the_data_set_chooses_the_experiment_unless_one_is_given(tmp_path, file, config):
    data = None if file is None else str(tmp_path)
    for name in ("mine.yaml", *([file] if file else [])):
        (tmp_path / name).touch()
    assert train.config_file(None, data).samefile(ROOT / f"configs/{config}.yaml")
    assert train.config_file(str(tmp_path / "mine.yaml"), data) == tmp_path / "mine.yaml"
    assert train.config_file("amazon_sports/sasrec_sports", data).samefile(
        ROOT / "configs/amazon_sports/sasrec_sports.yaml"
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--data", "nowhere"], "--data: no such file or folder 'nowhere'."),
        (["--data", "."], "--data . has none of the files that identify a data set (ratings.dat or"),
        (["grm_tinny"], "CONFIG: no such file 'grm_tinny'. Did you mean 'grm_tiny'? Shipped configurations: amazon"),
        (["--resume", "nowhere"], "'nowhere' is no folder. Pass a folder of `fusedrec train`"),
        (["--resume", ".", "--output", "b"], "--output is given beside --resume, which goes on in the folder"),
        (["--set", "train.epoch=3"], "train has an unknown field 'epoch'. Known fields: "),
        (["--set", "epochs=3", "-n", "2"], "the top level has an unknown field 'epochs'."),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.launch, "launch", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", *words]) == 1
    assert capsys.readouterr().err.startswith(f"error: {error}")
