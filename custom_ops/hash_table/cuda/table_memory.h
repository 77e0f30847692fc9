// The host side of a table on a GPU (hash_table_cuda.h). The mutex admits one call at a time. All work of a table is on one
// stream, so each call sees the effects of the previous.
#pragma once

#include <algorithm>
#include <mutex>

#include "common/launcher.cuh"
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/hash_table_cuda.h"
#include "hash_table/cuda/rows.cuh"
#include "hash_table/options.h"

namespace fusedrec::device_table {

template <typename T>
class Array {
 public:
  Array() = default;
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(from_, other.from_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Array() {
    if (data_ != nullptr) from_.release(from_.context, data_);
  }
  // Replaces it, once there is memory for both.
  int Allocate(const FusedrecAllocator& from, int64_t size) {
    Array larger;
    larger.from_ = from;
    larger.data_ = static_cast<T*>(from.allocate(from.context, std::max<int64_t>(size * sizeof(T), 256)));
    if (larger.data_ == nullptr) return kCudaOutOfMemory;
    larger.size_ = size;
    *this = std::move(larger);
    return kCudaSuccess;
  }
  T* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * sizeof(T); }

 private:
  FusedrecAllocator from_{};
  T* data_ = nullptr;
  int64_t size_ = 0;
};

struct GradientColumns;  // update.cu

// Memory of steps 2 to 5 of a lookup.
struct AdmitScratch : ScratchMemory {
  using ScratchMemory::ScratchMemory;
  int TakeFor(int64_t num_ids, bool judges);

  int64_t tiles = 0;
  uint32_t* slots = nullptr;  // this and the next two begin with all ones, which one fill writes
  unsigned long long* states = nullptr;
  unsigned* next_tile = nullptr;
  uint32_t *where = nullptr, *first = nullptr, *number = nullptr;
  uint8_t* verdict = nullptr;  // null: every id is admitted
};

// Memory of a pass over at most num_rows rows, of any segment.
struct SelectScratch : ScratchMemory {
  using ScratchMemory::ScratchMemory;
  int TakeFor(int64_t num_rows, int64_t segments);

  int64_t tiles = 0;
  unsigned long long* states = nullptr;  // this and the next begin with all ones
  unsigned* next_tile = nullptr;
  unsigned long long* selected = nullptr;  // [1 + segments + 2]
};

struct Search;  // select.cuh

// A message's runs on the device, and its views.
struct Received : ScratchMemory {
  using ScratchMemory::ScratchMemory;

  MessageView view;
  Counts* counts;              // device
  // Device, [segments] each, after counts. The last two: ids that admission refuses, and the ones among them not
  // counted before.
  unsigned long long *new_of, *hits_of, *refused_of, *uncounted_of;
  const char* records = nullptr;  // device; of an import
  uint64_t fingerprint = 0;       // that the message must have; 0: any
};

}  // namespace fusedrec::device_table

using namespace fusedrec;                // NOLINT: for the sources of this folder
using namespace fusedrec::device_table;  // NOLINT

struct FusedrecDeviceTable {
  static bool Read(const FusedrecTableTexts& texts, TableSpec* spec) {
    return ReadTables({texts.texts, texts.texts + texts.segments}, kOnDevice, spec).empty();
  }
  static int Make(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator,
                  FusedrecDeviceTable** made, void* stream);
  int64_t segments() const { return segments_.size(); }
  int64_t record_bytes() const { return RecordLayout(layout_).bytes(); }
  // Distinct ids (device), grouped by segment: splits [segments + 1], host.
  int WriteRecords(const int64_t* splits, const int64_t* ids, const char* records, void* stream);
  int64_t width() const { return layout_.numbers(); }  // of a row and its slots
  // The needs of a batch buffer (buffer.cu): all rows forgotten, whose memory stays; lookups that make no row; rows of
  // another table of the same spec in the place of those of equal keys; records of rows (device; null: of the first
  // `count`), each at its place (device; null: one after the other).
  int Forget(void* stream);
  void RefuseNewRows() { refuses_new_rows_ = true; }
  void SetVersion(int64_t version) {
    std::lock_guard<std::mutex> lock(mutex_);
    version_ = static_cast<uint32_t>(version);
  }
  int RefreshFrom(const FusedrecDeviceTable& newer, void* stream);
  int ReadRecordsOf(const int64_t* rows, const int64_t* places, int64_t count, char* records, void* stream) const;
  int64_t num_rows() const { return rows_.next; }  // that were ever there: all of them, without removals

  // Chunks of rows, or of places of a pool, and how many of them nobody has.
  struct Chunks {
    std::vector<Array<char>> memory;
    Array<char*> directory;  // with room for more
    int64_t free = 0;        // height of the stack
    int64_t next = 0;        // the first that nobody ever had

