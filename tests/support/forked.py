"""A worker of xdist that runs its tests in forks of itself, so that a large process is replaced by a small one.

TensorFlow keeps memory of every traced graph and fragments its heap. A worker collects the tests and leaves TensorFlow
unused, because TensorFlow survives a fork only that early. A fork runs one test after another, with the fixtures of a
session, until it is large. Then the next fork goes on. A test that ends its process fails, and the run goes on.
"""

import atexit
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import resource
import sys

import pytest

# A process of REPLACED_MIB is replaced at the end of its module, one of LARGE_MIB after its test, though the next
# process makes the fixtures of the module again. No process may need more than WORKER_MIB.
REPLACED_MIB, LARGE_MIB, WORKER_MIB = 1000, 1500, 2000


def resident_mib() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def uses_tensorflow() -> bool:
    """Whether this process has used TensorFlow, beyond an import."""
    module = sys.modules.get("tensorflow.python.eager.context")
    return module is not None and module._context is not None and module._context._initialized


class ForkingWorker:
    """The plugin of a worker and of its forks.

    interactor: xdist's plugin of the worker. Its events reach the controlling process.
    """

    def __init__(self, interactor):
        self.interactor = interactor
        self.connection = None  # to the other process
        self.fork_pid = 0  # 0 in a fork, and in a worker without one
        self.is_fork = self.is_last = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        # Without a fork where a module has used TensorFlow when it was imported, which is an error of its collection.
        if self.is_fork or uses_tensorflow():
            return None
        if self.connection is None:
            self.start(item.session)
        try:
            next_index = None if nextitem is None else self.interactor.nextitem_index
            self.connection.send((self.interactor.item_index, next_index))
            while (event := self.connection.recv())[0] != "end":
                self.interactor.sendevent(event[0], **event[1])
            is_last = event[1]
        except (EOFError, ConnectionError):
            call = pytest.CallInfo.from_call(lambda: pytest.fail("The test ended its process."), "call")
            self.interactor.pytest_runtest_logreport(pytest.TestReport.from_item_and_call(item, call))
            is_last = True
        if is_last:
            self.connection.close()
            self.connection = None
            os.waitpid(self.fork_pid, 0)
        return True

    def start(self, session):
        if any(item.get_closest_marker("ranks") for item in session.items):
            multiprocessing.forkserver.ensure_running()  # for all forks, because it imports TensorFlow
        session.config._tmp_path_factory.getbasetemp()  # else each fork empties it
        faulthandler.cancel_dump_traceback_later()  # a thread, for which the fork would wait
        self.connection, connection = multiprocessing.Pipe()
        self.fork_pid = os.fork()
        if self.fork_pid:
            connection.close()
            return
        self.connection.close()
        self.connection, self.is_fork = connection, True
        atexit._clear()
        try:
            self.run(session.items)
            atexit._run_exitfuncs()
        finally:
            os._exit(0)

    def run(self, items):
        """Runs the tests that the worker sends."""
        server = multiprocessing.forkserver._forkserver
        if server._forkserver_pid is not None:
            server.ensure_running = lambda: None  # It waits for the server as for a child, which is the worker's.
        self.interactor.sendevent = lambda name, **fields: self.connection.send((name, fields))
        while not self.is_last:
            self.interactor.item_index, next_index = self.connection.recv()
            item = items[self.interactor.item_index]
            self.is_last = next_index is None
            nextitem = None if self.is_last else items[next_index]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self.connection.send(("end", self.is_last))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        result = yield
        in_module = nextitem is not None and nextitem.module is item.module
        if resident_mib() > (LARGE_MIB if in_module else REPLACED_MIB):
            self.is_last = True
            item.session._setupstate.teardown_exact(None)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        if peak_mib > WORKER_MIB:
            pytest.fail(
                f"{peak_mib} MiB were in use in this process until the end of the test, wanted at most {WORKER_MIB}. "
                "Remedy: fixtures that end with their test, and fewer traced models."
            )
        return result
