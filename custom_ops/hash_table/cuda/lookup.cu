// Lookups; hash_table_cuda.h says how they go.
#include <algorithm>

#include "hash_table/cuda/hash_table_cuda.cuh"
#include "hash_table/cuda/table.h"

using namespace fusedrec;                // NOLINT
using namespace fusedrec::device_table;  // NOLINT

namespace {

struct LookupScratch {
  LookupScratch(void* memory, int64_t num_ids, bool has_admission) : carver(memory) {
    tiles = (num_ids + kNumberTile - 1) / kNumberTile;
    // The next three begin with all ones, which one fill writes.
    slots = carver.Take<uint32_t>(2 * num_ids);
    states = carver.Take<unsigned long long>(2 * tiles);
    next_tile = carver.Take<unsigned>(1);
    filled_bytes = carver.bytes();
    where = carver.Take<uint32_t>(num_ids);
    first = carver.Take<uint32_t>(num_ids);
    number = carver.Take<uint32_t>(num_ids);
    verdict = has_admission ? carver.Take<uint8_t>(num_ids) : nullptr;
  }
  Carver carver;
  int64_t tiles, filled_bytes;
  uint32_t *slots, *where, *first, *number;
  uint8_t* verdict;  // null: every id is admitted
  unsigned long long* states;
  unsigned* next_tile;
};

}  // namespace

int FusedrecDeviceTable::Receive(const FusedrecMessage& message, Received* received, void* stream) const {
  const int64_t segments = segments_.size(), ranks = message.ranks, runs = ranks * segments;
  if (ranks < 0 || runs > kDeviceTableMaxIds) return kCudaInvalidValue;
  std::vector<int64_t> source_begin(ranks + 1, 0);
  for (int64_t r = 0; r < ranks; ++r) {
    if (message.received_splits[r] < segments) return kCudaInvalidValue;
    source_begin[r + 1] = source_begin[r] + message.received_splits[r];
  }
  const int64_t num_ids = source_begin[ranks] - runs;
  if (num_ids > kDeviceTableMaxIds) return kCudaInvalidValue;
  int64_t *begins = nullptr, *run_begin = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    received->counts = carver.Take<Counts>(1);
    received->new_of = carver.Take<unsigned long long>(4 * segments);
    received->hits_of = received->new_of + segments;
    received->refused_of = received->hits_of + segments;
    received->uncounted_of = received->refused_of + segments;
    begins = carver.Take<int64_t>(ranks + 1);
    run_begin = carver.Take<int64_t>(runs + 1);
    return carver.bytes();
  };
  received->memory = Memory(allocator_, carve(nullptr));
  if (received->memory.data() == nullptr) return kDeviceOutOfMemory;
  carve(received->memory.data());
  received->view = {message.entries, run_begin, segments, runs, num_ids};
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(begins, source_begin.data(), ranks + 1, stream));
  const int64_t counters = reinterpret_cast<char*>(begins) - received->memory.data();
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(received->memory.data(), 0, counters, stream));
  FUSEDREC_LAUNCH(RunsKernel, BlocksFor(ranks, kWarps), kThreads, 0, stream, message.entries, begins, ranks, segments,
                  run_begin, received->counts);
  received->fingerprint = message.fingerprint;
  if (message.fingerprint != 0 && num_ids > 0) {
    FUSEDREC_LAUNCH(FingerprintKernel, BlocksFor(num_ids, kThreads), kThreads, 0, stream, received->view,
                    received->counts);
  }
  return LastError();
}

Memory FusedrecDeviceTable::AdmitMemory(int64_t num_ids, bool judges) const {
  return Memory(allocator_, LookupScratch(nullptr, num_ids, judges).carver.bytes());
}

