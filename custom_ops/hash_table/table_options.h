// The options that tables in host memory and on a GPU have in common, and all tables of a group. This header compiles for
// both compilers.
#pragma once

#include <cstdint>

#include "hash_table/storage.h"
#include "initial_rows/initial_number.h"

namespace fusedrec {

struct TableOptions {
  int dim = 0;
  Storage storage = Storage::kFloat32;
  bool stochastic_rounding = false;
  Distribution distribution = Distribution::kConstant;
  double a = 0.0, b = 0.0;     // of the distribution
  bool unknown_zeros = false;  // whether inference lookups return zeros for an id without a row
  int64_t window = 1;          // training lookups whose rows stay where they are
  bool record_tombstones = false;  // whether the table knows the ids that left
  int64_t hot_after = 0;  // > 0: rows begin in 16 bits, and have float32 while they count that many training lookups
  bool averaged = false;           // replicas of this table are averaged: it records the ids that they exchange
};

}  // namespace fusedrec
