// The contracts of the small classes that HashTable composes: AdmissionFilter, ChangeLog, TrainedIds, RunningLookups.
#include <map>
#include <vector>

#include "check.h"
#include "hash_table/cpu/parts/admission_filter.h"
#include "hash_table/cpu/parts/change_log.h"
#include "hash_table/cpu/parts/running_lookups.h"
#include "hash_table/cpu/parts/trained_ids.h"

namespace fusedrec {
namespace {

std::map<int64_t, uint32_t> CountsOf(const AdmissionFilter& filter) {
  std::map<int64_t, uint32_t> counts;
  filter.ForEach([&](int64_t id, uint32_t count) { counts[id] = count; });
  return counts;
}

void AnIdIsAdmittedAtTheThreshold() {
  AdmissionFilter filter(3, 0, 0.0);
  CHECK(!filter.Admit(7));
  CHECK(!filter.Admit(7));
  CHECK(!filter.Admit(-1));
  CHECK(filter.Admit(7));
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{-1, 1}}), "an admitted id has no count");
  CHECK_OK(filter.Set(-1, 2));
  CHECK(filter.Admit(-1));
  CHECK_EQ(filter.size(), 0);
}

void AFullFilterHalvesItsCounts() {
  AdmissionFilter filter(100, 3, 0.0);
  CHECK_OK(filter.Set(1, 1));
  CHECK_OK(filter.Set(2, 2));
  CHECK_OK(filter.Set(3, 9));
  CHECK(!filter.Admit(4));
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{2, 1}, {3, 4}, {4, 1}}));
  // All ids came more often than once: the new one is not counted.
  for (const int64_t id : {2, 3, 4}) CHECK_OK(filter.Set(id, 40));
  CHECK(!filter.Admit(5));
  CHECK(CountsOf(filter) == (std::map<int64_t, uint32_t>{{2, 20}, {3, 20}, {4, 20}}));
  filter.Clear();
  CHECK_EQ(filter.size(), 0);
}

void ALogCoversWhatWasTouchedSinceItBegan() {
  ChangeLog log;
  ChangeLog::Lists lists(2);
  CHECK(!log.Covers(5), "no log has begun");
  log.Begin(5, 10, true);
  CHECK(log.Covers(5) && log.Covers(6) && !log.Covers(4) && !log.Covers(0));
  log.Touch(&lists, 1, 70, 9, 100);   // first touched before the log began
  log.Touch(&lists, 1, 71, 11, 100);  // touched since: it is in the list
  CHECK(lists.touched == (IdsBySegment{{}, {70}}));
  log.Update(11);
  CHECK(log.Covers(5), "the lookup is younger than the log");
  log.Update(10);
  CHECK(!log.Covers(5), "the lookup is older than the log");
  lists.Clear();
  CHECK(lists.touched == (IdsBySegment{{}, {}}));
}

void ALogThatGrowsTooLongStops() {
  ChangeLog log;
  ChangeLog::Lists lists(1);
  log.Begin(1, 0, true);
  for (int64_t id = 0; id < 256 + 10; ++id) log.Touch(&lists, 0, id, 0, 40);
  CHECK(log.Covers(1));
  log.Touch(&lists, 0, 999, 0, 40);
  CHECK(!log.Covers(1));
  ChangeLog off;
  off.Begin(1, 0, false);
  CHECK(!off.Covers(1));
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

}  // namespace
}  // namespace fusedrec

int main() {
  fusedrec::AnIdIsAdmittedAtTheThreshold();
  fusedrec::AFullFilterHalvesItsCounts();
  fusedrec::ALogCoversWhatWasTouchedSinceItBegan();
  fusedrec::ALogThatGrowsTooLongStops();
  fusedrec::TrainedIdsAreTakenOnce();
  fusedrec::LookupsRunFromConstructionToDestruction();
}
