// The contracts of the small classes that HashTable composes: AdmissionFilter, ChangeLog, TrainedIds, RunningLookups,
// PinnedRows, and the choice of victims.
#include <map>
#include <set>
#include <vector>

#include "check.h"
#include "hash_table/cpu/parts/trained_ids.h"
#include "hash_table/cpu/parts/victims.h"
#include "hash_table/cpu/rows/admission_filter.h"
#include "hash_table/cpu/rows/change_log.h"
#include "hash_table/cpu/rows/pinned_rows.h"
#include "hash_table/cpu/rows/running_lookups.h"

namespace fusedrec {
namespace {

std::map<int64_t, uint32_t> CountsOf(const AdmissionFilter& filter) {
  std::map<int64_t, uint32_t> counts;
  filter.ForEach([&](int64_t id, uint32_t count) { counts[id] = count; });
  return counts;
}

void AnIdIsAdmittedAtTheThreshold() {
  AdmissionFilter filter(3, 0.0);
  for (const int64_t id : {7, 7, -1}) {
    CHECK(!filter.Admits(id));
    filter.Count(id);
  }
  CHECK(filter.Admits(7));
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{-1, 1}, {7, 2}}), "a question counts nothing");
  filter.Forget(7);
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{-1, 1}}), "an admitted id has no count");
  CHECK_OK(filter.Set(-1, 2));
  CHECK(filter.Admits(-1));
}

void HalvingForgetsTheIdsThatCameOnce() {
  AdmissionFilter filter(100, 0.0);
  CHECK_OK(filter.Set(1, 1));
  CHECK_OK(filter.Set(2, 2));
  CHECK_OK(filter.Set(3, 9));
  filter.Halve();
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{2, 1}, {3, 4}}));
  CHECK(!filter.Admits(4));
  filter.Count(4);
  filter.Halve();
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{3, 2}}));
  filter.Clear();
  CHECK_EQ(filter.size(), 0);
}

void ALogCoversWhatWasTouchedSinceItBegan() {
  ChangeLog log;
  ChangeLog::Lists lists(2);
  CHECK(!log.Covers({10, 5}), "no log has begun");
  log.Begin({10, 5}, true);
  CHECK(log.Covers({10, 5}) && log.Covers({11, 6}) && !log.Covers({10, 4}) && !log.Covers({9, 5}) && !log.Covers({}));
  log.Touch(&lists, 1, 70, 9, 100);   // first touched before the log began
  log.Touch(&lists, 1, 71, 11, 100);  // touched since: it is in the list
  CHECK(lists.touched == (IdsBySegment{{}, {70}}));
  log.Update(11);
  CHECK(log.Covers({10, 5}), "the lookup is younger than the log");
  log.Update(10);
  CHECK(!log.Covers({10, 5}), "the lookup is older than the log");
  lists.Clear();
  CHECK(lists.touched == (IdsBySegment{{}, {}}));
}

void ALogThatGrowsTooLongStops() {
  ChangeLog log;
  ChangeLog::Lists lists(1);
  log.Begin({0, 1}, true);
  for (int64_t id = 0; id < 256 + 10; ++id) log.Touch(&lists, 0, id, 0, 40);
  CHECK(log.Covers({0, 1}));
  log.Touch(&lists, 0, 999, 0, 40);
  CHECK(!log.Covers({0, 1}));
  ChangeLog off;
  off.Begin({0, 1}, false);
  CHECK(!off.Covers({0, 1}));
}

void TrainedIdsAreTakenOnce() {
  TrainedIds trained(2);
  const std::vector<int64_t> entries = {2, 1, 9, -9, 5, 1, 0, 9};  // two sources: [2, 1 | 9, -9, 5], [1, 0 | 9]
  const std::vector<int32_t> splits = {5, 3};
  trained.Add({entries, splits, 4});
  CHECK(trained.Take() == (IdsBySegment{{-9, 9}, {5}}));
  CHECK(trained.Take() == (IdsBySegment{{}, {}}));
  trained.Add({entries, splits, 4});
  trained.Clear();
  CHECK(trained.Take() == (IdsBySegment{{}, {}}));
}

void LookupsRunFromConstructionToDestruction() {
  RunningLookups lookups;
  LookupScratch* first_scratch;
  {
    const RunningLookups::Lookup first(&lookups), second(&lookups);
    first_scratch = first.scratch();
    CHECK(first.scratch() != second.scratch());
    const RunningLookups::Now now = lookups.now();
    CHECK(now.clock == 2 && now.running == (std::vector<uint32_t>{1, 2}));
  }
  CHECK(lookups.now().running.empty());
  const RunningLookups::Lookup third(&lookups);
  CHECK(third.scratch() == first_scratch, "the first lookup ended last");
  CHECK_EQ(third.clock(), 3u);
  lookups.AdvanceTo(2);
  CHECK_EQ(lookups.clock(), 3u);
  lookups.AdvanceTo(9);
  CHECK_EQ(lookups.clock(), 9u);
}

