"""Marks each test module by the modules that it uses. `make quick` leaves out every marked test.

A process has one Keras. Without TF_USE_LEGACY_KERAS=1 it is Keras 3, and the tests marked `legacy` are left out: those
that need tf_keras. `make test` calls pytest twice at once, the second time with
TF_USE_LEGACY_KERAS=1 for the tests marked `legacy` or `both`.

Tests that take seconds carry the marker `slow` themselves. A test without any marker must stay below QUICK_S.

Without TFRA, which is an extra, the tests that need it are skipped. They are those that end in the error of
tf_fusedrec/tfra/tfra_library.py, in this process or in one that they start.

A test that skips for a reason beyond MAY_SKIP fails.
"""

import contextlib
import functools
import gc
import importlib.util
import os
import pathlib
import re
import sys
import time

import pytest

from tests.support.forked import ForkingWorker, uses_tensorflow

TESTS = pathlib.Path(__file__).parent
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # this process has tf_keras
LEGACY_WORDS = {"tfra", "legacy"}  # in the name, the parameters or the code of a test that needs tf_keras
RANKS = {"tests.support.ranks", "tests.support.launched"}
PROCESSES = {"subprocess", "multiprocessing"}
# Several times what a quick test takes, because the caches of a process are empty at its first test.
QUICK_S = 10.0
DEAREST_FIRST = ("emulation", "ranks", "processes", "benchmarks")
MARKERS = ("ranks", "processes", "emulation", "benchmarks", "slow", "nightly")
FOLDERS = {"cuda": "emulation", "gpu": "emulation", "benchmarks": "benchmarks", "soak": "slow", "fuzz": "slow"}

# Reasons for a skip: a machine may lack these. A skip for any other reason fails.
MAY_SKIP = re.compile(
    "^Skipped: ("
    + "|".join([
        "no test on a GPU: ", "no session: ", "there is a GPU", "compute-sanitizer of the CUDA toolkit is not on PATH",
        "built without GPU kernels", "cuobjdump of the CUDA toolkit is not on PATH", "nvidia-cuda-nvrtc-cu12",
        "needs TFRA", "TFRA is not installed", "built without Gloo's sources",
        r"\.\./shared/.* is not there", "no shared/data",  # data sets that this project may not pass on
        "network namespaces need ", "this kernel refuses: ", ".*no TAP devices", "mounting a file system needs root",
        "this processor has ", "needs x86-64, ", "no 16 GiB of address space here", "not a git checkout",
        r"in Keras 3\.16\.0\.dev, ",  # what TensorFlow 2.22.0rc0 brings
    ])
    + ")"
)  # fmt: skip


def used_by(module) -> set[str]:
    """Returns the names of the modules in a module's namespace, and of the modules that define its functions."""
    values = vars(module).values()
    imported = {value.__name__ for value in values if isinstance(value, type(pytest))}
    return imported | {value.__module__ for value in values if isinstance(getattr(value, "__module__", None), str)}


def markers_of(module) -> set[str]:
    """Returns the markers of a test module, by its folder and by the processes that it or a helper starts."""
    used = used_by(module)
    helpers = [name for name in used if name.startswith(("tests.", "tools.")) and name in sys.modules]
    folder = pathlib.Path(module.__file__).relative_to(TESTS).parts[0]
    found = {FOLDERS[folder]} if folder in FOLDERS else set()
    if used & RANKS:
        found.add("ranks")
    elif any(names & PROCESSES for names in (used, *(used_by(sys.modules[name]) for name in helpers))):
        found.add("processes")
    return found


def names_in(code) -> set[str]:
    """Returns the names and the strings of a function and of its inner functions."""
    inner = [names_in(const) for const in code.co_consts if hasattr(const, "co_names")]
    parts = {part for name in code.co_names for part in name.split(".")}  # of imports
    return parts.union({const for const in code.co_consts if isinstance(const, str)}, *inner)


