// The two buffers, their roles and the pool, and the copies of rows between host and device, on streams of their own;
// buffer_cuda.h explains them.
#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

// newer_row[n]: row of `newer` with the key of row n of `table`, kNowhere without.
FUSEDREC_KERNEL IntersectKernel(TableView table, int64_t num_rows, TableView newer, uint32_t* __restrict__ newer_row) {
  const int64_t n = GlobalThread();
  const bool active = n < num_rows;
  const RowMeta* const meta = active ? table.Meta(static_cast<uint32_t>(n)) : nullptr;
  const int64_t id = active ? meta->id : 0;
  const uint32_t row = FindRow(active ? newer.segments + meta->segment : nullptr, id, TableHash(id));
  if (active) newer_row[n] = row;
}

// A warp per row copies embedding, slots and meta.
FUSEDREC_KERNEL RefreshKernel(TableView table, int64_t num_rows, TableView newer,
                              const uint32_t* __restrict__ newer_row) {
  const int64_t n = GlobalThread() / 32;
  if (n >= num_rows || newer_row[n] == kNowhere) return;
  const uint32_t row = newer_row[n], own = static_cast<uint32_t>(n);
  const uint4* const from = reinterpret_cast<const uint4*>(newer.Row(row));
  uint4* const to = reinterpret_cast<uint4*>(table.Row(own));
  for (int i = Lane(); i < table.layout.stride / 16; i += 32) to[i] = from[i];
  if (Lane() != 0) return;
  const RowMeta& known = *newer.Meta(row);
  RowMeta* const meta = table.Meta(own);
  meta->last = known.last;
  meta->count = known.count;
  meta->updated = known.updated;
}

// A warp per record, which begins at any even address (rows.cuh): records[n] = pool[slots[n]].
FUSEDREC_KERNEL CopyRecordsKernel(const char* __restrict__ pool, const int64_t* __restrict__ slots, int64_t count,
                                  int64_t record_bytes, char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(pool + slots[n] * record_bytes);
  uint16_t* const to = reinterpret_cast<uint16_t*>(records + n * record_bytes);
  for (int64_t i = Lane(); i < record_bytes / 2; i += 32) to[i] = from[i];
}

}  // namespace fusedrec::device_table

#ifndef __CUDACC_RTC__
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include <memory>
#include "hash_table/cuda/table_memory.h"

