// Kernels outside the training step for a table on a device: sizes, eviction, checkpoints.
#include <vector>

#include "hash_table/cuda/kernels/device_table_resource.h"
#include "hash_table/kernels/table_upkeep.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;

namespace {

using Access = HostRows::Access;

// A copy of a host tensor in device memory, for one op.
absl::Status ToDevice(OpKernelContext* ctx, const Tensor& host, Tensor* device) {
  TF_RETURN_IF_ERROR(ctx->allocate_temp(host.dtype(), host.shape(), device));
  return CudaStatus("copy_to_device",
                    fusedrec_copy_to_device(device->data(), host.data(), host.TotalBytes(), StreamOf(ctx)));
}

// Copies the first `rows` of a device array to an output in host memory.
absl::Status GiveFrom(OpKernelContext* ctx, int index, const Tensor& device, int64_t rows) {
  Tensor* out;
  const Tensor given = device.Slice(0, rows);
  TF_RETURN_IF_ERROR(ctx->allocate_output(index, given.shape(), &out));
  return CudaStatus("copy_to_host", fusedrec_copy_to_host(out->data(), given.data(), given.TotalBytes(), StreamOf(ctx)));
}

absl::Status ReadSegment(OpKernelContext* ctx, const DeviceTableResource& resource, int64_t* segment) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 1, "segment", segment));
  return RequireSegment(*segment, resource.segments());
}

std::vector<int64_t> SizesOf(const DeviceTableResource& resource, FusedrecTableTotals* totals) {
  std::vector<int64_t> sizes(resource.segments());
  fusedrec_table_size(resource.table(), sizes.data(), totals);
  return sizes;
}

absl::Status Size(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecTableTotals totals;
  return upkeep::Give(ctx, 0, SizesOf(resource, &totals));
}

absl::Status Statistics(OpKernelContext* ctx, const DeviceTableResource& resource) {
  if (resource.host_rows() != nullptr) {
    TF_RETURN_IF_ERROR(upkeep::GiveTraffic(ctx, resource.host_rows()->Traffic()));
    return resource.host_rows()->OnHost(Access::kNumbers, CpuPool(ctx), StreamOf(ctx),
                                        [ctx](HashTable* table) { return upkeep::GiveCounts(ctx, table); });
  }
  TF_RETURN_IF_ERROR(upkeep::GiveTraffic(ctx, std::vector<int64_t>(3 * resource.segments(), 0)));
  int64_t all = 0;
  FusedrecTableTotals totals;
  const std::vector<int64_t> sizes = SizesOf(resource, &totals);
  std::vector<int64_t> counted(5 * sizes.size());
  fusedrec_table_statistics(resource.table(), counted.data());
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({resource.segments(), 6}), &out));
  auto matrix = out->matrix<int64_t>();
  for (int64_t s = 0; s < resource.segments(); ++s) {
    all += sizes[s];
    matrix(s, 0) = sizes[s];
    for (int i = 0; i < 5; ++i) matrix(s, 1 + i) = counted[5 * s + i];
  }
  return upkeep::Give(ctx, 1, {totals.line_bytes, totals.chunk_bytes, totals.cold_bytes, all - totals.cold_rows,
                              totals.cold_rows});
}

absl::Status Clock(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecTableTotals totals;
  SizesOf(resource, &totals);
  return upkeep::Give(ctx, 0, {totals.clock, totals.version});
}

absl::Status SetClock(OpKernelContext* ctx, const DeviceTableResource& resource) {
  Moment clock;
  TF_RETURN_IF_ERROR(ReadMoment("clock", ctx->input(1), &clock));
  fusedrec_table_set_clock(resource.table(), clock.lookups, clock.version);
  return absl::OkStatus();
}

absl::Status Clear([[maybe_unused]] OpKernelContext* ctx, const DeviceTableResource& resource) {
  return resource.StatusOf(fusedrec_table_clear(resource.table(), StreamOf(ctx)), "its segments");
}

