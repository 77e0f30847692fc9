#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec::attention {

template int Run<Bfloat16>(const Problem<void>&, bool, void*);

}  // namespace fusedrec::attention
