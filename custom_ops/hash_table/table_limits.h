// What kernels read of the options of tables (options.h): the limits of one table, how many rows it has, which of them
// leave and how long their lookups count; and the options that all tables of a group have in common.
// This header compiles for both compilers.
#pragma once

#include "common/host_device.h"
#include "hash_table/storage.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {

enum class Eviction { kNone, kLru, kLfu };

// A handle holds the clock of its lookup in the 31 bits above the row; a handle below 0 names no row.
constexpr int64_t kMostClock = (int64_t{1} << 31) - 1;

// The high bits of TableHash(id) choose the shard of a row, and with a few more its part: a shard has 16 parts.
constexpr int kShardBits = 6, kShards = 1 << kShardBits, kPartBits = 10, kParts = 1 << kPartBits;
FUSEDREC_HOST_DEVICE inline int ShardOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kShardBits)); }
FUSEDREC_HOST_DEVICE inline int PartOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kPartBits)); }
FUSEDREC_HOST_DEVICE inline int ShardOfPart(int64_t part) { return static_cast<int>(part >> (kPartBits - kShardBits)); }

// Shards or parts [begin, end).
struct Shards {
  int64_t begin, end;

  FUSEDREC_HOST_DEVICE bool Hold(int64_t number) const { return begin <= number && number < end; }
  FUSEDREC_HOST_DEVICE bool empty() const { return begin == end; }
};
using Parts = Shards;

struct Limits {
  int64_t max_rows = 0;  // 0: no limit
  Eviction eviction = Eviction::kNone;
  int64_t ttl = 0;              // training lookups after which a row that none touched leaves; 0: never
  int64_t admission_count = 1;  // training lookups that must bring an id before it gets a row
  int64_t max_candidates = 0;   // ids counted for admission; 0: no limit
  int64_t frequency_decay_steps = 0;  // training lookups after which the counts of rows are halved; 0: never
  bool exact_eviction = false;  // false: of a large table in host memory, the lowest rows of some parts leave (eviction.h)

  // Returns the count of a row at the lookup of this clock, from its count at the lookup `last`, its latest. Counts are
  // halved ahead of every lookup whose number is a multiple of frequency_decay_steps, and rounded down. The header has all
  // that this takes, so a halving visits no row.
  FUSEDREC_HOST_DEVICE uint32_t CountAt(uint32_t count, uint32_t last, uint32_t clock) const {
    if (frequency_decay_steps == 0 || last >= clock) return count;
    const int64_t halvings = clock / frequency_decay_steps - last / frequency_decay_steps;
    return halvings < 32 ? count >> halvings : 0;
  }
  // Returns the rank of such a row among those that may leave at the lookup of this clock. The lowest leave first.
  FUSEDREC_HOST_DEVICE uint64_t ScoreOf(uint32_t count, uint32_t last, uint32_t clock) const {
    return uint64_t{eviction == Eviction::kLfu ? CountAt(count, last, clock) : 0} << 32 | last;
  }
  // Returns the shards that have their turn at the lookup of this clock. Each has it once in `steps` lookups.
  FUSEDREC_HOST_DEVICE static Shards TurnAt(uint32_t clock, int64_t steps) {
    if (steps == 0) return {0, 0};
    // The first shard s with s * steps / kShards >= phase, then the same of the next phase.
    const int64_t phase = clock % steps;
    return {(phase * kShards + steps - 1) / steps, ((phase + 1) * kShards + steps - 1) / steps};
  }
  // Returns the shards whose rows may be demoted at the lookup of this clock (eviction.h).
  FUSEDREC_HOST_DEVICE Shards DemotedAt(uint32_t clock) const { return TurnAt(clock, frequency_decay_steps); }
  // Returns the shards whose rows may expire at the lookup of this clock. Rows of a long ttl leave up to a sixteenth of it
  // later, because a pass reads the header of each row.
  FUSEDREC_HOST_DEVICE Shards ExpiredAt(uint32_t clock) const { return TurnAt(clock, ttl > 0 && ttl < 16 ? 1 : ttl / 16); }
  // Returns whether a row that the lookup `last` touched is too old at the lookup of this clock.
  FUSEDREC_HOST_DEVICE bool IsOver(uint32_t last, uint32_t clock, int64_t window) const {
    return ttl > 0 && last + (ttl > window ? ttl : window) < clock;
  }
};

struct TableOptions {
  int dim = 0;
  Storage storage = Storage::kFloat32;
  Storage initial_storage = Storage::kFloat32;  // of initial rows where rows are in int8: those of the table of training
  bool stochastic_rounding = false;
  Distribution distribution = Distribution::kConstant;
  double a = 0.0, b = 0.0;     // of the distribution
  bool unknown_zeros = false;  // whether inference lookups return zeros for an id without a row
  bool record_tombstones = false;  // whether the table knows the ids that left
  int64_t hot_after = 0;  // > 0: rows begin in 16 bits, and have float32 while they count that many training lookups
  bool averaged = false;           // replicas of this table are averaged: it records the ids that they exchange
};

}  // namespace fusedrec
