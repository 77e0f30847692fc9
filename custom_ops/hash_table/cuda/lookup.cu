// Lookups; hash_table_cuda.h says how they go.

#include "hash_table/cuda/hash_table_cuda.cuh"
#include "hash_table/cuda/table_memory.h"

int AdmitScratch::TakeFor(int64_t num_ids, bool judges) {
  tiles = (num_ids + kNumberTile - 1) / kNumberTile;
  FUSEDREC_TRY(Take({{&slots, 2 * num_ids}, {&states, 2 * tiles}, {&next_tile, 1}, {&where, num_ids}, {&first, num_ids},
                     {&number, num_ids}, {&verdict, judges ? num_ids : 0}}));
  if (!judges) verdict = nullptr;
  return kCudaSuccess;
}

int FusedrecDeviceTable::Receive(const FusedrecMessage& message, Received* received, void* stream) const {
  const int64_t segments = segments_.size(), ranks = message.ranks, runs = ranks * segments;
  if (runs > kDeviceTableMaxIds) return kCudaInvalidValue;
  std::vector<int64_t> source_begin(ranks + 1, 0);
  for (int64_t r = 0; r < ranks; ++r) source_begin[r + 1] = source_begin[r] + message.received_splits[r];
  const int64_t num_ids = source_begin[ranks] - runs;
  if (num_ids > kDeviceTableMaxIds) return kCudaInvalidValue;
  int64_t *begins, *run_begin;
  FUSEDREC_TRY(received->Take({{&received->counts, 1}, {&received->new_of, 4 * segments}, {&begins, ranks + 1},
                               {&run_begin, runs + 1}}));
  received->hits_of = received->new_of + segments;
  received->refused_of = received->hits_of + segments;
  received->uncounted_of = received->refused_of + segments;
  received->view = {message.entries, run_begin, segments, runs, num_ids};
  FUSEDREC_TRY(CopyToDevice(begins, source_begin.data(), ranks + 1, stream));
  FUSEDREC_TRY(Fill(received->counts, 0, BytesBetween(received->counts, begins), stream));
  FUSEDREC_LAUNCH(RunsKernel, BlocksFor(ranks, kWarps), kThreads, 0, stream, message.entries, begins, ranks, segments,
                  run_begin, received->counts);
  received->fingerprint = message.fingerprint;
  if (message.fingerprint != 0) {
    FUSEDREC_FOR_EACH(FingerprintKernel, num_ids, stream, received->view, received->counts);
  }
  return LastError();
}

