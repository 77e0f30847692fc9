// Making a table and making room in it.
#include "hash_table/cuda/table_memory.h"

#include <algorithm>
#include <numeric>

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

constexpr double kMaxLoad = 0.75;

// All keys of the old lines into the new, larger ones; a thread per place.
__global__ void __launch_bounds__(256) RehashKernel(const Line* __restrict__ from, int64_t places, SegmentLines to) {
  const int64_t i = GlobalThread();
  if (i >= places) return;
  const Line& line = from[i / kKeysPerLine];
  const int place = static_cast<int>(i % kKeysPerLine);
  if ((line.meta >> place & 1) == 0) return;
  InsertKey(to.lines, to.mask, line.key[place], TableHash(line.key[place]), line.row[place]);
}

RowLayout LayoutOf(const TableOptions& options, const SlotCounts& slots, Storage storage) {
  RowLayout layout =
      RowLayout::Of(storage, options.dim, slots.wide, slots.scalar, options.stochastic_rounding, 0, 16);
  layout.noted = options.averaged;
  return layout;
}

}  // namespace

FusedrecDeviceTable::FusedrecDeviceTable(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator)
    : allocator_(allocator),
      options_(spec),
      limits_(spec.limits),
      rule_(spec.rule),
      layout_(LayoutOf(options_, SlotsOf(rule_), options_.storage)),
      cold_layout_(LayoutOf(options_, SlotsOf(rule_), IsMixed() ? Storage::kFloat16 : options_.storage)),
      segments_(spec.seeds.size()) {
  while (this->chunk_rows() < chunk_rows) ++chunk_bits_;
}

int FusedrecDeviceTable::Make(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator,
                              FusedrecDeviceTable** made, void* stream) {
  if (chunk_rows < 32 || chunk_rows > kDeviceTableMaxRows || (chunk_rows & (chunk_rows - 1)) != 0) {
    return kCudaInvalidValue;
  }
  auto table = new FusedrecDeviceTable(spec, chunk_rows, allocator);
  *made = table;
  const int64_t segments = spec.seeds.size();
  table->seeds_ = Memory(allocator, segments * sizeof(uint64_t));
  table->limits_view_ = Memory(allocator, segments * sizeof(Limits));
  table->views_ = Memory(allocator, 2 * segments * sizeof(SegmentLines));
  int answer = kDeviceOutOfMemory;
  if (table->seeds_.data() != nullptr && table->limits_view_.data() != nullptr && table->views_.data() != nullptr) {
    answer = CopyToDevice(reinterpret_cast<uint64_t*>(table->seeds_.data()), spec.seeds.data(), segments, stream);
    if (answer == kCudaSuccess) {
      answer = CopyToDevice(reinterpret_cast<Limits*>(table->limits_view_.data()), spec.limits.data(), segments, stream);
    }
    if (answer == kCudaSuccess) answer = table->UploadSegments(stream);
  }
  if (answer != kCudaSuccess) {
    delete table;
    *made = nullptr;
  }
  return answer;
}

TableView FusedrecDeviceTable::View() const {
  return {rows_.Pointers(),
          Views(),
          ViewsOfCandidates(),
          LimitsView(),
          layout_,
          cold_layout_,
          {hot_.Pointers(), layout_.stride, chunk_bits_},
          {cold_.Pointers(), cold_layout_.stride, chunk_bits_},
          row_bytes(),
          chunk_bits_,
          IsMixed()};
}

InitialValues FusedrecDeviceTable::Initial() const {
  InitialValues initial{options_.distribution, options_.a, options_.b, reinterpret_cast<const uint64_t*>(seeds_.data()), {}};
  ForEachRule([](auto r) { static_assert(r.kSlots + r.kRowSlots <= kMostSlots); });
  for (int k = 0; k < layout_.wide_slots + layout_.scalar_slots; ++k) initial.slots[k] = SlotStart(rule_, k);
  return initial;
}

int FusedrecDeviceTable::UploadSegments(void* stream) {
  std::vector<SegmentLines> views;
  for (const Segment& segment : segments_) views.push_back(LinesOf(segment));
  for (const Segment& segment : segments_) views.push_back(LinesOf(segment.candidates));
  return CopyToDevice(reinterpret_cast<SegmentLines*>(views_.data()), views.data(), views.size(), stream);
}

int FusedrecDeviceTable::AllocateLines(KeyLines* now, int64_t more, Growth* growth) const {
  if (now->size + more <= 0) return kCudaSuccess;
  int64_t want = std::max<int64_t>(now->num_lines, 1);
  while (static_cast<double>(now->size + more) > kMaxLoad * kKeysPerLine * static_cast<double>(want)) want *= 2;
  // Removed keys leave marks that lengthen searches. Without memory for other lines, the marks stay.
  const bool worn = now->removed > now->num_lines;
  if (want == now->num_lines && !worn) return kCudaSuccess;
  KeyLines grown;
  grown.lines = Memory(allocator_, want * sizeof(Line));
  if (grown.lines.data() == nullptr) return want == now->num_lines ? kCudaSuccess : kDeviceOutOfMemory;
  grown.num_lines = want;
  growth->lines.emplace_back(now, std::move(grown));
  return kCudaSuccess;
}