int FusedrecDeviceTable::Admit(const Received& received, uint32_t clock, uint32_t version, bool is_lookup,
                               const Memory& scratch, int32_t* inverse, int64_t* handles, int64_t* num_rows,
                               void* stream) {
  const MessageView& view = received.view;
  const bool judges = is_lookup && HasAdmission();
  if (scratch.data() == nullptr) return kDeviceOutOfMemory;
  const LookupScratch at(scratch.data(), view.num_ids, judges);
  ++attempt_;
  if (view.num_ids > 0) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.slots, 0xff, at.filled_bytes, stream));
    FUSEDREC_LAUNCH(ProbeKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view, attempt_,
                    received.counts, static_cast<uint32_t>(2 * view.num_ids), at.slots, at.where);
    if (judges) Judge(received, at.slots, at.where, at.verdict, stream);
    FUSEDREC_LAUNCH(NumberKernel, static_cast<unsigned>(at.tiles), kThreads, 0, stream, View(), view, at.slots,
                    at.verdict, at.where, at.first, at.number, received.counts, received.new_of, received.hits_of, at.states,
                    at.next_tile);
    FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  }
  if (IsMixed()) CountMoves(received, at.where, at.first, clock, stream);
  // The counts, then, aligned to 256 bytes, by segment: new ids, known ids, refused ids, and refused ids without a count.
  const int64_t words = 32 + 4 * segments();
  std::vector<int64_t> counted(words);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(counted.data(), reinterpret_cast<int64_t*>(received.counts), words, stream));
  const int64_t fresh_rows = counted[1];
  const Moves moves{counted[3], counted[4], counted[5]};
  if (counted[2] != 0) return kCudaInvalidValue;
  if (received.fingerprint != 0 && static_cast<uint64_t>(counted[kFingerprintWord]) != received.fingerprint) {
    return kDeviceAbsent;
  }
  if (!is_lookup && counted[0] != view.num_ids) return kDeviceDoubled;
  const std::vector<int64_t> more(counted.begin() + 32, counted.begin() + 32 + segments());
  if (fresh_rows > 0 && is_lookup && refuses_new_rows_) return kDeviceAbsent;
  const int64_t* const refused = &counted[32 + 2 * segments()];
  const int64_t* const uncounted = refused + segments();
  const bool has_uncounted = std::any_of(uncounted, uncounted + segments(), [](int64_t count) { return count > 0; });
  if (fresh_rows > 0 || has_uncounted || moves.promoted > 0 || moves.demoted > 0) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(MakeRoom(more, uncounted, moves, clock, is_lookup, stream));
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(MoveRows(received, at.where, at.first, moves, clock, version, stream));
  const FreshRows fresh = rows_.Fresh();
  if (view.num_ids > 0) {
    FUSEDREC_LAUNCH(CommitKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view, fresh, clock,
                    version, is_lookup, at.where, at.first, at.number, inverse, handles);
  }
  if (judges && view.num_ids > 0) CountRefused(view, at.where, at.first, at.verdict, stream);
  if (fresh_rows > 0) {
    if (IsMixed()) PlaceFresh(received, at.where, at.first, fresh, fresh_rows, moves.fresh_hot, stream);
    FUSEDREC_LAUNCH(InitialRowsKernel, BlocksFor(fresh_rows * ((options_.dim + 3) / 4), kThreads), kThreads, 0, stream,
                    View(), fresh, Initial(), fresh_rows);
  }
  rows_.Take(fresh_rows);
  for (int64_t s = 0; s < segments(); ++s) {
    segments_[s].size += more[s];
    if (is_lookup) {
      segments_[s].inserts += more[s];
      segments_[s].hits += counted[32 + segments() + s];
      segments_[s].refused += refused[s];
    }
    if (judges && limits_[s].admission_count > 1) {
      segments_[s].candidates.size += uncounted[s] - more[s];
      segments_[s].candidates.removed += more[s];
    }
  }
  *num_rows = counted[0];
  return LastError();
}

int FusedrecDeviceTable::Lookup(const FusedrecMessage& message, int64_t storage, void* rows, int64_t out_rows,
                                int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Received received;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Receive(message, &received, stream));
  const int64_t num_ids = received.view.num_ids;
  if ((rows != nullptr && out_rows < num_ids) || storage < 0 || storage > 2) return kCudaInvalidValue;
  if (clock_ >= kMostClock) return kDeviceClockEnds;
  const uint32_t clock = clock_ + 1, version = version_ + 1;
  if (ExpiresAt(clock)) {
    Counts counts;  // a message that does not fit changes nothing
    FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counts, received.counts, 1, stream));
    if (counts.bad != 0) return kCudaInvalidValue;
    FUSEDREC_RETURN_IF_CUDA_ERROR(TakeExpiredOut(clock, stream));
  }
  const Memory scratch = AdmitMemory(num_ids, HasAdmission());
  FUSEDREC_RETURN_IF_CUDA_ERROR(Admit(received, clock, version, true, scratch, inverse, handles, num_rows, stream));
  clock_ = clock;
  version_ = version;
  FUSEDREC_RETURN_IF_CUDA_ERROR(HalveCandidates(received.uncounted_of, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Gather(nullptr, handles, inverse, num_ids, storage, rows, out_rows, stream));
  if (HasAdmission() && rows != nullptr) {
    GatherInitial(received.view, Initial(), nullptr, handles, inverse, storage, rows, stream);
  }
  return LastError();
}

