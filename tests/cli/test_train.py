"""`fusedrec train` chooses the experiment for the data, and refuses what cannot work before it starts ranks."""

import json

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.tables import DictTable
from tests.models import experiments
from tests.support.shared import ROOT
from tf_fusedrec.cli import train
from tf_fusedrec.cli.main import main, parse


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
        (["--resume", ".", "--warm-start", "b"], "--warm-start is given beside --resume"),
        (["--warm-start", "nowhere"], "'nowhere' is no folder. Pass a folder of `fusedrec train`"),
        (["--set", "train.epoch=3"], "train has an unknown field 'epoch'. Did you mean 'epochs'? Known fields: "),
        (["--set", "epochs=3", "-n", "2"], "the top level has an unknown field 'epochs'."),
        (["--set", "embedding.groups=3", "-n", "2"], "embedding.groups: Topology.groups must divide the number of r"),
        (["--set", "embedding.groups=3", "-H", "a:2,b:2"], "embedding.groups: Topology.groups must divide the numb"),
        (["-n", "0"], "-n must be at least 1, got 0."),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.launch, "launch", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", *words]) == 1
    assert capsys.readouterr().err.startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("wrong", "words", "error"),
    [
        ("train: {epoch: 3}", [], "CONFIG:5: train has an un...\n   5 | train: {epoch: 3}\n     |         ^^^^^\n"),
        ("train:\n  epochs: 0", [], "CONFIG:6: train.epochs must be >= 1...\n   6 |   epochs: 0\n     |   ^^^^^^\n"),
        ("train: {epochs: 3}", ["--set", "train.epochs=0"], "train.epochs must be >= 1, got 0.\n"),
        ("train: {balance: globl}", [], "CONFIG:5: train.balance must be one of ['rank', 'global'], got 'globl'."),
        ("train: [", [], "CONFIG is not YAML: while parsing"),
        (
            "seed: 1",
            ["--set", "data={source: table, columns: {user: u, item: i, time: t, labels: [y], features: [brand]}}"]
            + ["--set", "model.item_features=[brnd]"],
            "model.item_features names 'brnd', which data.columns does not map for it. Did you mean 'brand'? Mapped: ",
        ),
    ],
)
def test_a_wrong_setting_has_its_file_and_line(tmp_path, capsys, wrong, words, error):
    config = tmp_path / "a.yaml"
    config.write_text(
        f"name: a\ntask: ranking\ndata: {{source: synthetic-ranking}}\nmodel: {{kind: grm}}\n{wrong}\n",
        encoding="utf-8",
    )
    assert main(["train", str(config), *words]) == 1
    shown = capsys.readouterr().err.replace(str(config), "CONFIG")
    begin, _, end = f"error: {error}".partition("...")
    assert shown.startswith(begin) and shown.endswith(end if end else shown), shown


@pytest.mark.parametrize(
    ("command", "damaged", "error"),
    [
        ("train --resume RUN", "item.rows-0.shard", "Checkpoint file RUN/checkpoint/SAVE/item.rows-0.shard is trunc"),
        ("evaluate RUN", "item.rows-0.shard", "Checkpoint file RUN/checkpoint/SAVE/item.rows-0.shard is truncated"),
        ("export RUN RUN/out", "dense.index", "Checkpoint file RUN/checkpoint/SAVE/dense.index has too much: 1 byte"),
        ("train a.yaml --warm-start RUN", "dense.index", "Checkpoint file RUN/checkpoint/SAVE/dense.index has too mu"),
        ("train a.yaml --resume RUN --set model.dim=5", "", "--resume: RUN/checkpoint was trained with other settings"),
        ("train a.yaml --warm-start RUN", "", "--warm-start: table 'item' of RUN/checkpoint has dim 4, and the model"),
        ("train a.yaml --warm-start OTHER", "", "--warm-start: OTHER/checkpoint has the tables ['shop'], and the mod"),
        ("train --resume OTHER", "", "checkpoint 'OTHER/checkpoint' names no experiment, so another program than"),
        ("evaluate OTHER", "", "checkpoint 'OTHER/checkpoint' names no experiment, so another program than"),
        ("export OTHER RUN/out", "", "checkpoint 'OTHER/checkpoint' names no experiment, so another program than"),
        ("export RUN OTHER", "", "OUTPUT must not exist, got 'OTHER'. Use another folder, or remove it.\n"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_before_ranks_start(
    tmp_path, monkeypatch, capsys, command, damaged, error
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.launch, "launch", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "a.yaml").write_text(json.dumps(experiments.RANKING), encoding="utf-8")
    for run, table, extra in (("OTHER", "shop", None), ("RUN", "item", {"experiment": experiments.RANKING})):
        rows = DictTable(table)
        rows.train(table, range(3), np.random.default_rng(0))
        save = simulated.save(tmp_path / run / "checkpoint", [rows], extra=extra)
        for name in simulated.DENSE:
            (tmp_path / run / "checkpoint" / save / name).touch()
        (tmp_path / run / "run.json").write_text("{}", encoding="utf-8")
    if damaged:
        (tmp_path / "RUN/checkpoint" / save / damaged).write_text("x", encoding="utf-8")
    assert main(command.replace("SAVE", save).split()) == 1
    assert capsys.readouterr().err.startswith("error: " + error.replace("SAVE", save))


def test_all_ranks_write_one_new_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = []
    monkeypatch.setattr(train.launch, "launch", lambda arguments, command, logs: commands.append(command) or (0, None))
    assert main(["train", "--ranks=2", "--set", "seed=1", "--", "grm_tiny"]) == 0  # as `make train` calls it
    rank = parse(train, commands[0][3:])
    (folder,) = (path for path in (tmp_path / "runs/grm_tiny").iterdir() if not path.is_symlink())
    assert (rank.config, rank.output, rank.set) == ("grm_tiny", folder.relative_to(tmp_path), ["seed=1"])
    assert capsys.readouterr().out == f"{rank.output}: the ranks start ...\n"


def test_a_model_of_other_settings_is_named_by_its_fields():
    from tf_fusedrec.models.saved_run import changes

    before = {"dim": 16, "crosses": ["a*b"], "more": {"x": 1, "y": 2}}
    now = {"dim": 8, "crosses": ["a*b"], "more": {"x": 1}}
    assert list(changes(before, now, "model")) == ["model.dim 16 -> 8", "model.more.y 2 -> None"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_failed_job_says_how_to_go_on_from_its_last_checkpoint(tmp_path, monkeypatch, capsys, whole):
    def read_manifest(folder):
        assert folder == tmp_path / "run/checkpoint"
        if not whole:
            raise ValueError("no checkpoint")

    (tmp_path / "run/checkpoint").mkdir(parents=True)
    monkeypatch.setattr("tf_fusedrec.files.saves.read_manifest", read_manifest)
    monkeypatch.setattr(train.launch, "launch", lambda *_: (3, None))
    assert main(["train", "--output", str(tmp_path / "run"), "-n", "2"]) == 3
    errors = capsys.readouterr().err
    assert ("continue with: " in errors) == whole and (f"train --resume {tmp_path / 'run'} -n 2\n" in errors) == whole