void FusedrecDeviceTable::Chunks::Take(int64_t count) {
  const int64_t reused = std::min(count, free);
  free -= reused;
  next += count - reused;
}

int64_t FusedrecDeviceTable::Chunks::bytes() const {
  int64_t bytes = 0;
  for (const Memory& chunk : memory) bytes += chunk.bytes();
  return bytes;
}

int FusedrecDeviceTable::AllocateChunks(Chunks* now, int64_t bytes, int64_t more, Growth* growth) const {
  const int64_t beyond = now->next + std::max<int64_t>(more - now->free, 0);
  if (beyond > kDeviceTableMaxRows - 1) return kDeviceOutOfMemory;  // the last number says that there is none
  Chunks grown;
  const auto pointers = [&] { return static_cast<int64_t>(now->memory.size() + grown.memory.size()); };
  while (pointers() * chunk_rows() < beyond) {
    grown.memory.emplace_back(allocator_, bytes);
    if (grown.memory.back().data() == nullptr) return kDeviceOutOfMemory;
  }
  if (grown.memory.empty()) return kCudaSuccess;
  if (pointers() * static_cast<int64_t>(sizeof(char*)) > now->directory.bytes()) {
    grown.directory = Memory(allocator_, std::max<int64_t>(2 * pointers(), 16) * sizeof(char*));
    if (grown.directory.data() == nullptr) return kDeviceOutOfMemory;
  }
  growth->chunks.emplace_back(now, std::move(grown));
  return kCudaSuccess;
}

int FusedrecDeviceTable::Grow(Growth growth, void* stream) {
  for (auto& [keys, grown] : growth.lines) {
    KeyLines& now = *keys;
    FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(grown.lines.data(), 0, grown.lines.bytes(), stream));
    const SegmentLines to = LinesOf(grown);
    const int64_t places = now.num_lines * kKeysPerLine;
    if (places > 0) {
      FUSEDREC_LAUNCH(RehashKernel, BlocksFor(places, 256), 256, 0, stream,
                      reinterpret_cast<const Line*>(now.lines.data()), places, to);
    }
    now.lines = std::move(grown.lines);
    now.num_lines = grown.num_lines;
    now.removed = 0;
  }
  if (!growth.lines.empty()) FUSEDREC_RETURN_IF_CUDA_ERROR(UploadSegments(stream));
  for (auto& [chunks, grown] : growth.chunks) {
    for (Memory& chunk : grown.memory) chunks->memory.push_back(std::move(chunk));
    if (grown.directory.data() != nullptr) chunks->directory = std::move(grown.directory);
    std::vector<char*> begins;
    for (const Memory& chunk : chunks->memory) begins.push_back(chunk.data());
    char** const directory = reinterpret_cast<char**>(chunks->directory.data());
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(directory, begins.data(), begins.size(), stream));
  }
  return LastError();
}

int FusedrecDeviceTable::MakeRoom(const std::vector<int64_t>& more, const int64_t* uncounted, const Moves& moves,
                                  uint32_t clock, bool is_lookup, void* stream) {
  const Pins pins = PinsAt(clock, attempt_);
  std::vector<int64_t> removed(more.size(), 0), net = more;
  int64_t rows = 0;
  for (size_t s = 0; s < more.size(); ++s) {
    const int64_t max_rows = limits_[s].max_rows, excess = segments_[s].size + more[s] - max_rows;
    if (is_lookup && max_rows > 0 && excess > 0) {
      SelectScratch select(&allocator_);
      FUSEDREC_RETURN_IF_CUDA_ERROR(select.TakeFor(rows_.next, segments()));
      FUSEDREC_RETURN_IF_CUDA_ERROR(CountThatMayLeave(s, pins, select, &removed[s], stream));
      if (removed[s] < excess) {
        full_segment_ = static_cast<int64_t>(s);
        return kDeviceTableFull;
      }
      // Some more than needed, so that scans are rare.
      removed[s] = std::min(removed[s], excess + max_rows / 16);
    }
    net[s] -= removed[s];
    rows += net[s];
  }
  Growth growth;
  for (size_t s = 0; s < more.size(); ++s) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateLines(&segments_[s], net[s], &growth));
    if (uncounted[s] == 0) continue;
    FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateLines(&segments_[s].candidates, uncounted[s], &growth));
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateChunks(&rows_, ChunkBytes(row_bytes(), layout_.noted, chunk_bits_), rows, &growth));
  if (IsMixed()) {  // rows that leave by now are not counted on
    const int64_t fresh = std::accumulate(more.begin(), more.end(), int64_t{0});
    const int64_t into_hot = moves.promoted + moves.fresh_hot, into_cold = moves.demoted + fresh - moves.fresh_hot;
    FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateChunks(&hot_, PoolChunkBytes(layout_, chunk_bits_), into_hot, &growth));
    FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateChunks(&cold_, PoolChunkBytes(cold_layout_, chunk_bits_), into_cold, &growth));
  }
  // Allocates for all evictions before the first one, so that a failure changes nothing.
  if (std::any_of(removed.begin(), removed.end(), [](int64_t count) { return count > 0; })) {
    RemovedRows scratch(&allocator_);
    const int64_t most = *std::max_element(removed.begin(), removed.end());
    FUSEDREC_RETURN_IF_CUDA_ERROR(AllocateRemovedRows(most, rows_.next, &scratch));
    for (size_t s = 0; s < more.size(); ++s) {
      FUSEDREC_RETURN_IF_CUDA_ERROR(EvictWorst(s, removed[s], pins, scratch, stream));
    }
  }
  return Grow(std::move(growth), stream);
}

