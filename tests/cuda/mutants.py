"""Faults that the checks over the emulation must find: each a change of one place of a kernel's source.

A change must fit: a text that is no longer there, or there twice, fails the test, so that the list keeps up with the
code.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and the checks that must find it."""

    name: str
    op: str
    path: str  # below custom_ops
    old: str
    new: str
    only: str = ""  # part of the names of the checks to run: those that find it soonest
    words: str = ""  # that must stand in what the run says; empty: any failure will do
    smaller: tuple[str, str, str] | None = None  # (path, old, new) that leaves out what the checks do not run


SEGMENT_UNIQUE = "segment_unique/segment_unique_cuda.cuh"
SPLIT = "common/stable_split.cuh"
LOOK_BACK = "common/look_back.cuh"
RANK_PARTITION = "rank_partition/rank_partition_cuda.cuh"
RECOVERY = "recovery/recovery_cuda.cuh"
ATTENTION = "jagged_attention/jagged_attention_cuda.cuh"
BIAS_GRADS = "jagged_attention/attention_bias_grads.cuh"
CHANNELS = "jagged_attention/attention_channels.cuh"
TABLE = "hash_table/hash_table_cuda.cuh"
SELECT = "hash_table/device_select.cuh"
LINES = "hash_table/device_lines.cuh"
BUFFER = "hash_table/device_buffer.cuh"
ONE_SIZE = (
    "jagged_attention/attention_launch.cuh",
    """  if (dim <= 64) return LaunchPass<T, 64, kPass>(problem, stream);
  if (dim <= 128) return LaunchPass<T, 128, kPass>(problem, stream);
  return LaunchPass<T, 256, kPass>(problem, stream);
""",
    "  return kCudaInvalidValue;\n",
)  # fmt: skip
ONE_SLICE = (
    "jagged_attention/attention_channels_launch.cuh",
    "  return LaunchChannels<T, kLargeSlice>(problem, backward, stream);\n", "  return kCudaInvalidValue;\n",
)  # fmt: skip

