#include "jagged_attention/cuda/attention_channels_launch.cuh"

namespace fusedrec {
namespace attention {

template int Channels<float>(const FusedrecAttention&, const DeviceArrays&, bool, void*);

}  // namespace attention
}  // namespace fusedrec