    int64_t size() const { return next - free; }
    int64_t bytes() const;
    FreshRows Fresh() const { return {free, static_cast<uint32_t>(next)}; }
    void Take(int64_t count);  // the first ones of Fresh()
  };
  struct KeyLines {
    Array<Line> lines;
    int64_t size = 0;
    int64_t removed = 0;  // since the lines were built: marks that nothing needs any more stay until then

    SegmentLines view() const { return {lines.data(), static_cast<uint64_t>(lines.size() - 1)}; }
  };
  struct Segment : KeyLines {
    KeyLines candidates;  // ids without a row; lines hold the lookups that brought them
    int64_t hits = 0, inserts = 0, evictions = 0, refused = 0;
    // Ids that left since ForgetTombstones, with repeats; in host memory, so that they take none from rows.
    std::vector<int64_t> left;
    std::vector<LeftRow> unsynced;  // rows that left since TakeUnsynced
  };
  struct Waiting {
    Array<uint32_t> sum_of_row;
    Array<int64_t> rows;
    Array<float> sums;
    int64_t count = 0;   // of sums
    uint32_t since = 0;  // clock of the first lookup whose gradients wait; 0: none do

    SumsView view() const { return {sum_of_row.data(), rows.data(), sums.data()}; }
  };
  // Memory of passes that take rows out, one after the other.
  struct RemovedRows : SelectScratch {
    using SelectScratch::SelectScratch;

    Search* search;
    unsigned* bins;              // [256], after search
    LeftRow* left = nullptr;     // of each; null where no one asks for them
    bool replicas_know = false;  // whether the rows leave all replicas
  };
  // Ids grouped by segment as a message of one source, and memory for their rows.
  struct Imported : Received {
    using Received::Received;

    int64_t* handles;
    int32_t* inverse;
    unsigned* last;
  };
  struct Grouped : ScratchMemory {
    using ScratchMemory::ScratchMemory;

    GroupedIds view;
    uint32_t* found;
    unsigned long long* absent_of;  // device, [segments]
  };
  // Lines and chunks that a lookup needs in addition.
  struct Growth {
    std::vector<std::pair<KeyLines*, KeyLines>> lines;  // to replace
    std::vector<std::pair<Chunks*, Chunks>> chunks;     // to extend, and by what
  };
  // Rows of a message that move between the pools of a mixed table, and new rows of its hot pool.
  struct Moves {
    int64_t promoted = 0, demoted = 0, fresh_hot = 0;
  };

  FusedrecDeviceTable(const TableSpec& spec, int64_t chunk_rows, const FusedrecAllocator& allocator);
  int Receive(const FusedrecMessage& message, Received* received, void* stream) const;
  // Allocates for `more` rows, or places, of these bytes.
  int AllocateChunks(Chunks* now, int64_t bytes, int64_t more, Growth* growth) const;
  int AllocateLines(KeyLines* now, int64_t more, Growth* growth) const;
  // Takes the memory over: rehashes lines, extends the directories of chunks. Cannot run out of memory any more.
  int Grow(Growth growth, void* stream);
  // Room for new ids, all of it or none, by evictions where max_rows asks for them (`is_lookup`: an import is not held to
  // it). uncounted: ids by segment that admission counts for the first time.
  int MakeRoom(const std::vector<int64_t>& more, const int64_t* uncounted, const Moves& moves, uint32_t clock,
               bool is_lookup, void* stream);
  // Steps 2 to 5 of a lookup. The caller sets clock and version afterwards.
  int Admit(const Received& received, uint32_t clock, uint32_t version, bool is_lookup, const AdmitScratch& at,
            int32_t* inverse, int64_t* handles, int64_t* num_rows, void* stream);

  // Steps of a mixed table in Admit (mixed.cu). received.counts gets the moves.
  void CountMoves(const Received& received, const AdmitScratch& at, uint32_t clock, void* stream) const;
  int MoveRows(const Received& received, const AdmitScratch& at, const Moves& moves, uint32_t clock, uint32_t version,
               void* stream);
  void PlaceFresh(const Received& received, const AdmitScratch& at, const FreshRows& fresh, int64_t fresh_rows,
                  int64_t fresh_hot, void* stream);
  bool IsMixed() const { return options_.hot_after > 0; }
  bool MayDemoteAt(uint32_t clock) const;

