"""Runs the tests that matter with another TensorFlow and Python: `make test-on TENSORFLOW=2.21.0 PYTHON=3.12`.

    python -m tools.versions --tensorflow 2.21.0 --python 3.12

It makes the environment (environment.py), builds the wheel, runs the tests of TESTS, and trains configs/grm_tiny.yaml
on a part of its data. The checkpoint and the export of that run must give equal answers in every environment made here.
The others' must give equal answers in this one (answers.py). The last line is the row of docs/install.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys

from tools import prerequisites
from tools.horovod_wheel import cache_folder, locked
from tools.steps import StepFailed
from tools.versions.environment import Environment
from tools.versions.pairs import pair

# Every test of one process, and the rooms where several ranks meet TensorFlow and Horovod; the longest come last.
# The copy of the clone has no git, and nothing that draws or reads notebooks.
ONE_PROCESS = "not (ranks or processes or emulation or benchmarks)"
PLOTS = "python -m benchmarks.plots --output plots"
TESTS = {
    # On one worker, because its fixtures build.
    "tests of the wheel": ["tests/environment/test_wheel.py", "--numprocesses", "0"],
    "tests of started processes": [
        *(f"tests/environment/test_{what}.py" for what in ("doctor", "legacy_keras", "bad_environments"))
    ],
    "tests of several ranks": [*(f"tests/{room}" for room in ("exchange", "embedding", "schedules")), "-m", "ranks"],
    "tests of one process": [
        "tests",
        *(f"--ignore=tests/{room}" for room in ("soak", "fuzz", "benchmarks")),
        *(f"--ignore=tests/{name}.py" for name in ("docs/test_figures", "docs/test_links", "docs/test_site")),
        "--ignore=tests/examples/test_notebooks.py",
        *("--deselect", f"tests/docs/test_commands.py::test_cheap_commands_end_well[{PLOTS}]"),
        *("-m", ONE_PROCESS),
    ],
}
GRM_TINY = ["--config", "configs/grm_tiny.yaml", "--set", "train.epochs=1", "--set", "data.users=300"]


def run_tests(environment: Environment) -> None:
    for what, chosen in TESTS.items():
        environment.run(what, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", *chosen)


def exchange_files(environment: Environment) -> list[str]:
    """Trains grm_tiny, and compares answers with all environments that have trained it. Returns their names."""
    trained = environment.folder / "grm_tiny"
    if not (trained / "results.json").exists():
        environment.run("grm_tiny", "-m", "models.train", *GRM_TINY, "--output", str(trained))
    others = [path.parent for path in environment.folder.parent.glob("*/grm_tiny/results.json")]
    environment.run("answers", "-m", "tools.versions.answers", *map(str, others))
    return sorted(path.parent.name for path in others if path != trained)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests the package with another TensorFlow and Python.")
    parser.add_argument("--tensorflow", required=True, help="a release, for example 2.21.0")
    parser.add_argument("--python", required=True, help="a minor version, for example 3.12")
    arguments = parser.parse_args()
    try:
        environment = Environment(pair(arguments.tensorflow, arguments.python))
        lacking = prerequisites.missing(environment.clone, cache_folder(), fresh=not environment.is_made())
        if lacking:
            raise StepFailed("\n".join(lacking))
        environment.folder.mkdir(parents=True, exist_ok=True)
        with locked(environment.folder / "lock", "another run of this pair is under way; waiting ..."):
            environment.make()
            wheel = environment.wheel()
            run_tests(environment)
            others = exchange_files(environment)
    except (StepFailed, ValueError) as error:
        print(f"{error}" if isinstance(error, StepFailed) else f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"files exchanged with: {', '.join(others) or 'no other environment'}")
    print(f"wheel: dist/{wheel.name}")
    print(environment.row(datetime.date.today()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
