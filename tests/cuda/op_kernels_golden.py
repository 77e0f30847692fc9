"""Emulated tables of a GPU give the bits of tables in host memory in the golden programs (tests/golden/tables.py)."""

from __future__ import annotations

from typing import Any

from tests.cuda.op_kernels import run_op
from tests.golden import tables
from tests.support.table_records import arguments_of
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.optimizers.rules import RULES

EVERY = 5  # every fifth program: all rules and storages, in about 10 seconds


def call(op, *arguments, **static):
    answer = run_op(True, op, arguments, **static)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer)


def run_program(number: int, rule: Any = None) -> tables.Program:
    create = lambda options: run_op(True, ops.hash_table, (), **arguments_of(anonymous=True, **options))  # noqa: E731
    program = tables.Program(number, create, call, rule)
    program.run()
    return program


def run() -> None:
    differing = tables.differing(range(0, tables.ON_HOST, EVERY), run_program)
    for number, (name, record) in enumerate(RULES.items()):
        sides = [run(13 * number, record(0.1)).digest() for run in (tables.run_on_host, run_program)]
        assert sides[0] == sides[1], f"bits of {name} differ from those in host memory"
    assert not differing, f"programs whose bits differ from those of tables in host memory: {differing}"
