"""Functions that test_harness.py runs in processes of their own, in a module that imports no TensorFlow."""

import contextlib
import time

from benchmarks.harness import processes


def double(number):
    print("a line of a library")
    return 2 * number if number else print("the last line")


def served():
    """The preparation of a step takes .4 s, and a step .01 s more than the one before."""
    log = []

    @contextlib.contextmanager
    def turn():
        log.append("begin")
        yield
        log.append("end")

    def prepare(n):
        time.sleep(0.4)
        return 0.01 * n

    processes.serve({"step": time.sleep}, lambda: log, {"missing": "one"}, prepare=prepare, turn=turn)