void FusedrecDeviceTable::GatherInitial(const MessageView& view, const InitialValues& initial, const uint32_t* where,
                                        const int64_t* handles, const int32_t* inverse, int64_t storage, void* rows,
                                        void* stream) const {
  const int64_t blocks = view.num_ids * ((options_.dim + 3) / 4);
  if (blocks == 0) return;
  FUSEDREC_LAUNCH(GatherInitialKernel, LoopBlocks(blocks, kThreads), kThreads, 0, stream, View(), view, initial, where,
                  handles, inverse, static_cast<Storage>(storage), rows);
}

int FusedrecDeviceTable::Find(const FusedrecMessage& message, int64_t storage, void* rows, int64_t out_rows,
                              uint32_t* found, bool peeks, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Received received;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Receive(message, &received, stream));
  const MessageView& view = received.view;
  if (storage < 0 || storage > 2 || (rows != nullptr && out_rows < view.num_ids)) return kCudaInvalidValue;
  Memory memory;
  if (found == nullptr) {
    memory = Memory(allocator_, view.num_ids * sizeof(uint32_t));
    if (memory.data() == nullptr) return kDeviceOutOfMemory;
    found = reinterpret_cast<uint32_t*>(memory.data());
  }
  const HasExpired has_expired{PinsAt(clock_ + 1, kNoAttempt), peeks && ExpiresAt(clock_ + 1) ? LimitsView() : nullptr};
  if (view.num_ids > 0) {
    FUSEDREC_LAUNCH(FindKernel, BlocksFor(view.num_ids, kThreads), kThreads, 0, stream, View(), view, received.counts,
                    has_expired, found);
  }
  Counts counts;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&counts, received.counts, 1, stream));
  if (counts.bad != 0) return kCudaInvalidValue;
  if (rows == nullptr) return LastError();
  FUSEDREC_RETURN_IF_CUDA_ERROR(Gather(found, nullptr, nullptr, view.num_ids, storage, rows, out_rows, stream));
  InitialValues unknown = Initial();
  if (options_.unknown_zeros && !peeks) unknown = {Distribution::kConstant, 0.0, 0.0, unknown.seeds, 0.0f};
  GatherInitial(view, unknown, found, nullptr, nullptr, storage, rows, stream);
  return LastError();
}

int FusedrecDeviceTable::Gather(const uint32_t* where, const int64_t* handles, const int32_t* inverse, int64_t num_ids,
                                int64_t storage, void* rows, int64_t out_rows, void* stream) const {
  const Storage to = static_cast<Storage>(storage);
  if (out_rows == 0) return kCudaSuccess;
  if (to != layout_.storage || IsMixed()) {
    const int64_t numbers = out_rows * options_.dim;
    FUSEDREC_LAUNCH(GatherConvertedKernel, LoopBlocks(numbers, kThreads), kThreads, 0, stream, View(), where, handles,
                    inverse, num_ids, numbers, to, rows);
    return LastError();
  }
  const int64_t row_bytes = options_.dim * BytesOf(to);
  const auto gather = [&](auto word) {
    using Word = decltype(word);
    const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word)), out_words = out_rows * row_words;
    FUSEDREC_LAUNCH(GatherKernel<Word>, LoopBlocks(out_words, kThreads), kThreads, 0, stream, View(), where, handles,
                    inverse, num_ids, row_words, out_words, static_cast<Word*>(rows));
    return LastError();
  };
  return row_bytes % 16 == 0 ? gather(uint4{}) : row_bytes % 4 == 0 ? gather(uint32_t{}) : gather(uint16_t{});
}
