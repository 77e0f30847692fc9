"""Emulated tables of a GPU give the bits of tables in host memory in the golden programs (tests/golden/tables.py)."""

from __future__ import annotations

from tests.cuda.op_kernels import run_op
from tests.golden import tables
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

EVERY = 5  # every fifth program: all rules and storages, in about 10 seconds


def call(op, *arguments, **static):
    answer = run_op(True, op, arguments, **static)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), answer)


def run_program(number: int) -> tables.Program:
    create = lambda options: run_op(True, ops.hash_table, (), anonymous=True, **options)  # noqa: E731
    program = tables.Program(number, create, call)
    program.run()
    return program


def run() -> None:
    differing = tables.differing(range(0, tables.ON_HOST, EVERY), run_program)
    assert not differing, f"programs whose bits differ from those of tables in host memory: {differing}"
