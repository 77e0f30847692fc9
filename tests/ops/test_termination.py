"""The end of a process by C++: Python can read the cause, and a process that nobody ends still ends, with one line."""

import subprocess
import sys

# Python's thread holds the interpreter's lock in `keeps`, as a thread that waits for Horovod may.
PROGRAM = """
import ctypes, os, sys, threading, time
from tf_fusedrec import ops

ops.watch_termination(7, 1.5)
assert ops.termination() is None
terminate = ctypes.PyDLL("libstdc++.so.6")._ZSt9terminatev
how = sys.argv[1]
if how == "forked":
    child = os.fork()
    if child == 0:
        terminate()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
if how == "keeps":
    terminate()  # PyDLL keeps the lock
released = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
threading.Thread(target=released, daemon=True).start()
while ops.termination() is None:
    time.sleep(0.01)
print("read:", ops.termination(), flush=True)
os._exit(3)
"""


def run(how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, encoding="utf-8", errors="replace", timeout=100
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip().splitlines()


def test_a_thread_of_python_reads_the_cause_and_ends_the_process():
    code, out, _ = run("read")
    assert (code, out) == (3, "read: no exception")


def test_a_process_whose_lock_is_kept_ends_after_the_limit_with_one_line():
    code, _, errors = run("keeps")
    assert code == 1
    assert errors[-1].startswith("tf_fusedrec: rank 7: a thread of C++ ends this process: no exception. Remedy: ")


def test_a_forked_child_aborts_as_before():
    code, out, errors = run("forked")
    assert (code, out) == (0, "-6") and not any("tf_fusedrec: rank 7" in line for line in errors)