RowHeader TouchedAt(uint32_t clock) { return {clock, 0, 0, 0}; }

void RowsInUseArePinned() {
  PinnedRows pins(2);
  pins.SetClock(10);
  CHECK(pins.Current().Hold(TouchedAt(9)), "of the last two lookups");
  CHECK(!pins.Current().Hold(TouchedAt(8)));
  {
    const RunningLookups::Lookup eleventh(&pins.lookups());
    pins.SetClock(20);
    CHECK(pins.Current().Hold(TouchedAt(11)), "its lookup runs");
    CHECK(!pins.Current().Hold(TouchedAt(12)));
  }
  CHECK(!pins.Current().Hold(TouchedAt(11)));
  pins.BeginWait(15);
  pins.BeginWait(17);
  CHECK_EQ(pins.waiting_since(), 15u);
  CHECK(pins.Current().Hold(TouchedAt(15)) && pins.Current().Hold(TouchedAt(18)), "gradients wait");
  CHECK(!pins.Current().Hold(TouchedAt(14)));
  pins.EndWait();
  CHECK(!pins.Current().Hold(TouchedAt(15)));
}

void HandlesOfUnpinnedRowsBecomeStale() {
  PinnedRows pins(2);
  CHECK(!pins.IsStale(1), "no row has moved");
  pins.NoteMove(10);
  pins.NoteMove(5);
  CHECK(pins.IsStale(8) && !pins.IsStale(9), "the last two lookups were pinned");
  pins.SetClock(30);
  CHECK(pins.IsStale(30) && !pins.IsStale(31), "the clock is another one");
  pins.NoteMoveOfAny();
  CHECK(pins.IsStale(30));
}

void TheLowestRowsOfTheSegmentsAreTaken() {
  TableSpec spec;
  spec.dim = 1;
  spec.seeds = {1, 2, 3};
  ShardedRows rows(spec);
  CHECK_OK(rows.Open());
  rows.pins().SetClock(100);
  for (int64_t segment = 0; segment < 3; ++segment) {
    for (int64_t id = 0; id < 20; ++id) {
      Shard* shard = &rows.ShardWith(TableHash(id));
      uint32_t handle;
      CHECK_OK(shard->keys[segment].Reserve(1, &shard->retired));
      CHECK_OK(rows.MakeRow(shard, segment, id, 0, &handle));
      rows.Header(handle)->last = id == 3 ? 100 : 1 + id;  // row 3 is in use
    }
  }
  std::set<int64_t> taken;
  const auto may_go = [](int64_t, int64_t id, uint32_t) { return id != 1; };
  const auto score = [](const RowHeader& header) { return header.last; };
  const auto take = [&](Shard* shard, int64_t segment, int64_t id, uint32_t) {
    taken.insert(100 * segment + id);
    rows.RemoveKey(shard, segment, id);
    return absl::OkStatus();
  };
  CHECK_EQ(*TakeLowest(&rows, 1, 2, 6, may_go, score, take), 6);
  CHECK(taken == (std::set<int64_t>{100, 102, 104, 200, 202, 204}));
  CHECK_EQ(*TakeLowest(&rows, 0, 0, 50, may_go, score, take), 18, "row 1 may not go, row 3 is in use");
  CHECK_EQ(rows.size(0), 2);
  CHECK_EQ(*TakeLowest(&rows, 0, 0, 50, may_go, score, take), 0);
}

}  // namespace
}  // namespace fusedrec

TEST(table_parts) {
  static_assert((uint32_t{1} << 31 | (fusedrec::RowPool::kMaxRows - 1)) != fusedrec::kAbsent,
                "the handle of the last row of pool 1");
  fusedrec::AnIdIsAdmittedAtTheThreshold();
  fusedrec::HalvingForgetsTheIdsThatCameOnce();
  fusedrec::ALogCoversWhatWasTouchedSinceItBegan();
  fusedrec::ALogThatGrowsTooLongStops();
  fusedrec::TrainedIdsAreTakenOnce();
  fusedrec::LookupsRunFromConstructionToDestruction();
  fusedrec::RowsInUseArePinned();
  fusedrec::HandlesOfUnpinnedRowsBecomeStale();
  fusedrec::TheLowestRowsOfTheSegmentsAreTaken();
}
