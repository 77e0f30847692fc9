"""The program `fusedrec`. A command is a module beside this one, which is imported when the command is called.

A command's module has a docstring, which is its help; add_parser(subparsers), which declares its arguments; and
run(arguments), which returns the exit code. It raises ValueError for what the user can correct: the program prints the
message without a traceback. It imports what needs TensorFlow inside `run`, so that help and errors of arguments come at
once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

DONE, REFUSED, USAGE, RANK_FAILED, STOPPED = 0, 1, 2, 3, 130  # exit codes; 130 is 128 + SIGINT, as in shells

# The line of each command in the overview.
COMMANDS = {
    "Start": {
        "new": "write a commented YAML for your files: looks at the columns and proposes roles",
        "train": "prepare data, train, evaluate, export             fusedrec train clicks.yaml -n 2",
        "run": "start your own program on several processes       fusedrec run -n 2 train.py",
    },
    "Look": {
        "runs": "list runs, newest first",
        "report": "one HTML page, or text, of a run",
        "compare": "two or more runs: what differs, and how sure the difference is",
        "inspect": "a checkpoint, an export or a data set: tables, rows, ids",
    },
    "Use": {
        "evaluate": "metrics of a run on other data",
        "export": "checkpoint -> SavedModel, or a delta",
        "serve": "REST server that applies deltas",
    },
    "Machine": {
        "plan": "schedule and memory for a cluster that you do not have yet",
        "doctor": "is this installation sound?",
    },
}
OVERVIEW = """\
Train, evaluate, serve and look into recommendation models.

{commands}

Every command: --json for programs, --help. Exit codes: 0 done, 1 your input, 2 usage, 3 a rank failed, 130 stopped.
"""


class Parser(argparse.ArgumentParser):
    """A parser with the module's docstring as it is written, the option --json, and no abbreviated options."""

    def __init__(self, **options: Any):
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options}
        super().__init__(**options)
        self.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code. `words` are those after the program's name."""
    words = sys.argv[1:] if words is None else list(words)
    if not words or words[0] in ("-h", "--help"):
        print(overview(), end="")
        return DONE
    name = words[0]
    known = [command for commands in COMMANDS.values() for command in commands]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        print(f"error: there is no command {name!r}.{meant} Commands: {', '.join(known)}.", file=sys.stderr)
        return USAGE
    # TensorFlow's C++ log would fill the screen with notices. Errors come as Python exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command = importlib.import_module(f"tf_fusedrec.cli.{name}")
    arguments = parse(command, words)
    try:
        return command.run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return STOPPED


def parse(command: Any, words: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command's module, and all words as `words`."""
    subparsers = argparse.ArgumentParser(prog="fusedrec").add_subparsers(parser_class=Parser)
    command.add_parser(subparsers)
    parser = subparsers.choices[words[0]]
    # `run` passes all words after the program on. Other commands take arguments and options in any order.
    read = parser.parse_args if words[0] == "run" else parser.parse_intermixed_args
    return read(words[1:], argparse.Namespace(words=words))


def say(arguments: argparse.Namespace, text: str) -> None:
    """Prints on standard error what a command does, before TensorFlow is loaded, which takes seconds."""
    if not arguments.json:
        print(f"{text} ...", file=sys.stderr, flush=True)


def write(option: str, path: pathlib.Path, text: str) -> None:
    """Writes the file that an option names. Raises ValueError: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} cannot be written: {error}. Use another file.") from error


def command_line(words: Sequence[str]) -> list[str]:
    """Returns words of a command line that begins with "fusedrec", for a shell in this folder."""
    if shutil.which("fusedrec"):
        return list(words)
    program = pathlib.Path(sys.executable).with_name("fusedrec")
    if not program.exists():
        return [sys.executable, "-m", "tf_fusedrec.cli.main", *words[1:]]
    here = pathlib.Path.cwd()
    return [str(program.relative_to(here) if program.is_relative_to(here) else program), *words[1:]]


def overview() -> str:
    """Returns the list of all commands."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, commands in COMMANDS.items():
        for number, (name, line) in enumerate(commands.items()):
            lines.append(f"  {group if number == 0 else '':<{width}}  {name:<9} {line}")
    return OVERVIEW.format(commands="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
