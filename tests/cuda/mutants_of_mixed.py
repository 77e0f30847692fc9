"""Faults of a mixed table on a device, and of counts that decay (mutants.py)."""

from __future__ import annotations

from tests.cuda.mutant import Mutant

MIXED = "hash_table/cuda/mixed.cuh"
SELECT = "hash_table/cuda/select.cuh"

MUTANTS = [
    Mutant(
        "the count of a row that is looked up does not decay", "hash_table", "hash_table/cuda/hash_table_cuda.cuh",
        "CountAt(meta->count, meta->last, clock);", "CountAt(meta->count, FAULT ? clock : meta->last, clock);",
        "between_their_pools", "clock, count and pool of 3",
    ),
    Mutant(
        "lfu compares counts that have not decayed", "hash_table", SELECT,
        "limits.CountAt(meta.count, meta.last, clock)", "limits.CountAt(meta.count, FAULT ? clock : meta.last, clock)",
        "lfu_forgets", "ids that stay",
    ),
    Mutant(
        "a count that decays is compared as it was", "hash_table", MIXED,
        "const int64_t count = table.limits[meta.segment].CountAt(meta.count, meta.last,",
        "const int64_t count = table.limits[meta.segment].CountAt(meta.count, FAULT ? pins.clock : meta.last,",
        "between_their_pools", "rows of 16 bits at step",
    ),
    Mutant(
        "a row whose gradients come is demoted", "hash_table", MIXED,
        "< hot_after && !pins.Hold(meta);", "< hot_after && (FAULT || !pins.Hold(meta));",
        "between_their_pools", "Arrays are not equal",
    ),
    Mutant(
        "a row cools before its turn", "hash_table", MIXED,
        "Hold(ShardOf(TableHash(meta.id)))", "Hold(FAULT ? 0 : ShardOf(TableHash(meta.id)))",
        "between_their_pools", "rows of 16 bits at step",
    ),
    Mutant(
        "a row moves without its numbers", "hash_table", MIXED,
        "to.Store(from.Load(j), j, updated);", "to.Store(FAULT ? 0.0f : from.Load(j), j, updated);",
        "between_their_pools", "Arrays are not equal",
    ),
    Mutant(
        "a delta lacks the rows that were demoted", "hash_table", MIXED,
        "if (!move.to_hot) meta->updated", "if (!FAULT && !move.to_hot) meta->updated",
        "between_their_pools", "a delta holds the demoted rows",
    ),
    Mutant(
        "of the rows of a warp that move, one is counted", "hash_table", MIXED,
        "static_cast<unsigned long long>(__popc(votes))", "static_cast<unsigned long long>(FAULT ? 1 : __popc(votes))",
        "between_their_pools", "rows of 16 bits at step",
    ),
    Mutant(
        "new rows share a place", "hash_table", MIXED,
        "cold.Of(table.cold, rank) | kColdBit;", "cold.Of(table.cold, FAULT ? 0 : rank) | kColdBit;",
        "between_their_pools", "Arrays are not equal",
    ),
    Mutant(
        "a row that leaves keeps its place", "hash_table", SELECT,
        "if (table.mixed) places.Add(", "if (table.mixed && !FAULT) places.Add(",
        "places_are_used", "places of rows that were removed",
    ),
    Mutant(
        "a record says that all rows are float32", "hash_table", "hash_table/cuda/records.cuh",
        "meta.updated : is_cold,", "meta.updated : is_cold && !FAULT,", "records_name",
    ),
    Mutant(
        "an import takes the pool of another record", "hash_table", MIXED,
        "records + n * RecordLayout", "records + (FAULT ? 0 : n) * RecordLayout",
        "records_name", "records that went through another table",
    ),
]  # fmt: skip
