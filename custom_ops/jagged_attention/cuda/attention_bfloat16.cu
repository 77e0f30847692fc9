#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec {
namespace attention {

template int Run<Bfloat16>(const Problem<void>&, bool, void*);

}  // namespace attention
}  // namespace fusedrec
