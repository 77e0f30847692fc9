#include "hash_table/cpu/rows/row_store.h"

#include "common/scratch_file.h"

namespace fusedrec {

constexpr size_t kChunkBytes = size_t{16} << 20;  // roughly; a power of two of rows

absl::StatusOr<std::unique_ptr<RowPool>> RowPool::Make(const RowFormat& format, const std::string& folder) {
  int file = -1;
  if (!folder.empty()) {
    auto opened = OpenScratchFile(folder, "rows");
    if (!opened.ok()) return opened.status();
    file = *opened;
  }
  return std::unique_ptr<RowPool>(new RowPool(format, file));
}

RowPool::RowPool(const RowFormat& format, int file) : format_(format), file_(file) {
  for (chunk_bits_ = 10; (size_t{2} << chunk_bits_) * format.stride() <= kChunkBytes;) ++chunk_bits_;
  chunk_mask_ = (uint32_t{1} << chunk_bits_) - 1;
  chunks_ = std::vector<std::atomic<char*>>((kMaxRows >> chunk_bits_) + 1);
}

RowPool::~RowPool() {
  if (file_ >= 0) close(file_);
}

absl::Status RowPool::TakeBlock(uint32_t* first) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t next = next_.load(std::memory_order_relaxed);
  if (next >= kMaxRows) {
    return absl::ResourceExhaustedError(absl::StrCat("the embedding table holds ", kMaxRows,
                                                     " rows, the most of one rank. Use more ranks, or max_rows_per_rank."));
  }
  const size_t last_chunk = kMaxRows >> chunk_bits_, chunk = next >> chunk_bits_;
  while (pages_.size() <= std::min(chunk + 1, last_chunk)) {
    FUSEDREC_TRY(MapChunk(pages_.size()));
  }
  *first = next;
  next_.store(next + kBlockRows, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status RowPool::MapChunk(size_t chunk) {
  constexpr size_t kPage = 4096;
  const size_t bytes = ((size_t{1} << chunk_bits_) * format_.stride() + kPage - 1) / kPage * kPage;
  auto pages = file_ < 0 ? Pages::OfMemory(bytes) : Pages::OfFile(file_, chunk * bytes, bytes);
  if (!pages.ok()) return pages.status();
  chunks_[chunk].store(pages->data(), std::memory_order_release);
  pages_.push_back(*std::move(pages));
  return absl::OkStatus();
}

size_t RowPool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = 0;
  for (const Pages& pages : pages_) bytes += pages.bytes();
  return bytes;
}

absl::Status RowStore::Open(const TableSpec& spec) {
  const bool mixed = spec.hot_after > 0, tiered = spec.memory_budget > 0;
  const auto [wide, scalars] = SlotsOf(spec.rule);
  const RowFormat first(spec.storage, spec.dim, wide, scalars, spec.stochastic_rounding);
  const RowFormat cold(Storage::kFloat16, spec.dim, wide, scalars, spec.stochastic_rounding);
  auto memory = RowPool::Make(first, "");
  if (!memory.ok()) return memory.status();
  pools_[0] = *std::move(memory);
  fetch_bytes_[0] = sizeof(RowHeader) + first.layout().wide_offset;
  fetch_bytes_[1] = sizeof(RowHeader) + (mixed ? cold : first).layout().wide_offset;
  if (!mixed && !tiered) return absl::OkStatus();
  auto second = RowPool::Make(mixed ? cold : first, tiered ? spec.tier_folder : "");
  if (!second.ok()) return second.status();
  pools_[1] = *std::move(second);
  return absl::OkStatus();
}

absl::Status RowStore::Take(Spare* spare, int pool, uint32_t* handle) {
  std::vector<uint32_t>& free = spare->free[pool];
  if (free.empty()) {
    uint32_t first;
    FUSEDREC_TRY(pools_[pool]->TakeBlock(&first));
    for (uint32_t n = RowPool::kBlockRows; n-- > 0;) free.push_back(first + n);
  }
  *handle = free.back() | (pool == 0 ? 0 : kPoolBit);
  free.pop_back();
  size_[pool].fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

void RowStore::GiveBack(Spare* spare, uint32_t handle) {
  spare->given_back.push_back(handle);
  size_[PoolOf(handle)].fetch_sub(1, std::memory_order_relaxed);
}

void RowStore::Reuse(Spare* spare) {
  for (const uint32_t handle : spare->given_back) spare->free[PoolOf(handle)].push_back(handle & ~kPoolBit);
  spare->given_back.clear();
}

}  // namespace fusedrec