  // For passes over num_rows rows that take out at most `most` each.
  int AllocateRemovedRows(int64_t most, int64_t num_rows, RemovedRows* removed) const;
  template <typename Wanted, typename MakeDoWith>
  int Select(const Wanted& wanted, const MakeDoWith& make_do_with, const SelectScratch& at,
             std::vector<int64_t>* counts, void* stream) const;
  template <typename Wanted>
  int Count(const Wanted& wanted, const SelectScratch& at, int64_t* count, void* stream) const;
  template <typename Wanted>
  int TakeRowsOut(const Wanted& wanted, int64_t stale_until, bool evicted, const RemovedRows& removed, int64_t* gone,
                  void* stream);
  int CountThatMayLeave(int64_t segment, const Pins& pins, const SelectScratch& select, int64_t* count,
                        void* stream) const;
  // Takes out the `count` rows that may leave and rank lowest; there are that many.
  int EvictWorst(int64_t segment, int64_t count, const Pins& pins, const RemovedRows& removed, void* stream);
  int TakeExpiredOut(uint32_t clock, void* stream);
  // rows: of each id in these lines (device), kNowhere without one.
  int FindRows(const SegmentLines* lines, const std::vector<int64_t>& ids, std::vector<uint32_t>* rows,
               void* stream) const;
  // Steps of a lookup with admission: verdicts before anything changes, then the counts; Halve at its end.
  bool HasAdmission() const {
    return AnyLimits([](const Limits& limits) { return limits.admission_count > 1; });
  }
  void Judge(const Received& received, const AdmitScratch& at, void* stream) const;
  void CountRefused(const MessageView& view, const AdmitScratch& at, void* stream) const;
  // Halves the counts of a segment until it counts at most its max_candidates ids. forgotten: device, for one number.
  int HalveCandidates(unsigned long long* forgotten, void* stream);
  const SegmentLines* ViewsOfCandidates() const { return views_.data() + segments_.size(); }
  int Gather(const uint32_t* where, const int64_t* handles, const int32_t* inverse, int64_t num_ids, int64_t storage,
             void* rows, int64_t out_rows, void* stream) const;
  // Initial values for the ids without a row among `where`, or among handles[inverse].
  void GatherInitial(const MessageView& view, const InitialValues& initial, const uint32_t* where,
                     const int64_t* handles, const int32_t* inverse, int64_t storage, void* rows, void* stream) const;
  int ReceiveGrouped(const int64_t* ids, const int64_t* splits, Imported* imported, void* stream) const;
  int FindGrouped(const int64_t* ids, const int64_t* splits, Grouped* grouped, void* stream) const;
  int UploadSegments(void* stream);
  // Checks that handles name rows of the table and inverse names handles. *facts describes the handles, with an inverse
  // those of one lookup, each once, the gradients, and the sums that sum_of_row gives (null: none). attempt: a new one,
  // which touches the rows; kNoAttempt without an inverse.
  int CheckHandles(const FusedrecGradients& in, const uint32_t* sum_of_row, uint32_t attempt, HandleFacts* facts,
                   void* stream) const;
  // Launches the rule on the rows of handles; begin, left_out and num_left_out as UpdateKernel has them.
  void Train(const int64_t* handles, int64_t num_rows, const int32_t* begin, const GradientColumns& grads,
             const Step& step, int32_t* left_out, unsigned* num_left_out, void* stream) const;
  bool SumsCoverRows() const { return waiting_.sum_of_row.size() >= rows_.next; }
  // Allocates for `more` sums beside the first `kept`. GrowSums takes the memory over and numbers the rows of handles.
  int AllocateSums(int64_t kept, int64_t more, Waiting* grown) const;
  int GrowSums(Waiting grown, const int64_t* handles, int64_t more, void* stream);
  int DropSums(void* stream);
  Pins PinsAt(uint32_t clock, uint32_t attempt) const { return {clock, attempt, window_, waiting_.since}; }

  TableView View() const;
  InitialValues Initial() const;
  template <typename Condition>
  bool AnyLimits(const Condition& condition) const {
    return std::any_of(limits_.begin(), limits_.end(), condition);
  }
  bool ExpiresAt(uint32_t clock) const {
    return AnyLimits([=](const Limits& limits) { return !limits.ExpiredAt(clock).empty(); });
  }
  int64_t chunk_rows() const { return int64_t{1} << chunk_bits_; }
  // Bytes of a row in rows_: itself, or its place.
  int row_bytes() const { return IsMixed() ? static_cast<int>(sizeof(uint32_t)) : layout_.stride; }

  mutable std::mutex mutex_;
  const FusedrecAllocator allocator_;
  const TableOptions options_;
  const std::vector<Limits> limits_;  // by segment
  const AnyRule rule_;
  const RowLayout layout_, cold_layout_;  // as in TableView
  int chunk_bits_ = 0;
  std::vector<Segment> segments_;
  Chunks rows_;
  Chunks hot_, cold_;          // places of a mixed table
  Array<uint64_t> seeds_;      // [segments]
  Array<Limits> limits_view_;  // [segments]
  Array<SegmentLines> views_;  // [segments], then the candidates'
  uint32_t clock_ = 0, version_ = 0;
  int64_t full_segment_ = 0;  // the segment that kDeviceTableFull is about
  int64_t window_ = 1;        // of the latest lookup
  int64_t stale_until_ = -1;  // clock of the latest lookup with rows that may have left or moved
  bool refuses_new_rows_ = false;
  Waiting waiting_;
  // Lookups and updates begun: tells the touches of a failed lookup from the touches of the next. An update touches its
  // rows, too, so that it meets a row that comes twice.
  uint32_t attempt_ = 0;
};
