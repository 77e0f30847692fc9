// A table with all rows on a device, and what a table with rows in host memory (host_rows.cc) shares with it.
#pragma once

#include <memory>

#include "hash_table/cuda/hash_table_cuda.h"
#include "hash_table/table.h"

namespace fusedrec {

// Makes a table on the device of `stream`: of either kind, as tier.host_rows says.
absl::Status MakeDeviceTable(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                             std::unique_ptr<Table>* table);

// One with rows in host memory (host_rows.cc).
absl::Status MakeHostRowsTable(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                               std::unique_ptr<Table>* table);

// A TableSpec for the launchers, which read its texts. It must outlive this.
struct DeviceTexts : FusedrecTableTexts {
  std::vector<const char*> of_segments;

  explicit DeviceTexts(const TableSpec& spec);
};

// The answer of a launcher of the table as a Status. needs: the purpose of the memory that the call asked for. full_segment:
// the segment that kDeviceTableFull is about.
absl::Status DeviceTableStatus(int answer, const TableSpec& spec, const char* needs, int64_t full_segment = 0);

inline FusedrecMessage ViewOf(const Message& message) {
  return {message.entries.data(), message.source_splits.data(), static_cast<int64_t>(message.source_splits.size())};
}

inline FusedrecGradients ViewOf(const Gradients& in) {
  return {in.handles.data(), static_cast<int64_t>(in.handles.size()), in.inverse.data(),
          static_cast<int64_t>(in.inverse.size()), in.grads, static_cast<int64_t>(in.storage), in.scale};
}

// Takes device memory until the op ends.
template <typename T>
int TakeMemory(const TableCall& call, int64_t count, T** data) {
  *data = static_cast<T*>(call.memory->allocate(call.memory->context, std::max<int64_t>(count, 1) * sizeof(T)));
  return *data == nullptr ? kDeviceOutOfMemory : 0;
}

// Calls update(places, &count) with room on the device for the places of the rows that it leaves out, and lists them.
template <typename Update>
absl::Status LeaveOut(const TableCall& call, const TableSpec& spec, int64_t num_rows, const Update& update,
                      std::vector<int32_t>* left_out) {
  int32_t* places;
  FUSEDREC_TRY(DeviceTableStatus(TakeMemory(call, num_rows, &places), spec, "an update"));
  int64_t count = 0;
  FUSEDREC_TRY(update(places, &count));
  if (count == 0) return absl::OkStatus();  // a copy would wait
  left_out->resize(count);
  const int answer = fusedrec_copy_to_host(left_out->data(), places, count * sizeof(int32_t), call.stream);
  std::sort(left_out->begin(), left_out->end());
  return DeviceTableStatus(answer, spec, "an update");
}

}  // namespace fusedrec
