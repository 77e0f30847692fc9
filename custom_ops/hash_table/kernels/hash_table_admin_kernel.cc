// Kernels outside the training step. table_upkeep.h has their functions.
#include "hash_table/kernels/table_resource.h"
#include "hash_table/kernels/table_upkeep.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;

#define FUSEDREC_REGISTER(NAME, FUNCTION) \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" NAME).Device(DEVICE_CPU), TableFunctionOp<upkeep::FUNCTION>)
FUSEDREC_REGISTER("TableStatistics", Statistics);
FUSEDREC_REGISTER("TableSize", Size);
FUSEDREC_REGISTER("TableKeys", Keys);
FUSEDREC_REGISTER("TableReadRecords", ReadRecords);
FUSEDREC_REGISTER("TableImport", Import);
FUSEDREC_REGISTER("TableRemove", Remove);
FUSEDREC_REGISTER("TableEvict", Evict);
FUSEDREC_REGISTER("TableTombstones", Tombstones);
FUSEDREC_REGISTER("TableForgetTombstones", ForgetTombstones);
FUSEDREC_REGISTER("TableCandidates", Candidates);
FUSEDREC_REGISTER("TableImportCandidates", ImportCandidates);
FUSEDREC_REGISTER("TableClock", Clock);
FUSEDREC_REGISTER("TableSetClock", SetClock);
FUSEDREC_REGISTER("TableClear", Clear);
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
