"""Compares GPU OpKernels with CPU OpKernels on two ranks: python -m tests.cuda.run_op_kernel_ranks LIBRARY [--models].

LIBRARY contains emulation/op_kernels.cc. Without --models, the ranks call the stages of a step in the order of each
schedule. With it, they fit a Keras model under each schedule, which takes some minutes.
"""

from __future__ import annotations

import argparse

from tests.cuda import op_kernels_ranks
from tests.support.ranks import run_ranks

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--models", action="store_true")
    options = parser.parse_args()
    body = op_kernels_ranks.models if options.models else op_kernels_ranks.stages
    for lines in run_ranks(body, 2, timeout_s=900, library=options.library):
        print("\n".join(lines))
