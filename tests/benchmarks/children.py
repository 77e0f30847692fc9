"""Functions that test_harness.py runs in processes of their own, in a module that imports no TensorFlow."""

import time

from benchmarks.harness import processes


def double(number):
    print("a line of a library")
    return 2 * number if number else print("the last line")


def served():
    processes.serve({"step": lambda n: time.sleep(0.01 * n)}, lambda: [1, 2], {"missing": ""})
