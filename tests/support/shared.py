"""Where the tests find the data sets and oracle files that lie beside a developer's checkout."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def shared_path(name: str) -> pathlib.Path:
    """The file or folder `name` of ../shared; skips the test, saying why, when it is not there."""
    path = ROOT.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not there (it is not part of the repository)")
    return path
