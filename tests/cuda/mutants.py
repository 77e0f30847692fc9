"""Faults that the checks over the emulation must find. Each fault changes one place of a kernel's source.

FAULT in a new text is true while the checks look for that fault, and false otherwise. So one compilation of an op
contains all its faults, and one run finds each. The old text must occur once, so that the list keeps up with the code.
"""

from __future__ import annotations

import fcntl
import pathlib
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and the checks that must find it."""

    name: str
    op: str
    path: str  # below custom_ops
    old: str
    new: str
    only: str = ""  # part of the names of the checks that find it soonest
    words: str = ""  # words in the output of the run; empty: any failure counts


SEGMENT_UNIQUE = "segment_unique/cuda/segment_unique_cuda.cuh"
SPLIT = "common/stable_split.cuh"
LOOK_BACK = "common/look_back.cuh"
RANK_PARTITION = "rank_partition/cuda/rank_partition_cuda.cuh"
RECOVERY = "recovery/cuda/recovery_cuda.cuh"
ATTENTION = "jagged_attention/cuda/jagged_attention_cuda.cuh"
BIAS_GRADS = "jagged_attention/cuda/attention_bias_grads.cuh"
CHANNELS = "jagged_attention/cuda/attention_channels.cuh"
TABLE = "hash_table/cuda/hash_table_cuda.cuh"
SUMS = "hash_table/cuda/sums.cuh"
SELECT = "hash_table/cuda/select.cuh"
LINES = "hash_table/cuda/lines.cuh"
ADMISSION = "hash_table/cuda/admission.cuh"
BUFFER = "hash_table/cuda/buffer.cuh"
# (path, old, new) by op: leaves out sizes of heads that these checks do not run.
SMALLER = {
    "jagged_attention": [
        (
            "jagged_attention/cuda/attention_launch.cuh",
            """  if (dim <= 64) return LaunchPass<T, 64, kPass>(problem, stream);
  if (dim <= 128) return LaunchPass<T, 128, kPass>(problem, stream);
  return LaunchPass<T, 256, kPass>(problem, stream);
