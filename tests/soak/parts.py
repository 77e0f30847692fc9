"""The parts of the soak. One seed always gives the same examples."""

from __future__ import annotations

import collections
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.files import damage_files
from tests.fuzz.op_calls import call_ops
from tests.fuzz.targets import TARGETS
from tests.soak.exports import ExportMachine
from tests.soak.machine import Machine

STEPS = 40  # Rules per example.


def run_machine(machine: type[Machine], seed: int, examples: int, shrink: bool = True) -> collections.Counter:
    """Runs examples of a machine and returns the executions of each rule and the number of examples.

    Raises:
      The error of a violating example, with its steps; of the smallest one with `shrink`, which takes minutes.
    """
    before = machine.executed.copy()
    settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=STEPS, deadline=None, database=None, print_blob=False,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    seeded = hypothesis.seed(seed)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(seeded, settings=settings)
    counts = machine.executed - before
    return counts + collections.Counter(examples=counts["create"])


def damage_all(seed: int, damages: int = 400) -> collections.Counter:
    """Damages files of every kind and returns the outcomes by kind."""
    counts: collections.Counter = collections.Counter()
    for name, target in TARGETS.items():
        outcomes = damage_files(target, seed, damages)
        counts.update({f"{name}: {outcome}": count for outcome, count in outcomes.items()})
    return counts


PARTS: dict[str, Callable[[int], collections.Counter]] = {
    "tables": lambda seed: run_machine(Machine, seed, 50),
    "exports": lambda seed: run_machine(ExportMachine, seed, 10),
    "files": damage_all,
    "ops": call_ops,
}
