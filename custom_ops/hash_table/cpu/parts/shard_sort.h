// Sorts the ids of a message by shard, so that threads can share the shards among themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/rows/running_lookups.h"
#include "hash_table/table_spec.h"

namespace fusedrec {

// Fills scratch->items and scratch->place.
//   shard_begin  [kShards + 1]  out: the items of shard s are [shard_begin[s], shard_begin[s + 1])
void SortByShard(const Message& message, int64_t segments, const ParallelFor& parallel_for, LookupScratch* scratch,
                 std::vector<int64_t>* shard_begin);

}  // namespace fusedrec
