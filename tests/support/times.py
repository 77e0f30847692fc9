"""A plugin of pytest that prints processor seconds by cause: `make test TIMES=1`, or pytest -p tests.support.times.

A test costs seconds of its worker, of the processes that it starts, and of its ranks (children of the fork server).
"""

import collections
import multiprocessing.forkserver
import os
import pathlib
import resource

import pytest

CAUSES = ("worker", "children", "ranks")
_before = [0.0, 0.0, 0.0]
_seconds: dict[str, list[float]] = {}  # by test
_peak_mib = [0]  # of the largest worker


def _now() -> list[float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ranks, server = 0.0, multiprocessing.forkserver._forkserver._forkserver_pid
    if server is not None:
        fields = pathlib.Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        ranks = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return [*(one.ru_utime + one.ru_stime for one in used), ranks]


def pytest_runtest_logstart():
    _before[:] = _now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":  # xdist passes these properties on to the process that prints
        report.user_properties.append(("seconds", [now - before for now, before in zip(_now(), _before)]))
        report.user_properties.append(("MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
    return report


def pytest_runtest_logreport(report):
    measured = dict(report.user_properties)
    if "seconds" in measured:
        _seconds[report.nodeid] = measured["seconds"]
        _peak_mib[0] = max(_peak_mib[0], measured["MiB"])


def pytest_terminal_summary(terminalreporter):
    folders = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for test, seconds in _seconds.items():
        folder = "/".join(test.partition("::")[0].split("/")[:2])
        folders[folder] = [sum(pair) for pair in zip(folders[folder], seconds)]
    rows = [("all tests", [sum(column) for column in zip(*_seconds.values())])]
    rows += sorted(folders.items(), key=lambda row: -sum(row[1]))
    rows += sorted(_seconds.items(), key=lambda row: -sum(row[1]))[:30]
    terminalreporter.section("processor seconds")
    terminalreporter.write_line("".join(f"{cause:>9}" for cause in CAUSES))
    for name, seconds in rows if _seconds else ():
        terminalreporter.write_line("".join(f"{second:9.1f}" for second in seconds) + f"  {name}")
    terminalreporter.write_line(f"The largest worker took {_peak_mib[0]} MiB.")
