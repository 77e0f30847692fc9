// The options that tables in host memory and on a GPU have in common. This header compiles for both compilers.
#ifndef FUSEDREC_HASH_TABLE_TABLE_OPTIONS_H_
#define FUSEDREC_HASH_TABLE_TABLE_OPTIONS_H_

#include <cstdint>

#include "hash_table/storage.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {

enum class Eviction { kNone, kLru, kLfu };

struct TableOptions {
  int dim = 0;
  Storage storage = Storage::kFloat32;
  bool stochastic_rounding = false;
  Distribution distribution = Distribution::kConstant;
  double a = 0.0, b = 0.0;     // of the distribution
  bool unknown_zeros = false;  // whether inference lookups return zeros for an id without a row
  int64_t max_rows = 0;        // per segment; 0: no limit
  Eviction eviction = Eviction::kNone;
  int64_t ttl = 0;             // training lookups after which a row that none touched leaves; 0: never
  int64_t window = 1;          // training lookups whose rows stay where they are
  int64_t admission_count = 1;     // training lookups that must bring an id before it gets a row
  int64_t max_candidates = 0;      // ids per segment counted for admission; 0: no limit
  bool record_tombstones = false;  // whether the table knows the ids that left
  bool averaged = false;           // replicas of this table are averaged: it records the ids that they exchange
};

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_TABLE_OPTIONS_H_
