"""The program dispatches to its commands, and its exit codes say who has to act."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from tests.support.ranks import ROOT
from tf_fusedrec import cli
from tf_fusedrec.cli import main as program
from tf_fusedrec.cli.main import COMMANDS, main
from tf_fusedrec.models.data_sets.strings import STRINGS, write_strings

MODULES = {path.stem for path in pathlib.Path(cli.__file__).parent.glob("*.py")} - {"__init__", "main", "launch"}


def test_the_overview_names_the_commands(capsys):
    assert {name for names in COMMANDS.values() for name in names} == MODULES
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "  Start    new       " in shown and "           train     " in shown
    assert max(map(len, shown.splitlines())) <= 120


# What only the ops know of tables is refused before ranks start.
TABLES = ["train", "hstu_tiny", "--set", "embedding.groups=2", "--set", "embedding.rule=weight_sync", "--set"]
KERAS = ("tensorflow", "keras", "tf_keras")
CHECKPOINT = ["inspect", str(ROOT / "tests/golden/0.1.0/checkpoint"), "--table", "item", "--data", "{folder}"]


@pytest.mark.parametrize(
    ("words", "heavy", "shown"),
    [
        ([], (*KERAS, "pyarrow"), "  Start    new       "),
        (["run", "nothing"], (*KERAS, "pyarrow"), "error: PROGRAM: no such program"),
        (["train", "hstu_tiny", "--set", "train.epoch=3"], (*KERAS, "horovod"), "Did you mean 'epochs'?"),
        (
            [*TABLES, "embedding.tables.item.limits.eviction=lru"],
            KERAS,
            "item: TableConfig.limits.eviction of table 'item' is 'lru'",
        ),
        (
            [*TABLES, "embedding.tables.item.external.folder=x"],
            KERAS,
            "tables.item.external: folder must hold a checkpoint",
        ),
        (
            [*TABLES, "embedding.all_tables.limits.ttl_minutes=3"],
            KERAS,
            "limits.ttl_minutes of table 'item' is 3 under Topology(",
        ),
        (
            [*TABLES, "embedding.all_tables.limits.admission_count=3"],
            KERAS,
            "where replicas are averaged (rule 'weight_sync')",
        ),
        (CHECKPOINT, ("tensorflow",), "\nred shoe "),
        (["runs"], KERAS, ""),
        (["report", "{folder}"], KERAS, "has no run.json"),
        (["compare", "{folder}", "{folder}"], KERAS, "has no run.json"),
    ],
)
def test_what_needs_no_tensorflow_does_not_load_it(tmp_path, words, heavy, shown):
    write_strings(tmp_path / STRINGS, {"item": {0: "red shoe"}})
    words = [word.format(folder=tmp_path) for word in words]
    program = (
        f"import sys; from tf_fusedrec.cli.main import main; main({words}); print({set(heavy)} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    assert shown in done.stdout and done.stdout.endswith("set()\n"), done.stdout
    assert "the ranks start" not in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["doctor"], "looking at the installation ..."), (["serve", "."], "loading . ..."),
        (["inspect", "."], "reading . ..."),
    ],
)  # fmt: skip
def test_something_is_said_before_tensorflow_is_loaded(tmp_path, words, line):
    (tmp_path / "delta.json").touch()
    program = f"""if True:
        import os, sys, types
        def exit_at_first_words(text):
            print(text, "tensorflow" in sys.modules, flush=True)
            os._exit(0)
        sys.stderr = types.SimpleNamespace(write=exit_at_first_words)
        from tf_fusedrec.cli.main import main
        main({words})
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=env, encoding="utf-8")
    assert shown == f"{line} False\n"


@pytest.mark.parametrize("name", [name for names in COMMANDS.values() for name in names])
def test_every_command_has_help_with_an_example(capsys, name):
    with pytest.raises(SystemExit, match="^0$"):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert f"\n    fusedrec {name}" in shown and "--json" in shown, shown
    assert importlib.import_module(f"tf_fusedrec.cli.{name}").__doc__.strip() in shown


def test_an_unknown_command_or_option_is_a_usage_error(capsys):
    assert main(["trian"]) == 2
    assert "error: there is no command 'trian'. Did you mean 'train'? Commands: new," in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^2$"):
        main(["doctor", "--js"])  # no abbreviations, which a new option would make ambiguous
    assert "unrecognized arguments: --js" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [(ValueError("no such folder 'x'"), 1, "error: no such folder 'x'\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_a_user_can_correct_has_no_traceback(monkeypatch, capsys, raised, code, shown):
    def run(arguments):
        raise raised

    parser = types.SimpleNamespace(add_parser=lambda subparsers: subparsers.add_parser("doctor"), run=run)
    monkeypatch.setattr(program.importlib, "import_module", lambda name: parser)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == shown


def test_every_command_takes_json(monkeypatch, capsys):
    from tf_fusedrec.doctor import report

    monkeypatch.setattr(report, "report", lambda say: {"failed": {}})
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"failed": {}}