namespace {

// Page-locked host memory, which copies between host and device need not stage.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* data() const { return data_; }
  // Makes it at least so large; its contents are then lost. The caller has waited for all copies.
  int Reserve(int64_t bytes) {
    if (bytes <= bytes_) return kCudaSuccess;
    const int64_t size = bytes + bytes / 4;  // batches differ a little
    void* larger = nullptr;
    const int answer = static_cast<int>(cudaMallocHost(&larger, size));
    if (answer != kCudaSuccess) {
      LastError();  // the next launch would answer it, too
      return answer;
    }
    if (data_ != nullptr) cudaFreeHost(data_);
    data_ = static_cast<char*>(larger);
    bytes_ = size;
    return kCudaSuccess;
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace

struct FusedrecDeviceBuffer {
  static int Make(const FusedrecTableTexts& texts, const FusedrecAllocator& allocator, FusedrecDeviceBuffer** made,
                  void* stream);
  ~FusedrecDeviceBuffer();
  FusedrecDeviceTable* active() const { return tables_[active_].get(); }

  // Records that were copied from host memory, or are read from slots, and their ids.
  struct Arrived {
    std::vector<int64_t> splits;  // of the ids by segment; empty: there are none
    int64_t* ids = nullptr;
    char* records = nullptr;
    int64_t* slots = nullptr;  // of hot rows

    int64_t count() const { return splits.empty() ? 0 : splits.back(); }
  };

  FusedrecDeviceBuffer(const FusedrecAllocator& allocator, int64_t hot_rows)
      : allocator_(allocator), hot_rows_(hot_rows) {}
  FusedrecDeviceTable* other() const { return tables_[1 - active_].get(); }
  int64_t record_bytes() const { return tables_[0]->record_bytes(); }
  // Replaces the memory by one of these bytes, unless it is large enough.
  int MakeRoom(int64_t bytes, Array<char>* memory, bool* grown) const;
  // Rows whose ids and records, of hot rows slots, too, lie in memory from `at` on. Returns their bytes.
  int64_t Place(const int64_t* segment_splits, bool is_hot, char* at, Arrived* arrived) const;
  // Memory of arriving rows, of these bytes, in which copies may begin.
  int MakeRoomToSend(int64_t bytes, Array<char>* memory, void* stream);
  int Send(const Arrived& arrived, const int64_t* ids, const char* records);
  void ForgetPrefetched() { prefetched_ = more_ = hot_ = Arrived(); }
  int Insert(const Arrived& arrived, void* stream);
  int Begin(const Arrived& late, const FusedrecPoolMoves* moves, void* stream);
  int64_t LeavingOf(const FusedrecPoolMoves* moves) const {
    return moves == nullptr ? active()->num_rows() : moves->leaving + moves->dropped;
  }
  int CopySlots(const int64_t* slots, int64_t count, char* records, void* stream) const;
  // Copies the records that leave to `out_`, and rows of the active buffer to their slots. numbers: device.
  int Move(const FusedrecPoolMoves& moves, const int64_t* numbers, void* stream);
  int MakeRoomToReturn(int64_t rows);
  // Begins the copy of these rows in `out_` to the host, behind the work on `stream`.
  int CopyOut(int64_t rows, void* stream);
  int Returned(const char** records);

  const FusedrecAllocator allocator_;
  mutable std::mutex mutex_;
  std::unique_ptr<FusedrecDeviceTable> tables_[2];
  int active_ = 0;
  // Memory of arriving rows, of further ones and of leaving rows. It is kept, so copies never wait for an earlier user.
  Array<char> in_, in_more_, out_;
  const int64_t hot_rows_;
  Array<char> pool_;  // [hot_rows, record_bytes]
  Arrived prefetched_, more_, hot_;
  int64_t waiting_ = 0;  // rows in `out_` that write_back has not returned
  PinnedMemory sent_, returned_;  // records on their way to the device, and to the host
  cudaStream_t to_device_ = nullptr, to_host_ = nullptr;
  cudaEvent_t arrived_ = nullptr;  // on to_device_: the rows of the next batch are on the device
  // On the caller's stream: new memory of rows that arrive has no other user, out_ is filled.
  cudaEvent_t vacated_ = nullptr, gathered_ = nullptr;
};

int FusedrecDeviceTable::RefreshFrom(const FusedrecDeviceTable& newer, void* stream) {
  std::scoped_lock lock(mutex_, newer.mutex_);
  if (rows_.next == 0 || newer.rows_.next == 0) return kCudaSuccess;
  uint32_t* newer_row;
  ScratchMemory memory(&allocator_);
  FUSEDREC_TRY(memory.Take({{&newer_row, rows_.next}}));
  FUSEDREC_FOR_EACH(IntersectKernel, rows_.next, stream, View(), rows_.next, newer.View(), newer_row);
  FUSEDREC_FOR_EACH(RefreshKernel, 32 * rows_.next, stream, View(), rows_.next, newer.View(), newer_row);
  return LastError();
}

int FusedrecDeviceBuffer::Make(const FusedrecTableTexts& texts, const FusedrecAllocator& allocator,
                               FusedrecDeviceBuffer** made, void* stream) {
  *made = nullptr;
  TableSpec spec;
  if (!FusedrecDeviceTable::Read(texts, &spec) || !spec.host_rows) return kCudaInvalidValue;
  // Host memory decides which rows exist, and knows the rows that left.
  const int64_t hot_rows = spec.hot_rows;
  spec.limits.assign(spec.limits.size(), Limits());
  spec.record_tombstones = false;
  std::unique_ptr<FusedrecDeviceBuffer> buffer(new FusedrecDeviceBuffer(allocator, hot_rows));
  for (std::unique_ptr<FusedrecDeviceTable>& table : buffer->tables_) {
    FusedrecDeviceTable* half;
    FUSEDREC_TRY(FusedrecDeviceTable::Make(spec, texts.chunk_rows, allocator, &half, stream));
    table.reset(half);
    table->RefuseNewRows();
  }
  if (hot_rows > 0) FUSEDREC_TRY(buffer->pool_.Allocate(allocator, hot_rows * buffer->record_bytes()));
  for (cudaStream_t* copies : {&buffer->to_device_, &buffer->to_host_}) {
    FUSEDREC_TRY(cudaStreamCreateWithFlags(copies, cudaStreamNonBlocking));
  }
  for (cudaEvent_t* event : {&buffer->arrived_, &buffer->vacated_, &buffer->gathered_}) {
    FUSEDREC_TRY(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  *made = buffer.release();
  return kCudaSuccess;
}

FusedrecDeviceBuffer::~FusedrecDeviceBuffer() {
  for (cudaStream_t copies : {to_device_, to_host_}) {
    if (copies == nullptr) continue;
    cudaStreamSynchronize(copies);  // they use memory that goes
    cudaStreamDestroy(copies);
  }
  for (cudaEvent_t event : {arrived_, vacated_, gathered_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

int FusedrecDeviceBuffer::Insert(const Arrived& arrived, void* stream) {
  if (arrived.count() == 0) return kCudaSuccess;
  const int answer = other()->WriteRecords(arrived.splits.data(), arrived.ids, arrived.records, stream);
  return answer == kDeviceDoubled ? kCudaInvalidValue : answer;
}

int FusedrecDeviceBuffer::Begin(const Arrived& late, const FusedrecPoolMoves* moves, void* stream) {
  FUSEDREC_TRY(MakeRoomToReturn(LeavingOf(moves)));
  const int64_t count = moves == nullptr ? 0 : moves->leaving + 2 * moves->kept + moves->dropped;
  int64_t* numbers = nullptr;
  ScratchMemory memory(&allocator_);
  if (count > 0) FUSEDREC_TRY(memory.Take({{&numbers, count}}));
  if (count > 0) FUSEDREC_TRY(CopyToDevice(numbers, moves->numbers, count, stream));
  FUSEDREC_TRY(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), arrived_, 0));
  FUSEDREC_TRY(other()->Forget(stream));
  FUSEDREC_TRY(Insert(prefetched_, stream));
  FUSEDREC_TRY(Insert(more_, stream));
  FUSEDREC_TRY(CopySlots(hot_.slots, hot_.count(), hot_.records, stream));
  FUSEDREC_TRY(Insert(hot_, stream));
  FUSEDREC_TRY(Insert(late, stream));
  FUSEDREC_TRY(other()->RefreshFrom(*active(), stream));
  // The pool changes last: nothing below needs memory.
  if (moves != nullptr) {
    FUSEDREC_TRY(Move(*moves, numbers, stream));
  } else {
    FUSEDREC_TRY(active()->ReadRecordsOf(nullptr, nullptr, active()->num_rows(), out_.data(), stream));
  }
  return CopyOut(LeavingOf(moves), stream);
}

int fusedrec_buffer_advance(FusedrecDeviceBuffer* buffer, const int64_t* late_ids, const int64_t* late_splits,
                            const char* late_records, const FusedrecPoolMoves* moves, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  const int64_t segments = buffer->tables_[0]->segments(), count = late_splits == nullptr ? 0 : late_splits[segments];
  // On the caller's stream, as all users of this memory before and after.
  ScratchMemory memory(&buffer->allocator_);
  FusedrecDeviceBuffer::Arrived late;
  if (count > 0) {
    char* at;
    FUSEDREC_TRY(memory.Take({{&at, buffer->Place(late_splits, false, nullptr, &late)}}));
    buffer->Place(late_splits, false, at, &late);
    FUSEDREC_TRY(CopyToDevice(late.ids, late_ids, count, stream));
    FUSEDREC_TRY(CopyToDevice(late.records, late_records, count * buffer->record_bytes(), stream));
  }
  const int answer = buffer->Begin(late, moves, stream);
  buffer->ForgetPrefetched();
  if (answer != kCudaSuccess) {
    FUSEDREC_TRY(buffer->other()->Forget(stream));
    // Late records may be under way from memory that the next call of host_memory gives out, and rows of slots into memory
    // that the next prefetch fills.
    FUSEDREC_TRY(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
    return answer;
  }
  // Lookups and updates go on counting, because their clock must be ahead of the clocks in all rows.
  FusedrecTableTotals totals, next;
  fusedrec_table_statistics(buffer->active(), nullptr, &totals);
  fusedrec_table_statistics(buffer->other(), nullptr, &next);
  fusedrec_table_set_clock(buffer->other(), std::max(totals.clock, next.clock), totals.version);
  buffer->waiting_ = buffer->LeavingOf(moves);
  buffer->active_ = 1 - buffer->active_;
  return kCudaSuccess;
}

int fusedrec_buffer_drop(FusedrecDeviceBuffer* buffer, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  // Their copies are under way in memory that later calls replace.
  for (cudaStream_t copies : {buffer->to_device_, buffer->to_host_}) FUSEDREC_TRY(cudaStreamSynchronize(copies));
  buffer->ForgetPrefetched();
  buffer->waiting_ = 0;
  FUSEDREC_TRY(buffer->active()->Forget(stream));
  return buffer->other()->Forget(stream);
}

void fusedrec_buffer_rows(FusedrecDeviceBuffer* buffer, int64_t* rows) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  rows[0] = buffer->active()->num_rows();
  rows[1] = buffer->waiting_;
  rows[2] = buffer->prefetched_.count() + buffer->more_.count() + buffer->hot_.count();
}

int fusedrec_buffer_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                           FusedrecDeviceBuffer** buffer, void* stream) {
  return FusedrecDeviceBuffer::Make(*texts, *allocator, buffer, stream);
}

void fusedrec_buffer_destroy(FusedrecDeviceBuffer* buffer) { delete buffer; }

FusedrecDeviceTable* fusedrec_buffer_active(FusedrecDeviceBuffer* buffer) { return buffer->active(); }

void fusedrec_buffer_set_version(FusedrecDeviceBuffer* buffer, int64_t version) {
  buffer->active()->SetVersion(version);
}

int fusedrec_buffer_host_memory(FusedrecDeviceBuffer* buffer, int64_t bytes, char** memory) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  FUSEDREC_TRY(cudaStreamSynchronize(buffer->to_device_));
  FUSEDREC_TRY(buffer->sent_.Reserve(bytes));
  *memory = buffer->sent_.data();
  return kCudaSuccess;
}

int64_t FusedrecDeviceBuffer::Place(const int64_t* segment_splits, bool is_hot, char* at, Arrived* arrived) const {
  arrived->splits.assign(segment_splits, segment_splits + tables_[0]->segments() + 1);
  const int64_t count = arrived->count();
  return PlaceArrays({{&arrived->ids, count}, {&arrived->records, count * record_bytes()},
                      {&arrived->slots, is_hot ? count : 0}}, at);
}

int FusedrecDeviceBuffer::MakeRoom(int64_t bytes, Array<char>* memory, bool* grown) const {
  *grown = bytes > memory->size();
  return *grown ? memory->Allocate(allocator_, bytes + bytes / 4) : kCudaSuccess;
}

int FusedrecDeviceBuffer::MakeRoomToSend(int64_t bytes, Array<char>* memory, void* stream) {
  bool grown;
  FUSEDREC_TRY(MakeRoom(bytes, memory, &grown));
  if (!grown) return kCudaSuccess;  // it is free, because an advance waits until its rows have been read
  // The previous owner of new memory may still use it on the caller's stream.
  FUSEDREC_TRY(cudaEventRecord(vacated_, static_cast<cudaStream_t>(stream)));
  FUSEDREC_TRY(cudaStreamWaitEvent(to_device_, vacated_, 0));
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::Send(const Arrived& arrived, const int64_t* ids, const char* records) {
  FUSEDREC_TRY(CopyToDevice(arrived.ids, ids, arrived.count(), to_device_));
  FUSEDREC_TRY(CopyToDevice(arrived.records, records, arrived.count() * record_bytes(), to_device_));
  FUSEDREC_TRY(cudaEventRecord(arrived_, to_device_));
  return kCudaSuccess;
}

int fusedrec_buffer_prefetch(FusedrecDeviceBuffer* buffer, bool more, const int64_t* ids, const int64_t* segment_splits,
                             const char* records, const FusedrecHotRows* hot_rows, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  const std::vector<int64_t> none(buffer->tables_[0]->segments() + 1, 0);
  const FusedrecHotRows hot = hot_rows == nullptr ? FusedrecHotRows{nullptr, none.data(), nullptr} : *hot_rows;
  // Copies of rows that this call replaces may be under way to memory that it replaces.
  if (!more) FUSEDREC_TRY(cudaStreamSynchronize(buffer->to_device_));
  FusedrecDeviceBuffer::Arrived arrived, hot_arrived;
  const int64_t bytes = buffer->Place(segment_splits, false, nullptr, &arrived);
  const int64_t hot_bytes = buffer->Place(hot.segment_splits, true, nullptr, &hot_arrived);
  Array<char>& memory = more ? buffer->in_more_ : buffer->in_;
  FUSEDREC_TRY(buffer->MakeRoomToSend(bytes + hot_bytes, &memory, stream));
  if (!more) buffer->ForgetPrefetched();
  buffer->Place(segment_splits, false, memory.data(), &arrived);
  buffer->Place(hot.segment_splits, true, memory.data() + bytes, &hot_arrived);
  FUSEDREC_TRY(CopyToDevice(hot_arrived.ids, hot.ids, hot_arrived.count(), buffer->to_device_));
  FUSEDREC_TRY(CopyToDevice(hot_arrived.slots, hot.slots, hot_arrived.count(), buffer->to_device_));
  FUSEDREC_TRY(buffer->Send(arrived, ids, records));
  (more ? buffer->more_ : buffer->prefetched_) = arrived;
  if (!more) buffer->hot_ = hot_arrived;
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::MakeRoomToReturn(int64_t rows) {
  bool grown;
  FUSEDREC_TRY(returned_.Reserve(rows * record_bytes()));
  return MakeRoom(rows * record_bytes(), &out_, &grown);
}

int FusedrecDeviceBuffer::CopyOut(int64_t rows, void* stream) {
  FUSEDREC_TRY(cudaEventRecord(gathered_, static_cast<cudaStream_t>(stream)));
  FUSEDREC_TRY(cudaStreamWaitEvent(to_host_, gathered_, 0));
  if (rows == 0) return kCudaSuccess;
  FUSEDREC_TRY(cudaMemcpyAsync(returned_.data(), out_.data(), rows * record_bytes(), cudaMemcpyDeviceToHost, to_host_));
  return kCudaSuccess;
}

int FusedrecDeviceBuffer::Returned(const char** records) {
  FUSEDREC_TRY(cudaStreamSynchronize(to_host_));
  *records = returned_.data();
  return kCudaSuccess;
}

int fusedrec_buffer_write_back(FusedrecDeviceBuffer* buffer, const char** records) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  FUSEDREC_TRY(buffer->Returned(records));
  buffer->waiting_ = 0;
  return kCudaSuccess;
}

int fusedrec_buffer_read_active(FusedrecDeviceBuffer* buffer, const char** records, void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  const int64_t rows = buffer->active()->num_rows();
  FUSEDREC_TRY(buffer->MakeRoomToReturn(rows));
  FUSEDREC_TRY(buffer->active()->ReadRecordsOf(nullptr, nullptr, rows, buffer->out_.data(), stream));
  FUSEDREC_TRY(buffer->CopyOut(rows, stream));
  return buffer->Returned(records);
}

int FusedrecDeviceBuffer::CopySlots(const int64_t* slots, int64_t count, char* records, void* stream) const {
  FUSEDREC_FOR_EACH(CopyRecordsKernel, 32 * count, stream, pool_.data(), slots, count, record_bytes(), records);
  return LastError();
}

int FusedrecDeviceBuffer::Move(const FusedrecPoolMoves& moves, const int64_t* numbers, void* stream) {
  const int64_t *const rows = numbers + moves.leaving, *const slots = rows + moves.kept;
  const int64_t* const dropped = slots + moves.kept;
  char* const of_dropped = out_.data() + moves.leaving * record_bytes();
  FUSEDREC_TRY(active()->ReadRecordsOf(numbers, nullptr, moves.leaving, out_.data(), stream));
  // Before other rows come into these slots.
  FUSEDREC_TRY(CopySlots(dropped, moves.dropped, of_dropped, stream));
  return active()->ReadRecordsOf(rows, slots, moves.kept, pool_.data(), stream);
}

int fusedrec_buffer_read_hot(FusedrecDeviceBuffer* buffer, const int64_t* slots, int64_t count, const char** records,
                             void* stream) {
  std::lock_guard<std::mutex> lock(buffer->mutex_);
  if (buffer->waiting_ > 0) return kDeviceNotWritten;
  FUSEDREC_TRY(buffer->MakeRoomToReturn(count));
  int64_t* on_device;
  ScratchMemory memory(&buffer->allocator_);
  FUSEDREC_TRY(memory.Take({{&on_device, count}}));
  FUSEDREC_TRY(CopyToDevice(on_device, slots, count, stream));
  FUSEDREC_TRY(buffer->CopySlots(on_device, count, buffer->out_.data(), stream));
  FUSEDREC_TRY(buffer->CopyOut(count, stream));
  return buffer->Returned(records);
}
#endif
