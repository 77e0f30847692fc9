"""Python processes in which chosen packages seem not to be installed."""

import importlib.abc
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.shared import ROOT

TFRA = "tensorflow_recommenders_addons"


class Blocked(importlib.abc.MetaPathFinder):
    """Refuses the import of these packages, with Python's own error for a missing one."""

    def __init__(self, packages: Sequence[str]):
        self._packages = frozenset(packages)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block(*packages: str) -> None:
    """Hides packages from the imports of this process that follow."""
    sys.meta_path.insert(0, Blocked(packages))


def run_without(packages: Sequence[str], program: str, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """Runs a program in a process of its own that cannot import `packages`."""
    lines = ["from tests.support import blocked", f"blocked.block(*{tuple(packages)!r})", program]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s,
    )  # fmt: skip
