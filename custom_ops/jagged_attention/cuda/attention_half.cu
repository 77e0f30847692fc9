#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec::attention {

template int Run<Half>(const Problem<void>&, bool, void*);

}  // namespace fusedrec::attention
