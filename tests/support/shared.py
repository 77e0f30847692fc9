"""Finds the data sets and oracle files beside a developer's checkout."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def shared_path(name: str) -> pathlib.Path:
    """Returns the file or folder `name` of ../shared, or skips the test with a reason if it is missing."""
    path = ROOT.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not there (it is not part of the repository)")
    return path