def needs_tf_keras(item) -> bool:
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    codes = [function.__code__ for function in (item.function, *given) if hasattr(function, "__code__")]
    named = any(word in item.name for word in LEGACY_WORDS) or any(LEGACY_WORDS & names_in(code) for code in codes)
    return named or is_legacy_module(item.path)


@functools.cache
def is_legacy_module(path) -> bool:
    return path.parent.name == "tfra" or "\npytestmark = pytest.mark.legacy\n" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path):
    """Leaves out modules that Keras 3 cannot import."""
    return (not LEGACY and collection_path.suffix == ".py" and is_legacy_module(collection_path)) or None


def pytest_collection_modifyitems(config, items):
    """Marks the tests, and begins with those that take most of a run, so that no worker ends with one of them."""
    for item in items:
        for marker in markers_of(item.module):
            item.add_marker(marker)
        if needs_tf_keras(item):
            item.add_marker("legacy")
    if not LEGACY:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("legacy")])
        items[:] = [item for item in items if not item.get_closest_marker("legacy")]
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in DEAREST_FIRST])


@contextlib.contextmanager
def within_quick_limit(item):
    """Fails the test if it takes more than QUICK_S of this process's processor time and carries no marker."""
    begin = time.process_time()
    yield
    seconds = time.process_time() - begin
    if seconds > QUICK_S and not any(item.get_closest_marker(name) for name in MARKERS):
        pytest.fail(
            f"{seconds:.1f} s of processor time in a test of `make quick`, wanted at most {QUICK_S:.0f} s. "
            "Remedy: a smaller test, or @pytest.mark.slow."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with within_quick_limit(item):
        return (yield)


def pytest_collection(session):
    """Runs the tests of a worker in forks of it."""
    if hasattr(session.config, "workerinput"):
        plugins = session.config.pluginmanager
        (interactor,) = (plugin for plugin in plugins.get_plugins() if hasattr(plugin, "sendevent"))
        plugins.register(ForkingWorker(interactor))


@pytest.fixture(autouse=True)
def keras_of_a_new_process():
    """Gives the layers of a test the names and the random numbers that they have in a process of their own."""
    if not LEGACY and "keras" in sys.modules:
        sys.modules["keras"].utils.clear_session(free_memory=False)
    if "tf_keras" in sys.modules:
        sys.modules["tf_keras"].backend.reset_uids()
        sys.modules["tf_keras"].backend.experimental.disable_tf_random_generator()  # a job's choice for its process


def pytest_collection_finish():
    """Spares garbage collections the objects of the imported modules, which stay, and makes them rarer.

    Tracing makes many objects that live, so that Python's own thresholds cost about 5 % of a test that traces.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def tfra_is_there() -> bool:
    try:
        return importlib.util.find_spec("tensorflow_recommenders_addons") is not None
    except ModuleNotFoundError:  # of a test that blocks the import
        return False


def checked(report, where):
    """The report of a test or of a module: skipped if TFRA was missing, failed if MAY_SKIP lacks the skip's reason."""
    if report.failed and not tfra_is_there() and "Recommenders Addons (TFRA) is not installed" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(where), 0, "Skipped: needs TFRA, the extra tf_fusedrec[tfra]")
    if report.skipped and not hasattr(report, "wasxfail") and not MAY_SKIP.search(report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = (
            f"{where}: got {report.longrepr[2]!r}, wanted a reason of the list MAY_SKIP in tests/conftest.py. "
            "Remedy: a parameter that leaves the case out, or a line of the list."
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return checked((yield), item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    used_before = uses_tensorflow()
    report = checked((yield), collector.path)
    if uses_tensorflow() and not used_before:
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.path} uses TensorFlow when it is imported, so that no fork of a worker can use it "
            "(tests/support/forked.py). Use NumPy's arrays there, or make the tensors inside functions."
        )
    return report
