"""benchmarks/README.md lists every command of the folder, and nothing else."""

import pathlib
import re

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
TABLE = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
LISTED = [f"benchmarks.{name}" for name in re.findall(r"^\| `([\w.]+)` \|", TABLE, re.M)]
COMMAND = re.compile(r"^ +python -m (benchmarks\.[\w.]+)", re.M)


def commands():
    """Returns the commands that modules of the folder name, indented, in their docstrings."""
    found = []
    for path in sorted(FOLDER.glob("*/*.py")):
        module = ".".join(("benchmarks", path.parent.name, *([] if path.stem == "__main__" else [path.stem])))
        named = COMMAND.findall(path.read_text(encoding="utf-8"))
        assert named in ([], [module]), f"{path} names another command than {module}"
        found += named
    return found


def test_every_command_is_listed_and_every_listed_command_exists():
    assert sorted(LISTED) == sorted(commands())


def test_every_folder_is_a_command():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"__pycache__", "harness", "results"}
    assert folders == {command.split(".")[1] for command in LISTED}
