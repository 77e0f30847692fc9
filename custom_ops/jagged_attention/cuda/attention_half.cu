#include "jagged_attention/cuda/attention_launch.cuh"

namespace fusedrec {
namespace attention {

template int Forward<Half>(const FusedrecAttention&, const DeviceArrays&, void*);
template int Backward<Half>(const FusedrecAttention&, const DeviceArrays&, void*);

}  // namespace attention
}  // namespace fusedrec
