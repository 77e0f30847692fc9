"""Faults of the buffers and hot rows of a table whose rows are in host memory (mutants.py)."""

from __future__ import annotations

from tests.cuda.mutant import Mutant

BUFFER = "hash_table/cuda/buffer/buffer.cuh"
POOL = "hash_table/cuda/buffer/pool.cu"
COPIES = "hash_table/cuda/buffer/copies.cu"
ADVANCE = "hash_table/cuda/buffer/buffer.cu"

MUTANTS = [
    Mutant(
        "rows that both buffers hold are not refreshed", "hash_table", BUFFER,
        "to[i] = from[i];", "if (!FAULT) to[i] = from[i];",
        "as_a_table",
    ),
    Mutant(
        "the wrong buffer is written back", "hash_table", ADVANCE,
        "moves == nullptr ? active()->ReadRecordsOf(",
        "moves == nullptr ? (FAULT ? other() : active())->ReadRecordsOf(",
        "as_a_table",
    ),
    Mutant(
        "an index shifted: the row before is refreshed", "hash_table", BUFFER,
        "own = static_cast<uint32_t>(n);", "own = static_cast<uint32_t>(FAULT && n > 0 ? n - 1 : n);", "as_a_table",
    ),
    Mutant(
        "a hot row is read from the next slot", "hash_table", "hash_table/cuda/buffer/pool.cuh",
        "pool + slots[n] * record_bytes", "pool + slots[FAULT && n > 0 ? n - 1 : n] * record_bytes", "outlive",
        "rows of a lookup with hot rows",
    ),
    Mutant(
        "slots do not get the rows of the batch that ends", "hash_table", POOL,
        "(rows, slots, moves.kept,", "(rows, slots, FAULT ? 0 : moves.kept,", "outlive",
        "Refused: -9",
    ),
    Mutant(
        "a slot is read after another row has come into it", "hash_table", POOL,
        "  FUSEDREC_RETURN_IF_CUDA_ERROR(CopySlots(dropped",
        "  if (FAULT) active()->ReadRecordsOf(rows, slots, moves.kept, pool_.data(), stream);\n"
        "  FUSEDREC_RETURN_IF_CUDA_ERROR(CopySlots(dropped",
        "does_not_fit", "record of a slot that another row takes",
    ),
    Mutant(
        "the pool changes before the next batch has its memory", "hash_table", ADVANCE,
        "  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));\n  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(prefetched_",
        "  if (FAULT && moves != nullptr) Move(*moves, numbers, stream);\n"
        "  FUSEDREC_RETURN_IF_CUDA_ERROR(other()->Forget(stream));\n  FUSEDREC_RETURN_IF_CUDA_ERROR(Insert(prefetched_",
        "does_not_fit", "hot rows without memory",
    ),
    Mutant(
        "copies do not wait for the last user of their memory", "hash_table", COPIES,
        "FUSEDREC_CUDA(cudaStreamWaitEvent(to_device_, vacated_, 0));",
        "if (!FAULT) FUSEDREC_CUDA(cudaStreamWaitEvent(to_device_, vacated_, 0));", "new_memory",
    ),
    Mutant(
        "the work of a failed advance meets the next prefetch", "hash_table", ADVANCE,
        "    FUSEDREC_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));",
        "    if (!FAULT) FUSEDREC_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));", "failed_advance",
    ),
    Mutant(
        "rows go back before they are gathered", "hash_table", COPIES,
        "FUSEDREC_CUDA(cudaStreamWaitEvent(to_host_, gathered_, 0));",
        "if (!FAULT) FUSEDREC_CUDA(cudaStreamWaitEvent(to_host_, gathered_, 0));", "as_a_table", "Refused: -9",
    ),
    Mutant(
        "a batch begins before its rows are there", "hash_table", ADVANCE,
        "FUSEDREC_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));",
        "if (!FAULT) FUSEDREC_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));", "as_a_table",
    ),
    Mutant(
        "memory is given again while a copy reads it", "hash_table", COPIES,
        "FUSEDREC_CUDA(cudaStreamSynchronize(to_device_));\n  FUSEDREC_RETURN_IF_CUDA_ERROR(sent_",
        "if (!FAULT) FUSEDREC_CUDA(cudaStreamSynchronize(to_device_));\n  FUSEDREC_RETURN_IF_CUDA_ERROR(sent_",
        "given_again", "Arrays are not equal",
    ),
    Mutant(
        "an allocation that failed fails the next launch", "hash_table", "hash_table/cuda/buffer/pinned.h",
        "      LastError();", "      if (!FAULT) LastError();", "page_locked", "Refused: 2",
    ),
    Mutant(
        "the rows that follow are not sent", "hash_table", COPIES,
        "  more_ = arrived;", "  if (!FAULT) more_ = arrived;", "as_a_table",
    ),
]  # fmt: skip
