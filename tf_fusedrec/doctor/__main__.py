"""Prints the report. Its exit code is 0 if all that is installed works, else 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from tf_fusedrec.doctor import facts, trial
from tf_fusedrec.doctor.ten_steps import STEPS


def show(title: str, fields: Mapping[str, str]) -> None:
    print(title)
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"  {name.ljust(width)}  {value}", flush=True)


def summary(answer: Mapping[str, Any]) -> str:
    losses = answer["losses"]
    return f"{STEPS} steps, {1e3 * answer['seconds']:.1f} ms each, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def report() -> list[str]:
    """Prints all parts, and returns the names of those that failed."""
    failed = []

    def fail(name: str, error: object) -> None:
        failed.append(name)
        print(f"  {name} FAILED: {error}", flush=True)

    show("versions", facts.versions())
    if (error := facts.why_tfra_does_not_load()) is not None:
        fail("TFRA", error)
    show("custom ops", facts.custom_ops())
    show("GPU", {f"device {number}": name for number, name in enumerate(facts.gpus())} or {"devices": "none"})

    print("training")
    one = several = None
    try:
        one = trial.run(1)
        print(f"  one process    {summary(one)}", flush=True)
    except trial.TrialFailed as error:
        fail("one process", error)
    if not facts.is_installed("horovod"):
        print("  two processes  not tried, because Horovod is not installed")
        return failed
    try:
        several = trial.run(2)
        if one is not None:
            trial.check_equal(one, several)
        print(f"  two processes  {summary(several)}; rows are those of one process")
        print(f"  Horovod        built with {', '.join(several['horovod'])}")
    except trial.TrialFailed as error:
        fail("two processes", error)
    return failed


def main() -> int:
    argparse.ArgumentParser(prog="python -m tf_fusedrec.doctor", description=__doc__).parse_args()
    failed = report()
    print(f"result: {', '.join(failed)} failed" if failed else "result: all that is installed works")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
