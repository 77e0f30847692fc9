// Making a table and making room in it.
#include "hash_table/cuda/table_memory.h"

#include <memory>
#include <numeric>

namespace {

constexpr double kMaxLoad = 0.75;

// All keys of the old lines into the new, larger ones; a thread per place.
FUSEDREC_KERNEL RehashKernel(const Line* __restrict__ from, int64_t places, SegmentLines to) {
  const int64_t i = GlobalThread();
  if (i >= places) return;
  const Line& line = from[i / kKeysPerLine];
  const int place = static_cast<int>(i % kKeysPerLine);
  if ((line.meta >> place & 1) == 0) return;
  InsertKey(to.lines, to.mask, line.key[place], TableHash(line.key[place]), line.row[place]);
}

RowLayout LayoutOf(const TableOptions& options, const SlotCounts& slots, Storage storage) {
  RowLayout layout = RowLayout::Of(storage, options.dim, slots.wide, slots.scalar, options.stochastic_rounding, 0, 16);
  layout.noted = options.averaged;
  return layout;
}

}  // namespace

FusedrecDeviceTable::FusedrecDeviceTable(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator)
    : allocator_(allocator), options_(spec), limits_(spec.limits), rule_(spec.rule),
      layout_(LayoutOf(options_, SlotsOf(rule_), options_.storage)),
      cold_layout_(LayoutOf(options_, SlotsOf(rule_), IsMixed() ? Storage::kFloat16 : options_.storage)),
      segments_(spec.seeds.size()) {
  while (this->chunk_rows() < chunk_rows) ++chunk_bits_;
}

int FusedrecDeviceTable::Make(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator,
                              FusedrecDeviceTable** made, void* stream) {
  *made = nullptr;
  std::unique_ptr<FusedrecDeviceTable> table(new FusedrecDeviceTable(spec, chunk_rows, allocator));
  const int64_t segments = spec.seeds.size();
  FUSEDREC_TRY(table->seeds_.Allocate(allocator, segments));
  FUSEDREC_TRY(table->limits_view_.Allocate(allocator, segments));
  FUSEDREC_TRY(table->views_.Allocate(allocator, 2 * segments));
  FUSEDREC_TRY(CopyToDevice(table->seeds_.data(), spec.seeds.data(), segments, stream));
  FUSEDREC_TRY(CopyToDevice(table->limits_view_.data(), spec.limits.data(), segments, stream));
  FUSEDREC_TRY(table->UploadSegments(stream));
  *made = table.release();
  return kCudaSuccess;
}

TableView FusedrecDeviceTable::View() const {
  const PoolView hot{hot_.directory.data(), layout_.stride, chunk_bits_};
  const PoolView cold{cold_.directory.data(), cold_layout_.stride, chunk_bits_};
  return {rows_.directory.data(), views_.data(), ViewsOfCandidates(), limits_view_.data(), layout_, cold_layout_, hot, cold,
          row_bytes(), chunk_bits_, IsMixed()};
}

InitialValues FusedrecDeviceTable::Initial() const {
  InitialValues initial{options_.distribution, options_.a, options_.b, seeds_.data(), {}};
  ForEachRule([](auto r) { static_assert(r.kSlots + r.kRowSlots <= kMostSlots); });
  for (int k = 0; k < layout_.wide_slots + layout_.scalar_slots; ++k) initial.slots[k] = SlotStart(rule_, k);
  return initial;
}

int FusedrecDeviceTable::UploadSegments(void* stream) {
  std::vector<SegmentLines> views;
  for (const Segment& segment : segments_) views.push_back(segment.view());
  for (const Segment& segment : segments_) views.push_back(segment.candidates.view());
  return CopyToDevice(views_.data(), views.data(), views.size(), stream);
}

int FusedrecDeviceTable::AllocateLines(KeyLines* now, int64_t more, Growth* growth) const {
  if (now->size + more <= 0) return kCudaSuccess;
  int64_t want = std::max<int64_t>(now->lines.size(), 1);
  while (static_cast<double>(now->size + more) > kMaxLoad * kKeysPerLine * static_cast<double>(want)) want *= 2;
  // Removed keys leave marks that lengthen searches. Without memory for other lines, the marks stay.
  const bool worn = now->removed > now->lines.size();
  if (want == now->lines.size() && !worn) return kCudaSuccess;
  KeyLines grown;
  if (grown.lines.Allocate(allocator_, want) != kCudaSuccess) {
    return want == now->lines.size() ? kCudaSuccess : kDeviceOutOfMemory;
  }
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
  for (const Array<char>& chunk : memory) bytes += chunk.bytes();
  return bytes;
}

int FusedrecDeviceTable::AllocateChunks(Chunks* now, int64_t bytes, int64_t more, Growth* growth) const {
  const int64_t beyond = now->next + std::max<int64_t>(more - now->free, 0);
  if (beyond > kDeviceTableMaxRows - 1) return kDeviceOutOfMemory;  // the last number says that there is none
  Chunks grown;
  const auto pointers = [&] { return static_cast<int64_t>(now->memory.size() + grown.memory.size()); };
  while (pointers() * chunk_rows() < beyond) {
    FUSEDREC_TRY(grown.memory.emplace_back().Allocate(allocator_, bytes));
  }
  if (grown.memory.empty()) return kCudaSuccess;
  if (pointers() > now->directory.size()) {
    FUSEDREC_TRY(grown.directory.Allocate(allocator_, std::max<int64_t>(2 * pointers(), 16)));
  }
  growth->chunks.emplace_back(now, std::move(grown));
  return kCudaSuccess;
}