absl::Status Keys(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, count;
  FusedrecTableTotals totals;
  Moment since;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(ReadMoment("since", ctx->input(2), &since));
  int64_t most = SizesOf(resource, &totals)[segment];
  Tensor ids, handles;
  for (int answer = kDeviceMore; answer == kDeviceMore; most = count) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({most}), &ids));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({most}), &handles));
    answer = fusedrec_table_keys(resource.table(), segment, since.lookups, since.version, most,
                                 Out<int64_t>(&ids).data(), Out<int64_t>(&handles).data(), &count, StreamOf(ctx));
    if (answer != kDeviceMore) TF_RETURN_IF_ERROR(resource.StatusOf(answer, "a list of keys"));
  }
  TF_RETURN_IF_ERROR(GiveFrom(ctx, 0, ids, count));
  return GiveFrom(ctx, 1, handles, count);
}

absl::Status ReadRecords(OpKernelContext* ctx, const DeviceTableResource& resource) {
  Tensor handles, records;
  TF_RETURN_IF_ERROR(RequireRank("handles", ctx->input(1), 1));
  TF_RETURN_IF_ERROR(ToDevice(ctx, ctx->input(1), &handles));
  const int64_t count = handles.NumElements();
  TF_RETURN_IF_ERROR(ctx->allocate_temp(
      tensorflow::DT_UINT8, TensorShape({count, fusedrec_table_record_bytes(resource.table())}), &records));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_read_records(resource.table(), In<int64_t>(handles).data(), count,
                                  static_cast<char*>(records.data()), StreamOf(ctx)),
      "an export"));
  return GiveFrom(ctx, 0, records, count);
}

absl::Status Import(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  Tensor ids, records;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(RequireRecords(ctx->input(2), ctx->input(3), fusedrec_table_record_bytes(resource.table())));
  TF_RETURN_IF_ERROR(ToDevice(ctx, ctx->input(2), &ids));
  TF_RETURN_IF_ERROR(ToDevice(ctx, ctx->input(3), &records));
  return resource.StatusOf(
      fusedrec_table_write_records(resource.table(), segment, In<int64_t>(ids).data(), ids.NumElements(),
                                   static_cast<const char*>(records.data()), StreamOf(ctx)),
      "rows that are imported");
}

absl::Status Remove(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, gone;
  Tensor ids;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(RequireRank("ids", ctx->input(2), 1));
  TF_RETURN_IF_ERROR(ToDevice(ctx, ctx->input(2), &ids));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_remove(resource.table(), segment, In<int64_t>(ids).data(), ids.NumElements(), &gone,
                            StreamOf(ctx)),
      "a removal"));
  return upkeep::GiveScalar(ctx, gone);
}

absl::Status Evict(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, count, gone;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "count", &count));
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("count must be >= 0, got ", count, "."));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_evict(resource.table(), segment, count, &gone, StreamOf(ctx)), "an eviction"));
  return upkeep::GiveScalar(ctx, gone);
}

// Ids that a launcher gives to its sink.
struct Given {
  std::vector<int64_t> ids, numbers;

  FusedrecIdSink sink() {
    return {this, [](void* context, const int64_t* ids, const int64_t* numbers, int64_t count) {
              auto* const given = static_cast<Given*>(context);
              given->ids.assign(ids, ids + count);
              if (numbers != nullptr) given->numbers.assign(numbers, numbers + count);
            }};
  }
};

absl::Status Tombstones(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  Given given;
  const FusedrecIdSink sink = given.sink();
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_tombstones(resource.table(), segment, &sink, StreamOf(ctx)), "a list of tombstones"));
  return upkeep::Give(ctx, 0, given.ids);
}

absl::Status ForgetTombstones(OpKernelContext*, const DeviceTableResource& resource) {
  fusedrec_table_forget_tombstones(resource.table());
  return absl::OkStatus();
}

