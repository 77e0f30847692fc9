"""Compares GPU OpKernels over the emulation with CPU OpKernels: python -m tests.cuda.run_op_kernels LIBRARY.

LIBRARY contains emulation/op_kernels.cc. A second argument `rank-models` runs the models of two ranks alone
(run_rank_models.py).
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from tests.cuda import (
    op_kernels_attention,
    op_kernels_golden,
    op_kernels_memory,
    op_kernels_model,
    op_kernels_ranks,
    op_kernels_replicas,
    op_kernels_sums,
    op_kernels_table,
)
from tests.cuda.host_rows import failed_lookups, hot, programs, waits
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
    op_kernels_memory.run(library.emulation_allocations_left)
    waits.run(library)
    of_tables = (
        op_kernels_golden,
        op_kernels_table,
        op_kernels_sums,
        programs,
        hot,
        failed_lookups,
        op_kernels_replicas,
    )
    run_small_ops()
    run_bits_of_the_cpu()
    for module in (op_kernels_attention, *of_tables, op_kernels_model):
        module.run()
        print(f"{module.__name__} agrees", flush=True)
    op_kernels_ranks.run(arguments[0])
    print(f"{op_kernels_ranks.__name__} agrees", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
