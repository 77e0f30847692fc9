#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec {
namespace attention {

template int Forward<Bfloat16>(const FusedrecAttention&, const DeviceArrays&, void*);
template int Backward<Bfloat16>(const FusedrecAttention&, const DeviceArrays&, void*);

}  // namespace attention
}  // namespace fusedrec