absl::Status Candidates(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  Given given;
  const FusedrecIdSink sink = given.sink();
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_candidates(resource.table(), segment, &sink, StreamOf(ctx)), "a list of candidates"));
  TF_RETURN_IF_ERROR(upkeep::Give(ctx, 0, given.ids));
  return upkeep::Give(ctx, 1, given.numbers);
}

absl::Status ImportCandidates(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(RequireCandidates(ctx->input(2), ctx->input(3)));
  const auto ids = In<int64_t>(ctx->input(2)), counts = In<int64_t>(ctx->input(3));
  return resource.StatusOf(
      fusedrec_table_set_candidates(resource.table(), segment, ids.data(), counts.data(), ids.size(), StreamOf(ctx)),
      "counts that are imported");
}

// Calls one function for a table with all rows on the device, another for rows in host memory.
template <absl::Status (*kOnDevice)(OpKernelContext*, const DeviceTableResource&),
          absl::Status (*kOnHost)(OpKernelContext*, HashTable*), Access kAccess>
absl::Status Upkeep(OpKernelContext* ctx, const DeviceTableResource& resource) {
  if (resource.host_rows() == nullptr) return kOnDevice(ctx, resource);
  return resource.host_rows()->OnHost(kAccess, CpuPool(ctx), StreamOf(ctx),
                                      [ctx](HashTable* table) { return kOnHost(ctx, table); });
}

}  // namespace

#define FUSEDREC_TABLE_KERNEL(NAME) Name("Fusedrec>" NAME).Device(DEVICE_GPU).HostMemory("table")
#define FUSEDREC_OF_SEGMENT(NAME) FUSEDREC_TABLE_KERNEL(NAME).HostMemory("segment")
#define FUSEDREC_UPKEEP(FUNCTION, ACCESS) DeviceTableFunctionOp<Upkeep<FUNCTION, upkeep::FUNCTION, Access::ACCESS>>
// Inputs and outputs of these ops are in host memory: checkpoints, statistics. An eviction keeps the rows of the last
// lookup, which are on the device.
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableSize").HostMemory("size"), FUSEDREC_UPKEEP(Size, kNumbers));
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableStatistics").HostMemory("segments").HostMemory("bytes").HostMemory("traffic"),
                        DeviceTableFunctionOp<Statistics>);
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableClock").HostMemory("clock"), FUSEDREC_UPKEEP(Clock, kNumbers));
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableSetClock").HostMemory("clock"), FUSEDREC_UPKEEP(SetClock, kChange));
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableClear"), FUSEDREC_UPKEEP(Clear, kChange));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableKeys").HostMemory("since").HostMemory("ids").HostMemory("handles"),
                        FUSEDREC_UPKEEP(Keys, kRows));
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableReadRecords").HostMemory("handles").HostMemory("records"),
                        FUSEDREC_UPKEEP(ReadRecords, kRows));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableImport").HostMemory("ids").HostMemory("records"),
                        FUSEDREC_UPKEEP(Import, kChange));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableRemove").HostMemory("ids").HostMemory("removed"),
                        FUSEDREC_UPKEEP(Remove, kChange));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableEvict").HostMemory("count").HostMemory("evicted"),
                        FUSEDREC_UPKEEP(Evict, kRows));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableTombstones").HostMemory("ids"), FUSEDREC_UPKEEP(Tombstones, kNumbers));
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableForgetTombstones"), FUSEDREC_UPKEEP(ForgetTombstones, kNumbers));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableCandidates").HostMemory("ids").HostMemory("counts"),
                        FUSEDREC_UPKEEP(Candidates, kNumbers));
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableImportCandidates").HostMemory("ids").HostMemory("counts"),
                        FUSEDREC_UPKEEP(ImportCandidates, kNumbers));
#undef FUSEDREC_UPKEEP
#undef FUSEDREC_OF_SEGMENT
#undef FUSEDREC_TABLE_KERNEL

}  // namespace fusedrec
