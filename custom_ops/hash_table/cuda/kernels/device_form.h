// A TableSpec for the launchers of a device table (hash_table_cuda.h), and their answers as a Status.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/hash_table_cuda.h"

namespace fusedrec {

// Rows of a chunk: a power of two for about 32 MiB, which is little beside a device's memory and much beside a launch.
inline int64_t DeviceChunkRows(int64_t row_bytes) {
  constexpr int64_t kChunkBytes = int64_t{1} << 25, kLeast = 32;
  int64_t rows = kLeast;
  while (2 * rows * row_bytes <= kChunkBytes) rows *= 2;
  return rows;
}

// A TableSpec for the launchers, which read its texts. It must outlive this.
struct DeviceTexts : FusedrecTableTexts {
  std::vector<const char*> of_segments;

  explicit DeviceTexts(const TableSpec& spec) {
    for (const std::string& text : spec.texts) of_segments.push_back(text.c_str());
    const auto [wide, scalars] = SlotsOf(spec.rule);
    const RowFormat format(spec.storage, spec.dim, wide, scalars, false);
    texts = of_segments.data();
    segments = static_cast<int64_t>(of_segments.size());
    chunk_rows = DeviceChunkRows(format.stride());
  }
};

// The answer of a launcher of the table as a Status. needs: the purpose of the memory that the call asked for. full_segment:
// the segment that kDeviceTableFull is about.
inline absl::Status DeviceTableStatus(int answer, const TableSpec& spec, const char* needs, int64_t full_segment = 0) {
  switch (answer) {
    case 0:
      return absl::OkStatus();
    case 1:
      return absl::InvalidArgumentError(absl::StrCat(
          "message must hold blocks [counts of ", spec.seeds.size(), " segments | ids] of the sizes in received_splits, "
          "got counts that do not fit their block, or more than ", kDeviceTableMaxIds, " ids. The table is what it was. ",
          "Take both from RankPartition, and use smaller batches."));
    case kDeviceOutOfMemory:
      if (spec.host_rows) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "a table on a GPU with rows in host memory found no memory for ", needs, ", on the device or such as copies ",
            "need on the host. No row has another value; ids of the batch may have a row now that they had not. Remedy: ",
            "smaller batches", spec.hot_rows > 0 ? ", or fewer hot_rows." : "."));
      }
      return absl::ResourceExhaustedError(absl::StrCat(
          "a table on a GPU found no device memory for ", needs, " (or has its ", kDeviceTableMaxRows,
          " rows). The table is what it was. Remedy: max_rows with an eviction policy, more ranks, host_rows, or the ",
          "table in host memory: tf.device('/CPU:0')."));
    case kDeviceTableFull: {
      const Limits& limits = spec.limits[full_segment];
      return absl::ResourceExhaustedError(absl::StrCat(
          "max_rows of ", spec.NameOf(full_segment), " is ", limits.max_rows, ", but a batch needs more rows while the ",
          "rows of the last ", spec.window, " lookups may not leave",
          limits.eviction == Eviction::kNone && limits.ttl == 0 ? " and eviction is 'none'" : "",
          ". The table is what it was. Remedy: a larger max_rows, an eviction policy, or smaller batches."));
    }
    case kDeviceStale:
      return absl::FailedPreconditionError(
          "rows of this training lookup have been evicted or removed by a later one before their gradients came. Nothing "
          "was updated. Take gradients before the next training lookup, and pass training=False to lookups that are not "
          "trained.");
    case kDeviceWaiting:
      return absl::FailedPreconditionError(
          "rows cannot be removed while accumulated gradients wait for their update. Remove them after it.");
    case kDeviceBadHandle:
      return absl::InvalidArgumentError(
          "handles must be of one TableLookup of this table (of one TableKeys for TableReadRecords), got others. Nothing "
          "has changed.");
    case kDeviceDoubled:
      return absl::InvalidArgumentError(
          "handles of an update, and ids of a merge, must be distinct, got one twice. The table is what it was. Take handles "
          "from one TableLookup, and name each id once.");
    case kDeviceClockEnds:
      return ClockEnds();
    case kDeviceBadInverse:
      return absl::InvalidArgumentError(
          "inverse must lie in [0, number of handles). Nothing was updated. Take handles and inverse from one "
          "TableLookup.");
  }
  return absl::InternalError(absl::StrCat("the table on the GPU failed: ", fusedrec_cuda_error_string(answer),
                                          " (CUDA error ", answer, ")."));
}

}  // namespace fusedrec
