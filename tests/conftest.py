"""Markers by what a test module uses, so that no list of tests goes stale. `make quick` leaves all of them out.

Without TFRA, which is an extra, the tests that need it are skipped. They are those that end in the error of
tf_fusedrec/tables/tfra_library.py, in this process or in one that they start.
"""

import importlib.util
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
    """Markers of a test module: of its folder, and of the processes that it starts."""
    folder = pathlib.Path(module.__file__).relative_to(TESTS).parts[0]
    used = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in vars(module).values()}
    used |= {value.__name__ for value in vars(module).values() if isinstance(value, type(pytest))}
    found = {marker for marker, modules in STARTS.items() if used & set(modules)}
    return found | ({FOLDERS[folder]} if folder in FOLDERS else set())


def pytest_collection_modifyitems(items):
    for item in items:
        for marker in markers_of(item.module):
            item.add_marker(marker)


def tfra_is_there() -> bool:
    try:
        return importlib.util.find_spec("tensorflow_recommenders_addons") is not None
    except ModuleNotFoundError:  # of a test that blocks the import
        return False


def skipped_without_tfra(report, where):
    """The report of a test or of a module, as skipped if it failed because TFRA is not installed."""
    if report.failed and not tfra_is_there() and "Recommenders Addons (TFRA) is not installed" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(where), 0, "Skipped: needs TFRA, the extra tf_fusedrec[tfra]")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return skipped_without_tfra((yield), item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skipped_without_tfra((yield), collector.path)
