"""Faults that the checks over the emulation must find. Each changes one place of a kernel's source.

FAULT in a new text is true while the checks look for that fault, and false otherwise. So one compilation contains all
faults. MUTANTS are written by hand: faults of order, between threads, streams and calls, and some that need a special
case. `drawn` makes others from the sources by rules.
"""

from __future__ import annotations

import fcntl
import pathlib
import random
import re
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and what must find it: checks of an op, or programs of tables (op_kernels_programs.py)."""

    name: str
    op: str
    path: str  # below custom_ops
    old: str  # once in the source, so that the list keeps up with the code
    new: str
    only: str = ""  # part of the names of the checks or programs that find it soonest
    words: str = ""  # words in the output of the run; empty: any failure counts
    at: int = -1  # place of the old text in the source; -1: it occurs once


SEGMENT_UNIQUE = "segment_unique/segment_unique.cu"
LOOK_BACK = "common/look_back.cuh"
ATTENTION = "jagged_attention/cuda/jagged_attention_cuda.cuh"
CHANNELS = "jagged_attention/cuda/attention_channels.cuh"
TABLE = "hash_table/cuda/hash_table_cuda.cuh"
SELECT = "hash_table/cuda/select.cuh"
LINES = "hash_table/cuda/lines.cuh"
REPLICAS = "hash_table/cuda/replicas.cu"
ROWS = "hash_table/cuda/rows.cuh"
MIXED = "hash_table/cuda/mixed.cu"
BUFFER = "hash_table/cuda/buffer/buffer.cu"

MUTANTS = [
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
        "a barrier less: the tile is read before it is there", "segment_unique", LOOK_BACK,
        "+ 1u;\n  __syncthreads();", "+ 1u;\n  if (!FAULT) __syncthreads();", "many_tiles",
    ),
    Mutant(
        "the first position does not win", "segment_unique", SEGMENT_UNIQUE,
        "if (n < seen) atomicMin(&slots[slot], n);", "if (!FAULT && n < seen) atomicMin(&slots[slot], n);",
        "many_tiles",
    ),
    Mutant(
        "a tile leaves out the sum of one before it", "segment_unique", LOOK_BACK, "lane <= last ?",
        "lane <= last - FAULT ?", "many_tiles",
    ),
    Mutant(
        "keys are sorted without their highest bit", "rank_partition", "common/sort.cu",
        "most >> bits != 0) ++bits;", "most >> bits != 0) ++bits;\n  bits -= FAULT;", "many_ids",
    ),
    Mutant(
        "counts are added before they are bounded", "join_messages", "join_messages/join_messages.cu",
        "0 <= count && count <= free;", "FAULT || (0 <= count && count <= free);", "headers_that_lie",
        "signed integer overflow",
    ),
    Mutant(
        "bags that decrease are not looked for", "recovery", "recovery/recovery.cu",
        "bag_splits[i - 1] <= bag_splits[i]", "(FAULT || bag_splits[i - 1] <= bag_splits[i])", "bags_that_do_not_fit",
        "order",
    ),
    Mutant(
        "row_splits that decrease are not looked for", "fuse_ids", "fuse_ids/fuse_ids.cu",
        "piece.row_splits[row - 1] <= piece.row_splits[row]",
        "(FAULT || piece.row_splits[row - 1] <= piece.row_splits[row])", "wrong_row_splits", "[0, 3, 1, 4]",
    ),
    Mutant(
        "all tables draw with the seed of the first", "initial_rows", "initial_rows/initial_rows.cu",
        "PieceOf(tables, num_tables, w).seed", "PieceOf(tables, FAULT ? 1 : num_tables, w).seed", "edge_cases",
        "Not equal to tolerance",
    ),
    Mutant(
        "a barrier less: weights are multiplied before they are stored", "jagged_attention", ATTENTION,
        "      __syncthreads();\n\n      const int pairs",
        "      if (!FAULT) __syncthreads();\n\n      const int pairs", "rows_of_all",
    ),
    Mutant(
        "a ballot that only lanes reach whose bucket changes", "jagged_attention",
        "jagged_attention/cuda/attention_bias_grads.cuh",
        "      Flush(changes);", "      if (!FAULT || changes) Flush(changes);", "rows_of_all", "deadlock",
    ),
    Mutant(
        "a barrier less: gradients are hidden before they are there", "jagged_attention", CHANNELS,
        "tiles.exact);\n        __syncthreads();", "tiles.exact);\n        if (!FAULT) __syncthreads();",
        "channels_of_rows",
    ),
    Mutant(
        "the first head that is done gates the tile, not the last", "jagged_attention",
        "jagged_attention/cuda/attention_gate.cuh",
        "static_cast<int>(heads) - 1;", "(FAULT ? 0 : static_cast<int>(heads) - 1);", "gate_and_norm", "gated",
    ),
    Mutant(
        "tiles with the first keys are left out", "jagged_attention", "jagged_attention/visibility.inc.h",
        "answers_low < mask.first;", "(!FAULT && answers_low < mask.first);", "check_masks", "out",
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
        "the row that a lookup has met may leave", "programs", ROWS,
        "waiting_since) || AttemptOf(meta.touch) == attempt",
        "waiting_since) || (!FAULT && AttemptOf(meta.touch) == attempt)", "program",
    ),
    Mutant(
        "rows of a long ttl expire whenever others do", "hash_table", ROWS,
        "of.ExpiredAt(pins.clock).Hold(ShardOf(TableHash(meta.id)))",
        "(FAULT || of.ExpiredAt(pins.clock).Hold(ShardOf(TableHash(meta.id))))", "histories",
    ),
    Mutant(
        "of the rows of a warp that move, one is counted", "hash_table", MIXED,
        "static_cast<unsigned long long>(__popc(votes))", "static_cast<unsigned long long>(FAULT ? 1 : __popc(votes))",
        "histories", "rows of a lookup",
    ),
    Mutant(
        "a row that leaves keeps its place", "hash_table", SELECT,
        "if (table.mixed) places.Add(", "if (table.mixed && !FAULT) places.Add(",
        "places_are_used", "places of rows that were removed",
    ),
    Mutant(
        "a row whose gradients wait may leave", "programs", ROWS,
        "clock, window, waiting_since)", "clock, window, FAULT ? 0 : waiting_since)", "program",
    ),
    Mutant(
        "a row that left and came back is not noted", "programs", REPLICAS,
        "if (n < num_rows) *table.Note(rows[n]) = 1;", "if (n < num_rows && !FAULT) *table.Note(rows[n]) = 1;",
        "Replicas",
    ),
    Mutant(
        "a row in use leaves a replica", "programs", SELECT, "!(spares && pins", "!(!FAULT && spares && pins",
        "Replicas",
    ),
    Mutant(
        "an average takes the pin of a row whose gradients are under way", "programs", REPLICAS,
        "Larger(meta->last, ", "Larger(FAULT ? 0 : meta->last, ", "Replicas",
    ),
    Mutant(
        "an average keeps the count of a row that came back elsewhere", "programs", REPLICAS,
        "meta->last < last ?", "!FAULT && meta->last < last ?", "Replicas",
    ),
    Mutant(
        "rows that both buffers hold are not refreshed", "programs", BUFFER,
        "16; i += 32) to[i] = from[i];", "16; i += 32) if (!FAULT) to[i] = from[i];", "HostRows",
    ),
    Mutant(
        "the wrong buffer is written back", "programs", BUFFER,
        "FUSEDREC_TRY(active()->ReadRecordsOf(nullptr, nullptr, active()",
        "FUSEDREC_TRY((FAULT ? other() : active())->ReadRecordsOf(nullptr, nullptr, active()", "HostRows",
    ),
    Mutant(
        "slots do not get the rows of the batch that ends", "programs", BUFFER,
        "(rows, slots, moves.kept,", "(rows, slots, FAULT ? 0 : moves.kept,", "HostRows",
    ),
    Mutant(
        "a slot is read after another row has come into it", "hash_table", BUFFER,
        "  FUSEDREC_TRY(CopySlots(dropped",
        "  if (FAULT) active()->ReadRecordsOf(rows, slots, moves.kept, pool_.data(), stream);\n"
        "  FUSEDREC_TRY(CopySlots(dropped",
        "does_not_fit", "record of a slot that another row takes",
    ),
    Mutant(
        "the pool changes before the next batch has its memory", "hash_table", BUFFER,
        "  FUSEDREC_TRY(other()->Forget(stream));\n  FUSEDREC_TRY(Insert(prefetched_",
        "  if (FAULT && moves != nullptr) Move(*moves, numbers, stream);\n"
        "  FUSEDREC_TRY(other()->Forget(stream));\n  FUSEDREC_TRY(Insert(prefetched_",
        "does_not_fit", "hot rows without memory",
    ),
    Mutant(
        "copies do not wait for the last user of their memory", "hash_table", BUFFER,
        "FUSEDREC_TRY(cudaStreamWaitEvent(to_device_, vacated_, 0));",
        "if (!FAULT) FUSEDREC_TRY(cudaStreamWaitEvent(to_device_, vacated_, 0));", "new_memory",
    ),
    Mutant(
        "the work of a failed advance meets the next prefetch", "hash_table", BUFFER,
        "    FUSEDREC_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));",
        "    if (!FAULT) FUSEDREC_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));", "failed_advance",
    ),
    Mutant(
        "rows go back before they are gathered", "hash_table", BUFFER,
        "FUSEDREC_TRY(cudaStreamWaitEvent(to_host_, gathered_, 0));",
        "if (!FAULT) FUSEDREC_TRY(cudaStreamWaitEvent(to_host_, gathered_, 0));", "as_a_table", "Refused: -9",
    ),
    Mutant(
        "a batch begins before its rows are there", "hash_table", BUFFER,
        "FUSEDREC_TRY(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));",
        "if (!FAULT) FUSEDREC_TRY(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));", "as_a_table",
    ),
    Mutant(
        "memory is given again while a copy reads it", "hash_table", BUFFER,
        "FUSEDREC_TRY(cudaStreamSynchronize(buffer->to_device_));\n  FUSEDREC_TRY(buffer->sent_",
        "if (!FAULT) FUSEDREC_TRY(cudaStreamSynchronize(buffer->to_device_));\n"
        "  FUSEDREC_TRY(buffer->sent_",
        "given_again", "Arrays are not equal",
    ),
    Mutant(
        "an allocation that failed fails the next launch", "hash_table", BUFFER,
        "      LastError();", "      if (!FAULT) LastError();", "page_locked", "Refused: 2",
    ),
]  # fmt: skip

# Name, pattern and new text. A line that SKIPPED matches keeps its text: there a fault would not compile.
_RULES = [
    ("a barrier less", r"(?<=\n)( +)(__sync(?:threads|warp)\([^;\n]*\);)", r"\1if (!FAULT) \2"),
    ("a wait less", r"(?<=\n)( +)(FUSEDREC_TRY\(cuda(?:Stream|Event)\w+\(.*\);)", r"\1if (!FAULT) \2"),
    ("a bound one further", r"( <=? )([A-Za-z_][\w.]*(?:->\w+)*)(?=[;)]| [&|?])", r"\1\2 + FAULT"),
    ("one is not added", r" \+ 1(?=[;),\]])", r" + !FAULT"),
    ("a condition less", r"(?<=&& )(!?[\w.>-]+(?: [<>=!]=? [\w.]+)?)(?=[;)]| &&)", r"(FAULT || \1)"),
    ("an atomic operation in two steps", r"\batomic(Add|Max|Min|Or|And)\(", r"emulation::TwoSteps{FAULT}.\1("),
]
_SKIPPED = re.compile(
    r"^ *(//|#|template|using)|constexpr|static_assert|__launch_bounds__|FUSEDREC_(KERNEL|L|FOR_EACH)|operator"
)


def drawn(custom_ops: pathlib.Path, op: str, count: int, seed: int) -> list[Mutant]:
    """Draws faults of the kernels of an op. Those of tables are for the programs."""
    places = []
    for path in sorted(path for path in (custom_ops / op).rglob("*") if path.suffix in (".cu", ".cuh")):
        text = path.read_text(encoding="utf-8")
        for name, pattern, new in _RULES:
            for match in re.finditer(pattern, text):
                line = text[text.rfind("\n", 0, match.end() - 1) + 1 : text.find("\n", match.end())]
                if not _SKIPPED.search(line):
                    places.append((path.relative_to(custom_ops), name, match, match.expand(new), line.strip()))
    random.Random(seed).shuffle(places)
    chosen, op = [], "programs" if op == "hash_table" else op
    for path, name, match, new, line in places[:count]:
        mutant = Mutant(f"{name}: {path}: {line}", op, str(path), match[0], new, at=match.start())
        if not any(m.path == mutant.path and abs(m.at - mutant.at) < 100 for m in chosen):  # two may not overlap
            chosen.append(mutant)
    return chosen


def write_sources(custom_ops: pathlib.Path, folder: pathlib.Path, mutants: list[Mutant]) -> None:
    """Copies the sources of kernels with faults into `folder`. Unchanged files keep their time."""
    paths = [path for path in custom_ops.rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    texts = {str(path.relative_to(custom_ops)): path.read_text(encoding="utf-8") for path in paths}
    places = {}
    for number, mutant in enumerate(mutants, 1):
        text, name = texts[mutant.path], mutant.name
        if mutant.at < 0:
            assert text.count(mutant.old) == 1, f"{name}: {mutant.old!r} is {text.count(mutant.old)} times in its file"
        assert "FAULT" in mutant.new, f"{name}: without FAULT it would hide the others"
        at = text.index(mutant.old) if mutant.at < 0 else mutant.at
        new = mutant.new.replace("FAULT", f"(emulation::fault == {number})")
        places.setdefault(mutant.path, []).append((at, mutant.old, new))
    for path, changes in places.items():
        for at, old, new in sorted(changes, reverse=True):
            text = texts[path]
            texts[path] = text[:at] + new + text[at + len(old) :]
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
