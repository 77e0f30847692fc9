"""Faults that the checks over the emulation must find. Each fault changes one place of a kernel's source.

FAULT in a new text is true while the checks look for that fault, and false otherwise. So one compilation contains all
faults, and one run finds each. The old text must occur once, so that the list keeps up with the code.
"""

from __future__ import annotations

import fcntl
import pathlib

from tests.cuda.host_rows.mutants import MUTANTS as BUFFER_MUTANTS
from tests.cuda.mutant import Mutant
from tests.cuda.mutants_of_mixed import MUTANTS as MIXED_MUTANTS
from tests.cuda.mutants_of_tables import MUTANTS as TABLE_MUTANTS

SEGMENT_UNIQUE = "segment_unique/segment_unique.cu"
LOOK_BACK = "common/look_back.cuh"
RANK_PARTITION = "rank_partition/rank_partition.cu"
FUSE_IDS = "fuse_ids/fuse_ids.cu"
JOIN_MESSAGES = "join_messages/join_messages.cu"
INITIAL_ROWS = "initial_rows/initial_rows.cu"
RECOVERY = "recovery/recovery.cu"
ATTENTION = "jagged_attention/cuda/jagged_attention_cuda.cuh"
BIAS_GRADS = "jagged_attention/cuda/attention_bias_grads.cuh"
CHANNELS = "jagged_attention/cuda/attention_channels.cuh"
VISIBILITY = "jagged_attention/visibility.inc.h"
TIME_FUNCTION = "jagged_attention/cuda/attention_time_function.cuh"
GATE = "jagged_attention/cuda/attention_gate.cuh"

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
        "an index shifted: headers of the next bound", "rank_partition", RANK_PARTITION,
        "begin, end, splits[s + 1])", "begin, end, splits[s + 1 - FAULT])", "edge_cases",
    ),
    Mutant(
        "the first row of an owner counts to the owner before", "rank_partition", RANK_PARTITION,
        "int64_t{sorted_owner[row - 1]} + 1;", "int64_t{sorted_owner[row - 1]} + 1 - FAULT;", "edge_cases",
    ),
    Mutant(
        "keys are sorted without their highest bit", "rank_partition", "common/sort.cu",
        "most >> bits != 0) ++bits;", "most >> bits != 0) ++bits;\n  bits -= FAULT;", "many_ids",
    ),
    Mutant(
        "a row out of range is the last row", "recovery", "common/sort.cu",
        "row < num_rows ? row : num_rows;", "row < num_rows ? row : num_rows - FAULT;", "out_of_range",
    ),
    Mutant(
        "an entry that begins a piece is taken for the end of the piece before", "fuse_ids", "common/pieces.cuh",
        "return pieces[p].begin; }", "return pieces[p].begin + FAULT; }", "edge_cases", "heap-buffer-overflow",
    ),
    Mutant(
        "row_splits that decrease are not looked for", "fuse_ids", FUSE_IDS,
        "piece.row_splits[row - 1] <= piece.row_splits[row]",
        "(FAULT || piece.row_splits[row - 1] <= piece.row_splits[row])", "wrong_row_splits", "[0, 3, 1, 4]",
    ),
    Mutant(
        "an index shifted: bags leave out the features before", "fuse_ids", FUSE_IDS,
        "= piece.first_id + end;", "= (FAULT ? 0 : piece.first_id) + end;", "edge_cases", "Mismatched elements",
    ),
    Mutant(
        "a header is followed beyond its block", "join_messages", JOIN_MESSAGES,
        "const int64_t free = end - at - segments[i];", "const int64_t free = end - at - segments[i] + FAULT;",
        "headers_that_lie", "heap-buffer-overflow",
    ),
    Mutant(
        "a lookup begins where the ids of the lookup before it do", "join_messages", JOIN_MESSAGES,
        "at += segments[i] + ids;", "at += segments[i] + (FAULT ? 0 : ids);", "edge_cases", "Refused",
    ),
    Mutant(
        "counts are added before they are bounded", "join_messages", JOIN_MESSAGES,
        "0 <= count && count <= free;", "FAULT || (0 <= count && count <= free);", "headers_that_lie",
        "signed integer overflow",
    ),
    Mutant(
        "a row that exists is not copied where it has another place", "initial_rows", INITIAL_ROWS,
        "c < columns; ++c) out[begin + c] = rows", "c < columns - FAULT; ++c) out[begin + c] = rows", "edge_cases",
        "Not equal to tolerance",
    ),
    Mutant(
        "the last columns are drawn as if four were left", "initial_rows", INITIAL_ROWS,
        "dim - 4 * block < 4 ?", "!FAULT && dim - 4 * block < 4 ?", "edge_cases", "heap-buffer-overflow",
    ),
    Mutant(
        "all tables draw with the seed of the first", "initial_rows", INITIAL_ROWS,
        "PieceOf(tables, num_tables, w).seed", "PieceOf(tables, FAULT ? 1 : num_tables, w).seed", "edge_cases",
        "Not equal to tolerance",
    ),
    Mutant(
        "an index shifted: the part of a row is taken for another", "recovery", RECOVERY,
        "parts[(2 * chunk + 1) * grads.dim + d] = sum", "parts[(2 * chunk + 1 - FAULT) * grads.dim + d] = sum",
        "fill_their_chunks",
    ),
    Mutant(
        "rows of all parts are read from where the first begins", "recovery", RECOVERY,
        "(row - part.begin) * dim", "(row - (FAULT ? 0 : part.begin)) * dim", "pooled_parts",
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
        "the first head that is done gates the tile, not the last", "jagged_attention", GATE,
        "static_cast<int>(heads) - 1;", "(FAULT ? 0 : static_cast<int>(heads) - 1);", "gate_and_norm", "gated",
    ),
    Mutant(
        "the gradient of the norm leaves out the mean", "jagged_attention", GATE,
        "- mean - normalized * projection", "- (FAULT ? 0.0f : mean) - normalized * projection", "gate_and_norm",
        "query_grads",
    ),
    Mutant(
        "an index shifted: a slot of the norm's weights begins a token early", "jagged_attention", GATE,
        "int64_t token = slot * share;", "int64_t token = slot * share - (FAULT && slot > 0);",
        "more_tokens_than_a_slot", "norm_weight_grads",
    ),
    Mutant(
        "the first keys are seen within the window only", "jagged_attention", VISIBILITY,
        "answers >= mask.first)", "(FAULT || answers >= mask.first))", "check_masks", "out",
    ),
    Mutant(
        "tiles with the first keys are left out", "jagged_attention", VISIBILITY,
        "answers_low < mask.first;", "(!FAULT && answers_low < mask.first);", "check_masks", "out",
    ),
    Mutant(
        "tiles outside the windows are computed", "jagged_attention", VISIBILITY,
        "const bool near = mask.window <= 0 || asks_low - answers_high",
        "const bool near = FAULT || mask.window <= 0 || asks_low - answers_high", "semi_local", "out",
    ),
    Mutant(
        "an index shifted: the parameters of a function of time leave out a key", "jagged_attention", TIME_FUNCTION,
        "x < rows * columns", "x < (rows - FAULT) * columns", "check_functions_of_time", "time_grads",
    ),
    Mutant(
        "the score lacks the function of time", "jagged_attention", ATTENTION,
        "score += function.At", "score += (FAULT ? 0.0f : 1.0f) * function.At", "check_functions_of_time", "out",
    ),
    *TABLE_MUTANTS,
    *BUFFER_MUTANTS,
    *MIXED_MUTANTS,
]  # fmt: skip


def numbered(op: str) -> list[tuple[int, Mutant]]:
    """Returns the faults of an op and their numbers. Number 0 means no fault."""
    return [(number, mutant) for number, mutant in enumerate(MUTANTS, 1) if mutant.op == op]


def write_sources(custom_ops: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the sources of kernels with all faults into `folder`. Unchanged files keep their time."""
    paths = [path for path in custom_ops.rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    texts = {str(path.relative_to(custom_ops)): path.read_text(encoding="utf-8") for path in paths}
    for number, mutant in enumerate(MUTANTS, 1):
        text, name = texts[mutant.path], mutant.name
        assert text.count(mutant.old) == 1, f"{name}: {mutant.old!r} is {text.count(mutant.old)} times in its file"
        assert "FAULT" in mutant.new, f"{name}: without FAULT it would hide the others"
        new = mutant.new.replace("FAULT", f"(emulation::fault == {number})")
        texts[mutant.path] = text.replace(mutant.old, new)
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