""",
            "  return kCudaInvalidValue;\n",
        ),
        (
            "jagged_attention/cuda/attention_channels_launch.cuh",
            "  return LaunchChannels<T, kLargeSlice>(problem, backward, stream);\n", "  return kCudaInvalidValue;\n",
        ),
    ],
}  # fmt: skip

MUTANTS = [
    Mutant(
        "a barrier less: sums of warps are read before they are there", "segment_unique", SEGMENT_UNIQUE,
        "= warp_sum;\n  __syncthreads();", "= warp_sum;\n  if (!FAULT) __syncthreads();", "many_tiles",
    ),
    Mutant(
        "a barrier less: the tile is read before it is there", "segment_unique", LOOK_BACK,
        "+ 1u;\n  __syncthreads();", "+ 1u;\n  if (!FAULT) __syncthreads();", "many_tiles",
    ),
    Mutant(
        "a barrier that one warp passes by", "segment_unique", SEGMENT_UNIQUE,
        "__syncthreads();\n  if (Warp() == 0) {",
        "FAULT && Warp() == 1 ? static_cast<void>(0) : __syncthreads();\n  if (Warp() == 0) {",
        "many_tiles", "different barriers",
    ),
    Mutant(
        "a ballot that only some lanes reach", "segment_unique", SEGMENT_UNIQUE,
        "    firsts[k] = __ballot_sync(kFullWarp, own[k] == n);",
        "    firsts[k] = 0;\n    if (!FAULT || n < num_ids) firsts[k] = __ballot_sync(kFullWarp, own[k] == n);",
        "edge_cases", "deadlock",
    ),
    Mutant(
        "an index beyond the end", "segment_unique", SEGMENT_UNIQUE,
        "inverse[n] = static_cast", "inverse[n + FAULT] = static_cast", "fills_its_tiles", "heap-buffer-overflow",
    ),
    Mutant(
        "shared memory beyond the end", "segment_unique", SEGMENT_UNIQUE,
        "warp_begin[Warp()] = warp_sum", "warp_begin[Warp() + FAULT] = warp_sum", "edge_cases", "heap-buffer-overflow",
    ),
    Mutant(
        "the first position does not win", "segment_unique", SEGMENT_UNIQUE,
        "if (n < seen) atomicMin(&slots[slot], n);", "if (!FAULT && n < seen) atomicMin(&slots[slot], n);",
        "many_tiles",
    ),
    Mutant(
        "a tile leaves out the sum of one before it", "segment_unique", LOOK_BACK, "lane <= last ?",
        "lane <= last - FAULT ?",
        "many_tiles",
    ),
    Mutant(
        "a barrier of a warp less: a count is read after it is raised", "rank_partition", SPLIT,
        "count[bin];\n  __syncwarp();", "count[bin];\n  if (!FAULT) __syncwarp();", "many_tiles",
    ),
    Mutant(
        "an index shifted: headers of the next bound", "rank_partition", RANK_PARTITION,
        "before[(s + 1) * ranks + r])", "before[(s + 1 - FAULT) * ranks + r])", "edge_cases",
    ),
    Mutant(
        "an index shifted: the part of a row is taken for another", "recovery", RECOVERY,
        "parts[(2 * chunk + 1) * grads.dim + d] = sum", "parts[(2 * chunk + 1 - FAULT) * grads.dim + d] = sum",
        "fill_their_chunks",
    ),
    Mutant(
        "a barrier less: sums of digits are read before they are there", "recovery", "common/row_sort.cuh",
        "= until;\n  __syncthreads();", "= until;\n  if (!FAULT) __syncthreads();", "order_of_a_sum",
    ),
    Mutant(
        "bags that decrease are not looked for", "recovery", RECOVERY,
        "bag_splits[i - 1] <= bag_splits[i]", "(FAULT || bag_splits[i - 1] <= bag_splits[i])", "bags_that_do_not_fit",
        "order",
    ),
    Mutant(
        "a barrier less: weights are multiplied before they are stored", "jagged_attention", ATTENTION,
        "      __syncthreads();\n\n      const int pairs",
        "      if (!FAULT) __syncthreads();\n\n      const int pairs",
        "rows_of_all",
    ),
    Mutant(
        "a ballot that only lanes reach whose bucket changes", "jagged_attention", BIAS_GRADS,
        "      Flush(changes);", "      if (!FAULT || changes) Flush(changes);", "rows_of_all", "deadlock",
    ),
    Mutant(
        "an index shifted: the weight of the next distance", "jagged_attention", ATTENTION,
        "mask.Place(query) - low]", "mask.Place(query) - low + FAULT]", "rows_of_all",
    ),
    Mutant(
        "a barrier less: maps are multiplied before they are there", "jagged_attention", CHANNELS,
        "    }\n    __syncthreads();\n#pragma unroll", "    }\n    if (!FAULT) __syncthreads();\n#pragma unroll",
        "channels_of_rows",
    ),
    Mutant(
        "a barrier less: gradients are hidden before they are there", "jagged_attention", CHANNELS,
        "tiles.exact);\n        __syncthreads();", "tiles.exact);\n        if (!FAULT) __syncthreads();",
        "channels_of_rows",
    ),
    Mutant(
        "an index shifted: a head's gradients lie as its values do", "jagged_attention", CHANNELS,
        "of_grads = ColumnsOf<D>(problem, slice, channels)",
        "of_grads = ColumnsOf<D>(problem, slice, FAULT ? 1 : channels)",
        "channels_of_rows",
    ),
    Mutant(
        "a place of a line is taken without looking who took it", "hash_table", LINES,
        "atomicCAS(&line->meta, meta, meta | place)",
        "FAULT ? (StoreFresh(&line->meta, meta | place), meta) : atomicCAS(&line->meta, meta, meta | place)",
        "grow_the_table",
    ),
    Mutant(
        "a full line that a key passed carries no mark", "hash_table", LINES,
        "if ((meta & kOverflown) == 0) atomicOr(&line->meta, kOverflown);",
        "if (!FAULT && (meta & kOverflown) == 0) atomicOr(&line->meta, kOverflown);", "collide",
    ),
    Mutant(
        "an index shifted: the row of the key before", "hash_table", LINES,
        "(first & 4) << 2", "(first & 4) << (2 - FAULT)", "grow_the_table",
    ),
    Mutant(
        "a search that some lanes of a group leave", "hash_table", LINES,
        "if (found == kNowhere && (meta & kOverflown) != 0) {",
        "if (found == kNowhere && (meta & kOverflown) != 0 && !(FAULT && GroupLane() == 1)) {", "collide",
        "different collectives",
    ),
    Mutant(
        "a touch is dropped: positions of a known id do not meet", "hash_table", TABLE,
        "atomicMax(&table.Meta(row)->touch, TouchOf(attempt, position));",
        "if (FAULT) table.Meta(row)->touch = TouchOf(attempt, position);\n"
        "    else atomicMax(&table.Meta(row)->touch, TouchOf(attempt, position));",
        "grow_the_table",
    ),
    Mutant(
        "the first position of a new id does not win", "hash_table", TABLE,
        "if (n < seen) atomicMin(&slots[slot], n);", "if (!FAULT && n < seen) atomicMin(&slots[slot], n);",
        "first_occurrence",
    ),
    Mutant(
        "a barrier less: sums of firsts are read before they are there", "hash_table", TABLE,
        "num_firsts : num_fresh;\n  __syncthreads();", "num_firsts : num_fresh;\n  if (!FAULT) __syncthreads();",
        "first_occurrence",
    ),
    Mutant(
        "a row is trained by a gradient that is not finite", "hash_table", "hash_table/cuda/update.cuh",
        "if (!__all_sync(mask, is_finite)) {", "if (!FAULT && !__all_sync(mask, is_finite)) {", "not_finite",
    ),
    Mutant(
        "an index shifted: the last gradient of a row goes to the next", "hash_table", "hash_table/cuda/update.cuh",
        "begin[u] = static_cast<int32_t>(p);", "begin[u] = static_cast<int32_t>(FAULT && p > 0 ? p - 1 : p);",
        "order_received",
    ),
    Mutant(
        "a part's sum replaces the sums of the parts before", "hash_table", SUMS,
        "now = before + grads.Sum(d);", "now = (FAULT ? 0.0f : before) + grads.Sum(d);", "several_parts",
        "over all parts",
    ),
    Mutant(
        "a row whose gradients do not come is updated", "hash_table", SUMS,
        "= ~static_cast<int64_t>(row);", "= FAULT ? static_cast<int64_t>(row) : ~static_cast<int64_t>(row);",
        "several_parts", "rows with gradients change, and no other",
    ),
    Mutant(
        "a row's number outlives its sum", "hash_table", SUMS,
        "if (known != kNowhere) view", "if (known != kNowhere && !FAULT) view", "several_parts", "heap-buffer-overflow",
    ),
    Mutant(
        "a row whose gradients wait may leave", "hash_table", "hash_table/cuda/rows.cuh",
        "(waiting_since != 0 && meta.last", "(!FAULT && waiting_since != 0 && meta.last", "gradients_wait",
        "rows whose gradients wait have left",
    ),
    Mutant(
        "a barrier less: bytes are counted before the counters are cleared", "hash_table", SELECT,
        "own[threadIdx.x] = 0;\n  __syncthreads();", "own[threadIdx.x] = 0;\n  if (!FAULT) __syncthreads();",
        "policies",
    ),
    Mutant(
        "the row that a lookup has met may leave", "hash_table", "hash_table/cuda/rows.cuh",
        "meta.last + window > clock || AttemptOf(meta.touch) == attempt",
        "meta.last + window > clock || (!FAULT && AttemptOf(meta.touch) == attempt)",
        "policies",
    ),
    Mutant(
        "a key that leaves stays in its line", "hash_table", LINES, "atomicAnd(&line->meta, ~(1u << i));",
        "if (!FAULT) atomicAnd(&line->meta, ~(1u << i));",
        "by_hand",
    ),
    Mutant(
        "an id that admission counts is refused once more", "hash_table", ADMISSION,
        "count + int64_t{1} >= threshold", "count + int64_t{!FAULT} >= threshold", "admission_counts",
    ),
    Mutant(
        "an id is counted by every position", "hash_table", ADMISSION,
        "|| first[n] != n || (where[n] & kNew)", "|| (!FAULT && first[n] != n) || (where[n] & kNew)",
        "admission_counts",
    ),
    Mutant(
        "an id begins with two lookups", "hash_table", ADMISSION,
        "TableHash(id), 1);", "TableHash(id), FAULT ? 2 : 1);", "admission_counts", "counts of ids without a row",
    ),
    Mutant(
        "counts are halved twice", "hash_table", ADMISSION,
        "line->row[place] /= 2;", "line->row[place] /= FAULT ? 4 : 2;", "admission_counts",
    ),
    Mutant(
        "the ids that leave together are written to one place", "hash_table", SELECT,
        "left[rank] = {meta->id", "left[FAULT ? 0 : rank] = {meta->id", "by_hand",
    ),
    Mutant(
        "an id that came back is a tombstone", "hash_table", SELECT,
        "if (active) found[n] = row;", "if (active) found[n] = FAULT ? kNowhere : row;", "policies",
        "tombstones of ids that left and stayed away",
    ),
    Mutant(
        "rows that both buffers hold are not refreshed", "hash_table", BUFFER,
        "to[i] = from[i];", "if (!FAULT) to[i] = from[i];",
        "as_a_table",
    ),
    Mutant(
        "the wrong buffer is written back", "hash_table", "hash_table/cuda/buffer.cu",
        "shared, stream));\n  FUSEDREC_RETURN_IF_CUDA_ERROR(active()->ReadAllRecords(",
        "shared, stream));\n  FUSEDREC_RETURN_IF_CUDA_ERROR((FAULT ? other() : active())->ReadAllRecords(",
        "as_a_table",
    ),
    Mutant(
        "an index shifted: the row before is refreshed", "hash_table", BUFFER,
        "own = static_cast<uint32_t>(n);", "own = static_cast<uint32_t>(FAULT && n > 0 ? n - 1 : n);", "as_a_table",
    ),
]  # fmt: skip


def numbered(op: str) -> list[tuple[int, Mutant]]:
    """Returns the faults of an op and their numbers. Number 0 means no fault."""
    return [(number, mutant) for number, mutant in enumerate(MUTANTS, 1) if mutant.op == op]


def changed(text: str, old: str, new: str, what: str) -> str:
    assert text.count(old) == 1, f"{what}: {old!r} is {text.count(old)} times in its file"
    return text.replace(old, new)


def write_sources(op: str, custom_ops: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the sources of kernels with all faults of an op into `folder`. Unchanged files keep their time."""
    paths = [path for path in custom_ops.rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    texts = {str(path.relative_to(custom_ops)): path.read_text(encoding="utf-8") for path in paths}
    for path, old, new in SMALLER.get(op, []):
        texts[path] = changed(texts[path], old, new, path)
    for number, mutant in numbered(op):
        assert "FAULT" in mutant.new, f"{mutant.name}: without FAULT it would hide the others"
        new = mutant.new.replace("FAULT", f"(emulation::fault == {number})")
        texts[mutant.path] = changed(texts[mutant.path], mutant.old, new, mutant.name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as lock:  # another process may write the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in folder.rglob("*.c*"):
            if str(path.relative_to(folder)) not in texts:  # its source has moved
                path.unlink()
        for name, text in texts.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
