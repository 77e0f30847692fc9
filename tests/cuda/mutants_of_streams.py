"""Faults of work on several streams: an event that no one waits for (mutants.py)."""

from __future__ import annotations

from tests.cuda.mutant import Mutant

BUFFER = "hash_table/cuda/buffer/buffer.cu"

MUTANTS = [
    Mutant(
        "rows go back before they are gathered", "hash_table", BUFFER,
        "FUSEDREC_CUDA(cudaStreamWaitEvent(copies_, gathered_, 0));",
        "if (!FAULT) FUSEDREC_CUDA(cudaStreamWaitEvent(copies_, gathered_, 0));", "as_a_table", "Refused: -3",
    ),
]  # fmt: skip