MUTANTS = [
    Mutant(
        "a barrier less: sums of warps are read before they are there", "segment_unique", SEGMENT_UNIQUE,
        "= warp_sum;\n  __syncthreads();", "= warp_sum;", "many_tiles",
    ),
    Mutant(
        "a barrier less: the tile is read before it is there", "segment_unique", LOOK_BACK,
        "+ 1u;\n  __syncthreads();", "+ 1u;", "many_tiles",
    ),
    Mutant(
        "a barrier that one warp passes by", "segment_unique", SEGMENT_UNIQUE,
        "  __syncthreads();\n  if (Warp() == 0) {", "  if (Warp() != 1) __syncthreads();\n  if (Warp() == 0) {",
        "many_tiles", "different barriers",
    ),
    Mutant(
        "a ballot that only some lanes reach", "segment_unique", SEGMENT_UNIQUE,
        "    firsts[k] = __ballot_sync(kFullWarp, own[k] == n);",
        "    firsts[k] = 0;\n    if (n < num_ids) firsts[k] = __ballot_sync(kFullWarp, own[k] == n);",
        "edge_cases", "deadlock",
    ),
    Mutant(
        "an index beyond the end", "segment_unique", SEGMENT_UNIQUE,
        "inverse[n] = static_cast", "inverse[n + 1] = static_cast", "fills_its_tiles", "heap-buffer-overflow",
    ),
    Mutant(
        "shared memory beyond the end", "segment_unique", SEGMENT_UNIQUE,
        "warp_begin[Warp()] = warp_sum", "warp_begin[Warp() + 1] = warp_sum", "edge_cases", "heap-buffer-overflow",
    ),
    Mutant(
        "the first position does not win", "segment_unique", SEGMENT_UNIQUE,
        "if (n < seen) atomicMin(&slots[slot], n);", "", "many_tiles",
    ),
    Mutant(
        "a tile leaves out the sum of one before it", "segment_unique", LOOK_BACK, "lane <= last ?", "lane < last ?",
        "many_tiles",
    ),
    Mutant(
        "a barrier of a warp less: a count is read after it is raised", "rank_partition", SPLIT,
        "count[bin];\n  __syncwarp();", "count[bin];", "many_tiles",
    ),
    Mutant(
        "an index shifted: headers of the next bound", "rank_partition", RANK_PARTITION,
        "before[(s + 1) * ranks + r])", "before[s * ranks + r])", "edge_cases",
    ),
    Mutant(
        "an index shifted: the part of a row is taken for another", "recovery", RECOVERY,
        "parts[(2 * chunk + 1) * grads.dim + d] = sum", "parts[2 * chunk * grads.dim + d] = sum", "fill_their_chunks",
    ),
    Mutant(
        "a barrier less: sums of digits are read before they are there", "recovery", "common/row_sort.cuh",
        "= until;\n  __syncthreads();", "= until;", "order_of_a_sum",
    ),
    Mutant(
        "bags that decrease are not looked for", "recovery", RECOVERY,
        "bag_splits[i - 1] <= bag_splits[i]", "bag_splits[i] >= 0", "bags_that_do_not_fit", "order",
    ),
    Mutant(
        "a barrier less: weights are multiplied before they are stored", "jagged_attention", ATTENTION,
        "      __syncthreads();\n\n      const int pairs", "      const int pairs", "rows_of_all", smaller=ONE_SIZE,
    ),
    Mutant(
        "a ballot that only lanes reach whose bucket changes", "jagged_attention", BIAS_GRADS,
        "      Flush(changes);", "      if (changes) Flush(changes);", "rows_of_all", "deadlock", smaller=ONE_SIZE,
    ),
    Mutant(
        "an index shifted: the weight of the next distance", "jagged_attention", ATTENTION,
        "mask.Place(query) - low]", "mask.Place(query) - low + 1]", "rows_of_all", smaller=ONE_SIZE,
    ),
    Mutant(
        "a barrier less: maps are multiplied before they are there", "jagged_attention", CHANNELS,
        "    }\n    __syncthreads();\n#pragma unroll", "    }\n#pragma unroll", "channels_of_rows", smaller=ONE_SLICE,
    ),
    Mutant(
        "a barrier less: gradients are hidden before they are there", "jagged_attention", CHANNELS,
        "tiles.exact);\n        __syncthreads();", "tiles.exact);", "channels_of_rows", smaller=ONE_SLICE,
    ),
    Mutant(
        "an index shifted: a head's gradients lie as its values do", "jagged_attention", CHANNELS,
        "of_grads = ColumnsOf<D>(problem, slice, channels)", "of_grads = ColumnsOf<D>(problem, slice, 1)",
        "channels_of_rows", smaller=ONE_SLICE,
    ),
    Mutant(
        "a place of a line is taken without looking who took it", "hash_table", LINES,
        "atomicCAS(&line->meta, meta, meta | place)", "(StoreFresh(&line->meta, meta | place), meta)", "grow_the_table",
    ),
    Mutant(
        "a full line that a key passed carries no mark", "hash_table", LINES,
        "if ((meta & kOverflown) == 0) atomicOr(&line->meta, kOverflown);", "", "collide",
    ),
    Mutant(
        "an index shifted: the row of the key before", "hash_table", LINES,
        "(first & 4) << 2", "(first & 4) << 1", "grow_the_table",
    ),
    Mutant(
        "a search that some lanes of a group leave", "hash_table", LINES,
        "if (found == kNowhere && (meta & kOverflown) != 0) {",
        "if (found == kNowhere && (meta & kOverflown) != 0 && GroupLane() != 1) {", "collide", "different collectives",
    ),
    Mutant(
        "a touch is dropped: positions of a known id do not meet", "hash_table", TABLE,
        "atomicMax(&table.Meta(row)->touch, TouchOf(attempt, position));",
        "table.Meta(row)->touch = TouchOf(attempt, position);",
        "grow_the_table",
    ),
    Mutant(
        "the first position of a new id does not win", "hash_table", TABLE,
        "      if (n < seen) atomicMin(&slots[slot], n);\n", "", "first_occurrence",
    ),
    Mutant(
        "a barrier less: sums of firsts are read before they are there", "hash_table", TABLE,
        "num_firsts : num_fresh;\n  __syncthreads();", "num_firsts : num_fresh;", "first_occurrence",
    ),
    Mutant(
        "an index shifted: the last gradient of a row goes to the next", "hash_table", "hash_table/device_update.cuh",
        "begin[u] = static_cast<int32_t>(p);", "begin[u] = static_cast<int32_t>(p > 0 ? p - 1 : 0);",
        "order_received",
    ),
    Mutant(
        "a barrier less: bytes are counted before the counters are cleared", "hash_table", SELECT,
        "own[threadIdx.x] = 0;\n  __syncthreads();", "own[threadIdx.x] = 0;", "policies",
    ),
    Mutant(
        "the row that a lookup has met may leave", "hash_table", "hash_table/device_rows.cuh",
        "meta.last + window > clock || AttemptOf(meta.touch) == attempt", "meta.last + window > clock", "policies",
    ),
    Mutant(
        "a key that leaves stays in its line", "hash_table", LINES, "atomicAnd(&line->meta, ~(1u << i));", "",
        "by_hand",
    ),
    Mutant(
        "rows that both buffers hold are not refreshed", "hash_table", BUFFER,
        "to[i] = from[i];", "(void)from, (void)to;",
        "as_a_table",
    ),
    Mutant(
        "the wrong buffer is written back", "hash_table", "hash_table/device_buffer.cu",
        "other()->ReadRecords(device_handles", "active()->ReadRecords(device_handles", "as_a_table",
    ),
    Mutant(
        "an index shifted: the row before is refreshed", "hash_table", BUFFER,
        "own = static_cast<uint32_t>(n);", "own = static_cast<uint32_t>(n > 0 ? n - 1 : n);", "as_a_table",
    ),
]  # fmt: skip