int FusedrecDeviceTable::Admit(const Received& received, uint32_t clock, uint32_t version, bool is_lookup,
    const AdmitScratch& at, int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream) {
  const MessageView& view = received.view;
  const bool judges = is_lookup && HasAdmission();
  ++attempt_;
  if (view.num_ids > 0) {
    FUSEDREC_TRY(Fill(at.slots, 0xff, BytesBetween(at.slots, at.where), stream));
    FUSEDREC_FOR_EACH(ProbeKernel, view.num_ids, stream, View(), view, attempt_, received.counts,
                      static_cast<uint32_t>(2 * view.num_ids), at.slots, at.where);
    if (judges) Judge(received, at, stream);
    FUSEDREC_LAUNCH(NumberKernel, static_cast<unsigned>(at.tiles), kThreads, 0, stream, View(), view, at.slots,
                    at.verdict, at.where, at.first, at.number, received.counts, received.new_of, received.hits_of,
                    at.states, at.next_tile);
    FUSEDREC_TRY(LastError());
  }
  if (IsMixed()) CountMoves(received, at, clock, stream);
  // The counts, then, aligned to 256 bytes, by segment: new ids, known ids, refused ids, and refused ids without a count.
  const int64_t words = 32 + 4 * segments();
  std::vector<int64_t> counted(words);
  FUSEDREC_TRY(CopyToHost(counted.data(), reinterpret_cast<int64_t*>(received.counts), words, stream));
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
    FUSEDREC_TRY(MakeRoom(more, uncounted, moves, clock, is_lookup, stream));
  }
  FUSEDREC_TRY(MoveRows(received, at, moves, clock, version, stream));
  const FreshRows fresh = rows_.Fresh();
  FUSEDREC_FOR_EACH(CommitKernel, view.num_ids, stream, View(), view, fresh, clock, version, is_lookup, at.where,
                    at.first, at.number, inverse, handles);
  if (judges) CountRefused(view, at, stream);
  if (fresh_rows > 0) {
    if (IsMixed()) PlaceFresh(received, at, fresh, fresh_rows, moves.fresh_hot, stream);
    FUSEDREC_FOR_EACH(InitialRowsKernel, fresh_rows * ((options_.dim + 3) / 4), stream, View(), fresh, Initial(),
                      fresh_rows);
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

int fusedrec_table_lookup(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t window, int64_t storage,
                          void* rows, int64_t out_rows, int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  Received received(&table->allocator_);
  FUSEDREC_TRY(table->Receive(*message, &received, stream));
  const int64_t num_ids = received.view.num_ids;
  if (table->clock_ >= kMostClock) return kDeviceClockEnds;
  table->window_ = window;
  const uint32_t clock = table->clock_ + 1, version = table->version_ + 1;
  if (table->ExpiresAt(clock)) {
    Counts counts;  // a message that does not fit changes nothing
    FUSEDREC_TRY(CopyToHost(&counts, received.counts, 1, stream));
    if (counts.bad != 0) return kCudaInvalidValue;
    FUSEDREC_TRY(table->TakeExpiredOut(clock, stream));
  }
  AdmitScratch scratch(&table->allocator_);
  FUSEDREC_TRY(scratch.TakeFor(num_ids, table->HasAdmission()));
  FUSEDREC_TRY(table->Admit(received, clock, version, true, scratch, inverse, handles, num_rows, stream));
  table->clock_ = clock;
  table->version_ = version;
  FUSEDREC_TRY(table->HalveCandidates(received.uncounted_of, stream));
  FUSEDREC_TRY(table->Gather(nullptr, handles, inverse, num_ids, storage, rows, out_rows, stream));
  if (table->HasAdmission() && rows != nullptr) {
    table->GatherInitial(received.view, table->Initial(), nullptr, handles, inverse, storage, rows, stream);
  }
  return LastError();
}

void FusedrecDeviceTable::GatherInitial(const MessageView& view, const InitialValues& initial, const uint32_t* where,
    const int64_t* handles, const int32_t* inverse, int64_t storage, void* rows, void* stream) const {
  const int64_t blocks = view.num_ids * ((options_.dim + 3) / 4);
  FUSEDREC_LOOP(GatherInitialKernel, blocks, stream, View(), view, initial, where, handles, inverse,
                static_cast<Storage>(storage), rows);
}

int fusedrec_table_find(FusedrecDeviceTable* table, const FusedrecMessage* message, int64_t window, int64_t storage,
                        void* rows, int64_t out_rows, uint32_t* found, void* stream) {
  std::lock_guard<std::mutex> lock(table->mutex_);
  Received received(&table->allocator_);
  FUSEDREC_TRY(table->Receive(*message, &received, stream));
  const MessageView& view = received.view;
  if (found == nullptr) FUSEDREC_TRY(received.Take({{&found, view.num_ids}}));
  const uint32_t clock = table->clock_ + 1;
  const bool expires = window > 0 && table->ExpiresAt(clock);
  Pins pins = table->PinsAt(clock, kNoAttempt);
  pins.window = window;
  const HasExpired has_expired{pins, expires ? table->limits_view_.data() : nullptr};
  FUSEDREC_FOR_EACH(FindKernel, view.num_ids, stream, table->View(), view, received.counts, has_expired, found);
  Counts counts;
  FUSEDREC_TRY(CopyToHost(&counts, received.counts, 1, stream));
  if (counts.bad != 0) return kCudaInvalidValue;
  if (rows == nullptr) return LastError();
  FUSEDREC_TRY(table->Gather(found, nullptr, nullptr, view.num_ids, storage, rows, out_rows, stream));
  InitialValues unknown = table->Initial();
  if (table->options_.unknown_zeros && window == 0) unknown = {Distribution::kConstant, 0.0, 0.0, unknown.seeds, 0.0f};
  table->GatherInitial(view, unknown, found, nullptr, nullptr, storage, rows, stream);
  return LastError();
}

int FusedrecDeviceTable::Gather(const uint32_t* where, const int64_t* handles, const int32_t* inverse, int64_t num_ids,
                                int64_t storage, void* rows, int64_t out_rows, void* stream) const {
  const Storage to = static_cast<Storage>(storage);
  if (out_rows == 0) return kCudaSuccess;
  if (to != layout_.storage || IsMixed()) {
    const int64_t numbers = out_rows * options_.dim;
    FUSEDREC_LOOP(GatherConvertedKernel, numbers, stream, View(), where, handles, inverse, num_ids, numbers, to, rows);
    return LastError();
  }
  const int64_t row_bytes = options_.dim * BytesOf(to);
  const auto gather = [&](auto word) {
    using Word = decltype(word);
    const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word)), out_words = out_rows * row_words;
    FUSEDREC_LOOP(GatherKernel<Word>, out_words, stream, View(), where, handles, inverse, num_ids, row_words, out_words,
                  static_cast<Word*>(rows));
    return LastError();
  };
  return row_bytes % 16 == 0 ? gather(uint4{}) : row_bytes % 4 == 0 ? gather(uint32_t{}) : gather(uint16_t{});
}
