"""Faults of the table on a device (mutants.py)."""

from __future__ import annotations

from tests.cuda.mutant import Mutant

TABLE = "hash_table/cuda/hash_table_cuda.cuh"
UPDATE = "hash_table/cuda/update/update.cuh"
SUMS = "hash_table/cuda/update/sums.cuh"
SELECT = "hash_table/cuda/select.cuh"
LINES = "hash_table/cuda/lines.cuh"
ADMISSION = "hash_table/cuda/admission.cuh"
LOWEST = "hash_table/cuda/lowest.cuh"
REPLICAS = "hash_table/cuda/replicas.cuh"
ROWS = "hash_table/cuda/rows.cuh"

MUTANTS = [
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
        "a row is trained by a gradient that is not finite", "hash_table", UPDATE,
        "if (!__all_sync(mask, is_finite)) {", "if (!FAULT && !__all_sync(mask, is_finite)) {", "not_finite",
    ),
    Mutant(
        "an index shifted: the last gradient of a row goes to the next", "hash_table", UPDATE,
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
        "a row whose gradients wait may leave", "hash_table", ROWS,
        "(waiting_since != 0 && meta.last", "(!FAULT && waiting_since != 0 && meta.last", "gradients_wait",
        "rows whose gradients wait have left",
    ),
    Mutant(
        "a barrier less: bytes are counted before the counters are cleared", "hash_table", LOWEST,
        "own[threadIdx.x] = 0;\n  __syncthreads();", "own[threadIdx.x] = 0;\n  if (!FAULT) __syncthreads();",
        "policies",
    ),
    Mutant(
        "the row that a lookup has met may leave", "hash_table", ROWS,
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
        "TableHash(id), 1);", "TableHash(id), FAULT ? 2 : 1);", "admission_counts",
    ),
    Mutant(
        "counts are halved twice", "hash_table", ADMISSION,
        "line->row[place] /= 2;", "line->row[place] /= FAULT ? 4 : 2;", "admission_counts",
    ),
    Mutant(
        "all segments admit by the count of the first", "hash_table", ADMISSION,
        "table.limits[segment].admission_count : 1;", "table.limits[FAULT ? 0 : segment].admission_count : 1;",
        "limits_of_their_own",
    ),
    Mutant(
        "an id that needs no admission leaves the counts", "hash_table", ADMISSION,
        "if (table.limits[segment].admission_count <= 1) return;",
        "if (!FAULT && table.limits[segment].admission_count <= 1) return;", "limits_of_their_own",
    ),
    Mutant(
        "rows of all segments expire by the ttl of the first", "hash_table", ROWS,
        "limits[meta.segment]", "limits[FAULT ? 0 : meta.segment]", "limits_of_their_own",
    ),
    Mutant(
        "rows of a long ttl expire whenever others do", "hash_table", ROWS,
        "&& of.ExpireAt(pins.clock)", "&& (FAULT || of.ExpireAt(pins.clock))", "a_long_ttl",
    ),
    Mutant(
        "a peek answers rows that have expired", "hash_table", TABLE,
        "has_expired(row, *table.Meta(row)) ?", "!FAULT && has_expired(row, *table.Meta(row)) ?",
        "limits_of_their_own", "a peek",
    ),
    Mutant(
        "a row that an id without training gets is noted", "hash_table", TABLE,
        "if (table.layout.noted) *table.Note(row) = 0;", "if (table.layout.noted) *table.Note(row) = FAULT ? 1 : 0;",
        "taken_once", "ids that were trained",
    ),
    Mutant(
        "a row that left and came back is not noted", "hash_table", REPLICAS,
        "if (n < num_rows) *table.Note(rows[n]) = 1;", "if (n < num_rows && !FAULT) *table.Note(rows[n]) = 1;",
        "taken_once", "ids that were trained",
    ),
    Mutant(
        "a note outlives its average", "hash_table", REPLICAS,
        "*table.Note(row) = 0;", "*table.Note(row) = FAULT ? 1 : 0;", "taken_once", "ids are taken once",
    ),
    Mutant(
        "slots are read one column too far", "hash_table", ROWS,
        "return LoadNumber(layout.slot_storage, data + layout.wide_offset, j - layout.dim);",
        "return LoadNumber(layout.slot_storage, data + layout.wide_offset, j - layout.dim + FAULT);",
        "numbers_of_rows",
    ),
    Mutant(
        "an index shifted: ids of the segment before", "hash_table", "hash_table/cuda/message.cuh",
        "if (splits[middle] <= n) {", "if (splits[middle] + FAULT <= n) {", "numbers_of_rows",
    ),
    Mutant(
        "a row in use leaves a replica", "hash_table", SELECT,
        "!(spares && pins", "!(!FAULT && spares && pins", "common_state",
    ),
    Mutant(
        "the first number of a merged row is its neighbour's", "hash_table", REPLICAS,
        "Store(numbers[i], j", "Store(numbers[FAULT ? n * width : i], j",
        "common_state", "numbers of the common state",
    ),
    Mutant(
        "an average takes the pin of a row whose gradients are under way", "hash_table", REPLICAS,
        "Larger(meta->last, ", "Larger(FAULT ? 0 : meta->last, ", "under_way", "under way has left",
    ),
    Mutant(
        "an average keeps the count of a row that came back elsewhere", "hash_table", REPLICAS,
        "meta->last < last ?", "!FAULT && meta->last < last ?", "came_back", "has the row anew",
    ),
    Mutant(
        "rows of replicas expire into a list without room", "hash_table", "hash_table/cuda/evict.cu",
        "options_.record_tombstones || options_.averaged) {",
        "options_.record_tombstones || (!FAULT && options_.averaged)) {",
        "expire_are_listed", "heap-buffer-overflow",
    ),
    Mutant(
        "the ids that leave together are written to one place", "hash_table", SELECT,
        "left[rank] = {meta->id", "left[FAULT ? 0 : rank] = {meta->id", "by_hand",
    ),
    Mutant(
        "an id that came back is a tombstone", "hash_table", LOWEST,
        "if (active) found[n] = row;", "if (active) found[n] = FAULT ? kNowhere : row;", "policies",
        "tombstones of ids that left and stayed away",
    ),
]  # fmt: skip
