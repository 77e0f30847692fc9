"""Python environments that hold only given distributions and their requirements.

One with TensorFlow stands for a server, one with our wheel's requirements for a new installation.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence


def make_environment(folder: pathlib.Path, names: Sequence[str] = ("tensorflow",)) -> pathlib.Path:
    """Makes a virtual environment in `folder` with links to this one's distributions. Returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in _with_requirements(names):
        for path in distribution.files or ():
            entry = path.parts[0]
            if entry not in ("..", "__pycache__") and not (site / entry).exists():
                os.symlink(distribution.locate_file(entry), site / entry)
    return folder / "bin" / "python"


def _with_requirements(names: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """Returns the installed distributions of these names and all their requirements on this machine."""
    found, open_ends = {}, list(names)
    while open_ends:
        name = _canonical(open_ends.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # The requirement is for another system or Python.
        for requirement in found[name].requires or ():
            if "extra ==" not in requirement:
                open_ends.append(re.match(r"[\w.-]+", requirement).group())
    return list(found.values())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
