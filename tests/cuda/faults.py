"""Runs checks with one fault of mutants.py after another, in processes that a fault may end."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable

from tests.cuda.mutants import Mutant

SECONDS = 120  # a fault that makes a loop endless is found, too


def _run(faults: list[tuple[int, Mutant]], library: ctypes.CDLL, body: Callable[[Mutant], None], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number, mutant in faults:
        print(f"\nfault {number} begins", flush=True)
        signal.alarm(SECONDS)
        library.emulation_fault(ctypes.c_int(number))
        try:
            body(mutant)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        else:
            print("no check fails", flush=True)
        library.emulation_fault(ctypes.c_int(0))


def missed(faults: list[tuple[int, Mutant]], library: ctypes.CDLL, body: Callable[[Mutant], None]) -> list[Mutant]:
    """Returns the faults with which body(mutant) does not fail, or fails without the words of the mutant."""
    left, found = dict(faults), []
    while left:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                try:
                    _run([*left.items()], library, body, output.fileno())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            output.seek(0)
            parts = re.split(r"\nfault (\d+) begins\n", output.read().decode("utf-8", "replace"))[1:]
        assert parts, "no fault began"
        for number, printed in zip(map(int, parts[::2]), parts[1::2]):  # the last one may have ended the process
            mutant = left.pop(number)
            is_found = "no check fails" not in printed and mutant.words in printed
            print(
                f"{'found' if is_found else 'MISSED'}: {mutant.name}", "" if is_found else printed[-3000:], flush=True
            )
            found += [mutant] * is_found
    return [mutant for _, mutant in faults if mutant not in found]