int fusedrec_table_clear(FusedrecDeviceTable* table, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  table->moved_at_ = int64_t{table->clock_} + table->options_.window;
  table->segments_ = std::vector<FusedrecDeviceTable::Segment>(table->segments());
  table->waiting_ = FusedrecDeviceTable::Waiting();
  for (auto* const chunks : {&table->rows_, &table->hot_, &table->cold_}) *chunks = FusedrecDeviceTable::Chunks();
  return table->UploadSegments(stream);
}

int FusedrecDeviceTable::Forget(void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  FUSEDREC_RETURN_IF_CUDA_ERROR(DropSums(stream));
  moved_at_ = int64_t{clock_} + options_.window;
  rows_.free = rows_.next = 0;
  for (Segment& segment : segments_) {
    segment.size = segment.removed = 0;
    FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(segment.lines.data(), 0, segment.lines.bytes(), stream));
  }
  return kCudaSuccess;
}

void fusedrec_table_statistics(FusedrecDeviceTable* table, int64_t* statistics) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  for (const FusedrecDeviceTable::Segment& segment : table->segments_) {
    for (const int64_t count :
         {segment.hits, segment.inserts, segment.evictions, segment.refused, segment.candidates.size}) {
      *statistics++ = count;
    }
  }
}

FusedrecTableTotals FusedrecDeviceTable::Size(int64_t* sizes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  FusedrecTableTotals totals{clock_, version_, 0, rows_.bytes() + hot_.bytes(), cold_.bytes(), cold_.size()};
  for (size_t s = 0; s < segments_.size(); ++s) {
    sizes[s] = segments_[s].size;
    totals.line_bytes += segments_[s].lines.bytes() + segments_[s].candidates.lines.bytes();
  }
  return totals;
}

int fusedrec_table_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                          FusedrecDeviceTable** table, void* stream) {
  TableSpec spec;
  if (!FusedrecDeviceTable::Read(*texts, &spec)) return kCudaInvalidValue;
  return FusedrecDeviceTable::Make(spec, texts->chunk_rows, *allocator, table, stream);
}

void fusedrec_table_destroy(FusedrecDeviceTable* table) { delete table; }

int fusedrec_table_find(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                        int64_t out_rows, uint32_t* found, void* stream) {
  return table->Find(*message, storage, rows, out_rows, found, false, stream);
}

int fusedrec_table_peek(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t storage, void* rows,
                        int64_t out_rows, void* stream) {
  return table->Find(*message, storage, rows, out_rows, nullptr, true, stream);
}

int64_t fusedrec_table_record_bytes(FusedrecDeviceTable* table) { return table->record_bytes(); }

int fusedrec_table_write_records(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t count,
                                 const char* records, void* stream) {
  std::vector<int64_t> counts(table->segments(), 0);
  if (segment < 0 || segment >= table->segments() || count < 0) return kCudaInvalidValue;
  counts[segment] = count;
  return table->WriteRecords(counts, ids, records, stream);
}

int64_t fusedrec_table_width(FusedrecDeviceTable* table) { return table->width(); }

void fusedrec_table_set_clock(FusedrecDeviceTable* table, int64_t clock, int64_t version) {
  table->SetClock(clock, version);
}

void fusedrec_table_size(FusedrecDeviceTable* table, int64_t* sizes, FusedrecTableTotals* totals) {
  *totals = table->Size(sizes);
}

int64_t fusedrec_table_full_segment(FusedrecDeviceTable* table) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  return table->full_segment_;
}
