"""Compares GPU OpKernels over the emulation with CPU OpKernels: python -m tests.cuda.run_op_kernels LIBRARY.

LIBRARY contains emulation/op_kernels.cc. A second argument `rank-models` runs the models of two ranks alone
(run_rank_models.py).
"""

from __future__ import annotations

import ctypes
import sys

from tests.cuda import (
    op_kernels_attention,
    op_kernels_golden,
    op_kernels_memory,
    op_kernels_model,
    op_kernels_ranks,
    op_kernels_replicas,
    op_kernels_stages,
    op_kernels_sums,
    op_kernels_table,
)
from tests.cuda.host_rows import failed_lookups, hot, programs, waits
from tf_fusedrec._tf_compat import tf


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
    for module in (op_kernels_stages, op_kernels_attention, *of_tables, op_kernels_model):
        module.run()
        print(f"{module.__name__} agrees", flush=True)
    op_kernels_ranks.run(arguments[0])
    print(f"{op_kernels_ranks.__name__} agrees", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
