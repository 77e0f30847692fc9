"""Compares GPU OpKernels over the emulation with CPU OpKernels: python -m tests.cuda.run_op_kernels LIBRARY.

LIBRARY contains emulation/op_kernels.cc. `rank-models` runs the models of two ranks alone, which take minutes;
`--faults SET` looks for faults (libraries.py) by the programs of tables.
"""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np

from tests.cuda import (
    faults,
    libraries,
    op_kernels_attention,
    op_kernels_host_rows,
    op_kernels_memory,
    op_kernels_model,
    op_kernels_programs,
    op_kernels_ranks,
    op_kernels_table,
)
from tests.cuda.launchers import COMBINERS, DISTRIBUTIONS
from tests.cuda.op_kernels import LABELS, refused, same
from tests.support import small_ops
from tf_fusedrec._tf_compat import tf


def run_small_ops() -> None:
    """Runs the cases and refusals of the small ops by their GPU form."""
    run = small_ops.TensorFlowOps(LABELS)
    for name, check in small_ops.checks().items():
        check(run)
        print(f"{name} agrees", flush=True)
    for call, words in small_ops.REFUSALS:
        refused((tf.errors.InvalidArgumentError, ValueError), words, lambda: call(run))  # noqa: B023


def run_bits_of_the_cpu() -> None:
    """Initial rows and the scales of bags have the bits of the CPU."""
    random, sides = np.random.default_rng(0), (small_ops.TensorFlowOps(), small_ops.TensorFlowOps(LABELS))
    lengths = np.arange(300)
    ids, splits = random.integers(-(2**62), 2**62, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    for combiner in COMBINERS:
        for host, device in zip(*(side.fuse_ids([ids], {0: splits}, [0], [combiner]) for side in sides)):
            same(host, device, combiner)
    rows, exists = random.normal(size=[50, 7]), random.integers(0, 2, 50) == 1
    more = exists, random.integers(-(2**63), 2**63 - 1, 50), [0, 0, 30, 50], [1, -(2**63), 7]
    for name in DISTRIBUTIONS:
        for dtype in (np.float32, np.float16):
            same(*(side.initial_rows(rows.astype(dtype), *more, name, -0.7, 1.3) for side in sides), name)


def main(arguments: list[str]) -> int:
    if arguments[1:] == ["rank-models"]:
        op_kernels_ranks.run_models(arguments[0])
        return 0
    tf.load_op_library(arguments[0])
    library = ctypes.CDLL(arguments[0])
    if arguments[1:2] == ["--faults"]:
        find = lambda mutant: op_kernels_programs.run(library, mutant.only)  # noqa: E731
        return int(bool(faults.missed(libraries.faults_of("programs", arguments[2]), library, find)))
    run_small_ops()
    run_bits_of_the_cpu()
    op_kernels_attention.run()
    op_kernels_model.run()
    op_kernels_ranks.run(arguments[0])
    for module in (op_kernels_programs, op_kernels_table, op_kernels_host_rows, op_kernels_memory):
        started = time.monotonic()
        module.run(library)
        print(f"{module.__name__} agrees: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
