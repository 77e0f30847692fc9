"""Fits models on two ranks by GPU OpKernels under every schedule: python -m tests.cuda.run_rank_models.

It takes minutes. No test runs it: run_op_kernels.py calls the stages of two ranks instead.
"""

from __future__ import annotations

import sys

from tests.cuda import libraries


def main() -> int:
    done = libraries.under_sanitizers("tests.cuda.run_op_kernels", str(libraries.build_op_kernels()), "rank-models")
    print(done.stdout if done.returncode == 0 else done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
