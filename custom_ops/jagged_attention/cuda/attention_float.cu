#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec {
namespace attention {

template int Forward<float>(const FusedrecAttention&, const DeviceArrays&, void*);
template int Backward<float>(const FusedrecAttention&, const DeviceArrays&, void*);

}  // namespace attention
}  // namespace fusedrec
