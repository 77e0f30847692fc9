"""Marks each test module by the functions that it uses. `make quick` leaves all marked tests out."""

import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent
# Modules whose functions start processes, by the marker of a test module that has one of these functions.
STARTS = {
    "ranks": ("tests.support.ranks", "tests.support.launched"),
    "slow": ("subprocess",),
}
FOLDERS = {"cuda": "emulation", "gpu": "emulation", "benchmarks": "benchmarks", "soak": "slow", "fuzz": "slow"}


def markers_of(module) -> set[str]:
    """Returns the markers of a test module, by its folder and by the processes that it starts."""
    folder = pathlib.Path(module.__file__).relative_to(TESTS).parts[0]
    used = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in vars(module).values()}
    used |= {value.__name__ for value in vars(module).values() if isinstance(value, type(pytest))}
    found = {marker for marker, modules in STARTS.items() if used & set(modules)}
    return found | ({FOLDERS[folder]} if folder in FOLDERS else set())


def pytest_collection_modifyitems(items):
    for item in items:
        for marker in markers_of(item.module):
            item.add_marker(marker)