int FusedrecDeviceTable::Grow(Growth growth, void* stream) {
  for (auto& [keys, grown] : growth.lines) {
    KeyLines& now = *keys;
    FUSEDREC_TRY(Fill(grown.lines.data(), 0, grown.lines.bytes(), stream));
    const int64_t places = now.lines.size() * kKeysPerLine;
    FUSEDREC_FOR_EACH(RehashKernel, places, stream, now.lines.data(), places, grown.view());
    now.lines = std::move(grown.lines);
    now.removed = 0;
  }
  if (!growth.lines.empty()) FUSEDREC_TRY(UploadSegments(stream));
  for (auto& [chunks, grown] : growth.chunks) {
    for (Array<char>& chunk : grown.memory) chunks->memory.push_back(std::move(chunk));
    if (grown.directory.data() != nullptr) chunks->directory = std::move(grown.directory);
    std::vector<char*> begins;
    for (const Array<char>& chunk : chunks->memory) begins.push_back(chunk.data());
    FUSEDREC_TRY(CopyToDevice(chunks->directory.data(), begins.data(), begins.size(), stream));
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
      FUSEDREC_TRY(select.TakeFor(rows_.next, segments()));
      FUSEDREC_TRY(CountThatMayLeave(s, pins, select, &removed[s], stream));
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
    FUSEDREC_TRY(AllocateLines(&segments_[s], net[s], &growth));
    if (uncounted[s] == 0) continue;
    FUSEDREC_TRY(AllocateLines(&segments_[s].candidates, uncounted[s], &growth));
  }
  FUSEDREC_TRY(AllocateChunks(&rows_, ChunkBytes(row_bytes(), layout_.noted, chunk_bits_), rows, &growth));
  if (IsMixed()) {  // rows that leave by now are not counted on
    const int64_t fresh = std::accumulate(more.begin(), more.end(), int64_t{0});
    const int64_t into_hot = moves.promoted + moves.fresh_hot, into_cold = moves.demoted + fresh - moves.fresh_hot;
    FUSEDREC_TRY(AllocateChunks(&hot_, PoolChunkBytes(layout_, chunk_bits_), into_hot, &growth));
    FUSEDREC_TRY(AllocateChunks(&cold_, PoolChunkBytes(cold_layout_, chunk_bits_), into_cold, &growth));
  }
  // Allocates for all evictions before the first one, so that a failure changes nothing.
  if (std::any_of(removed.begin(), removed.end(), [](int64_t count) { return count > 0; })) {
    RemovedRows scratch(&allocator_);
    const int64_t most = *std::max_element(removed.begin(), removed.end());
    FUSEDREC_TRY(AllocateRemovedRows(most, rows_.next, &scratch));
    for (size_t s = 0; s < more.size(); ++s) {
      FUSEDREC_TRY(EvictWorst(s, removed[s], pins, scratch, stream));
    }
  }
  return Grow(std::move(growth), stream);
}

int fusedrec_table_clear(FusedrecDeviceTable* table, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  table->stale_until_ = table->clock_;
  table->segments_ = std::vector<FusedrecDeviceTable::Segment>(table->segments());
  table->waiting_ = FusedrecDeviceTable::Waiting();
  for (auto* const chunks : {&table->rows_, &table->hot_, &table->cold_}) *chunks = FusedrecDeviceTable::Chunks();
  return table->UploadSegments(stream);
}

int FusedrecDeviceTable::Forget(void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  FUSEDREC_TRY(DropSums(stream));
  stale_until_ = clock_;
  rows_.free = rows_.next = 0;
  for (Segment& segment : segments_) {
    segment.size = segment.removed = 0;
    FUSEDREC_TRY(Fill(segment.lines.data(), 0, segment.lines.bytes(), stream));
  }
  return kCudaSuccess;
}

void fusedrec_table_statistics(FusedrecDeviceTable* table, int64_t* statistics, FusedrecTableTotals* totals) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  *totals = {table->clock_, table->version_, table->record_bytes(), table->width(), table->full_segment_, 0,
             table->rows_.bytes() + table->hot_.bytes(), table->cold_.bytes(), table->cold_.size()};
  for (const FusedrecDeviceTable::Segment& of : table->segments_) {
    totals->line_bytes += of.lines.bytes() + of.candidates.lines.bytes();
    if (statistics == nullptr) continue;
    for (const int64_t count : {of.size, of.hits, of.inserts, of.evictions, of.refused, of.candidates.size}) {
      *statistics++ = count;
    }
  }
}

int fusedrec_table_create(const FusedrecTableTexts* texts, const FusedrecAllocator* allocator,
                          FusedrecDeviceTable** table, void* stream) {
  TableSpec spec;
  if (!FusedrecDeviceTable::Read(*texts, &spec)) return kCudaInvalidValue;
  return FusedrecDeviceTable::Make(spec, texts->chunk_rows, *allocator, table, stream);
}

void fusedrec_table_destroy(FusedrecDeviceTable* table) { delete table; }

int fusedrec_table_write_records(FusedrecDeviceTable* table, int64_t segment, const int64_t* ids, int64_t count,
                                 const char* records, void* stream) {
  std::vector<int64_t> splits(table->segments() + 1, 0);
  std::fill(splits.begin() + segment + 1, splits.end(), count);
  return table->WriteRecords(splits.data(), ids, records, stream);
}

void fusedrec_table_set_clock(FusedrecDeviceTable* table, int64_t clock, int64_t version) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  table->clock_ = static_cast<uint32_t>(clock);
  table->version_ = static_cast<uint32_t>(version);
  table->stale_until_ = clock;  // handles of before are of another clock
}
