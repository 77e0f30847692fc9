// The kernels of the channels of FuXi: the map of a channel times the values, and the gradients of both; the idea
// stands in jagged_attention_cuda.h.
#pragma once

#include "jagged_attention/cuda/attention_bias_grads.cuh"
#include "jagged_attention/cuda/attention_engine.cuh"
#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/attention_shared.cuh"
#include "jagged_attention/cuda/attention_time_function.cuh"

namespace fusedrec::attention {

constexpr int kMaxChannels = 2;

// The channels are position, then time; either may be missing.
__device__ inline bool IsPosition(const RelativeBias& bias, int channel) { return channel == 0 && HasPosition(bias); }

template <typename T, int D>
struct ChannelTiles : BiasTiles<T, D> {
  using S = Shape<T, D>;
  static constexpr int kMap = S::kRows * S::kPairStride;
  T *row, *column;  // [kRows or kColumns, kStride]
  T* maps;          // [kMaxChannels, kRows, kPairStride]; backward one after the other in the first

  FUSEDREC_HOST_DEVICE int Carve(unsigned char* memory, bool backward, const RelativeBias& tables) {
    Taker take{memory, 0};
    take(&row, backward ? S::kRows * S::kStride : 0);
    take(&column, S::kColumns * S::kStride);
    take(&maps, backward ? kMap : kMaxChannels * kMap);
    this->CarveBias(&take, backward, tables);
    return take.bytes;
  }
};

// The columns of all heads that a block owns: number `slice` of the slices of D columns. apart: columns of a head in the
// tensor.
template <int D, typename T>
__device__ inline AllColumns ColumnsOf(const Problem<T>& problem, int slice, int channels) {
  const int head_dim = static_cast<int>(problem.value_dim), first = slice * D;
  return {Lesser(static_cast<int>(problem.heads) * head_dim - first, D), first, head_dim, channels * problem.value_dim};
}

// map [kRows, kPairStride] = that of a tile in one channel, 0 where hidden. Backward, where keys are in rows,
// tiles.exact holds the gradients of the map: they become 0 where hidden, and go to the parameters of a function of
// time. No product comes before it, so that pairs need not be where the tensor cores want them: a loop that is not
// unrolled, which keeps code and registers few.
template <typename T, int D, bool kBackward>
__device__ inline void MapTile(const BiasTiles<T, D>& tiles, const RowMask& mask, bool position,
    const TimeFunction& function, int r0, int r1, int c0, int c1, T* map, ParameterSums<T, D>* parameters) {
  using S = Shape<T, D>;
  const RelativeBias& bias = tiles.bias;
  const int low = kBackward ? LowestDistance(mask, c1, r0) : LowestDistance(mask, r1, c0);
  int bucket = -1;
#pragma unroll 2
  for (int x = threadIdx.x; x < S::kRows * S::kColumns; x += S::kThreads) {
    const int r = x / S::kColumns, c = x % S::kColumns, row = r0 + r, column = c0 + c;
    const int query = kBackward ? column : row, key = kBackward ? row : column;
    const bool visible = row < r1 && column < c1 && VisiblePairs<uint32_t>(mask, 0, 0, mask.Number(query), query, key) != 0;
    float weight = 0.0f;
    if (visible && position) {
      weight = tiles.distances[mask.Place(key) - mask.Place(query) - low];
    } else if (visible) {
      const int64_t ask = kBackward ? tiles.column_times[c] : tiles.row_times[r];
      const int64_t answer = kBackward ? tiles.row_times[r] : tiles.column_times[c];
      if (HasBuckets(bias)) {
        bucket = BucketOf(bias, ask, answer, bucket);
        weight = bias.time_weights[bucket];
      } else {
        float slopes[kTimeParameters];
        weight = function.At(ask, answer, slopes);
        if (kBackward) parameters->Add(tiles.exact[r * S::kExactStride + c], slopes);
      }
    }
    map[r * S::kPairStride + c] = FromFloat<T>(weight);
    if (!kBackward) continue;
    if (!visible) tiles.exact[r * S::kExactStride + c] = 0.0f;
    if (!position && HasBuckets(bias)) {
      tiles.buckets[r * S::kExactStride + c] = static_cast<uint16_t>(visible ? bucket : kNoBucket);
    }
  }
}

// out of a tile of queries in a slice of the columns, all channels: a block each.
template <typename T, int D>
__global__ void __launch_bounds__(Shape<T, D>::kThreads) ChannelsKernel(Problem<T> problem) {
  using S = Shape<T, D>;
  FUSEDREC_DYNAMIC_SHARED(memory);
  ChannelTiles<T, D> tiles;
  tiles.Carve(memory, false, problem.bias);
  tiles.LoadTables(problem.bias);
  const TimeFunction function(problem.bias);
  const Item item = problem.items[0][blockIdx.x / problem.slices];
  const int slice = static_cast<int>(blockIdx.x % problem.slices), channels = problem.channels;
  const int64_t first = problem.row_splits[item.row], stride = problem.heads * problem.value_dim;
  const RowMask mask = MaskOf(problem, item.row);
  const int r0 = item.begin, r1 = Lesser(r0 + S::kRows, mask.length);
  const int64_t query_first = QueryStart(problem, item.row);
  if (HasTime(problem.bias)) S::LoadTimes(problem.bias.asks + query_first, r0, r1, S::kRows, tiles.row_times);

  float sums[kMaxChannels][S::kDimBlocks][4] = {};
  for (int c0 = 0; c0 < mask.length; c0 += S::kColumns) {
    const int c1 = Lesser(c0 + S::kColumns, mask.length);
    if (NoneVisible(mask, r0, r1, c0, c1)) continue;
    __syncthreads();  // the last tile of columns is done with
    S::LoadRows(problem.value + first * stride, stride, ColumnsOf<D>(problem, slice, 1), c0, c1, S::kColumns,
                tiles.column);
    if (HasTime(problem.bias)) S::LoadTimes(problem.bias.answers + first, c0, c1, S::kColumns, tiles.column_times);
    if (HasPosition(problem.bias)) tiles.LoadDistances(mask, r0, r1, c0, c1);
    __syncthreads();

    for (int channel = 0; channel < channels; ++channel) {
      MapTile<T, D, false>(tiles, mask, IsPosition(problem.bias, channel), function, r0, r1, c0, c1,
                           tiles.maps + channel * tiles.kMap, nullptr);
    }
    __syncthreads();
#pragma unroll
    for (int channel = 0; channel < kMaxChannels; ++channel) {
      if (channel >= channels) break;
      MultiplyTile<T, S::kColumns, S::kDimBlocks, true>(
          tiles.maps + channel * tiles.kMap + S::RowBase() * S::kPairStride, S::kPairStride,
          tiles.column + S::DimBase(), S::kStride, sums[channel]);
    }
  }
  T* const out = problem.out + query_first * channels * stride;
#pragma unroll
  for (int channel = 0; channel < kMaxChannels; ++channel) {
    if (channel >= channels) break;
    S::WriteRows(sums[channel], nullptr, 1.0f, out + channel * problem.value_dim, channels * stride,
                 ColumnsOf<D>(problem, slice, channels), r0, r1);
  }
}

// With m_c the map of channel c and g_c the gradient of its output:  dv = sum over c of m_c^T g_c;  dm_c = g_c v^T.
// A block has tiles of keys and slices of columns, one after the other; its sums of the bias cover all of them.
template <typename T, int D>
__global__ void __launch_bounds__(Shape<T, D>::kThreads) ChannelGradsKernel(Problem<T> problem) {
  using S = Shape<T, D>;
  FUSEDREC_DYNAMIC_SHARED(memory);
  ChannelTiles<T, D> tiles;
  tiles.Carve(memory, true, problem.bias);
  tiles.LoadTables(problem.bias);
  const TimeFunction function(problem.bias);
  ParameterSums<T, D> parameters;
  BiasGradSums<T, D> bias_grads(problem, tiles);
  bias_grads.Begin();
  const int channels = problem.channels;
  const int64_t stride = problem.heads * problem.value_dim;

  for (int64_t i = blockIdx.x; i < problem.num_items[1] * problem.slices; i += gridDim.x) {
    const Item item = problem.items[1][i / problem.slices];
    const int slice = static_cast<int>(i % problem.slices);
    const int64_t first = problem.row_splits[item.row], query_first = QueryStart(problem, item.row);
    const RowMask mask = MaskOf(problem, item.row);
    const int r0 = item.begin, r1 = Lesser(r0 + S::kRows, mask.length);
    const AllColumns of_values = ColumnsOf<D>(problem, slice, 1), of_grads = ColumnsOf<D>(problem, slice, channels);
    // No thread reads these after the last barrier of a tile, so the next item may write them.
    S::LoadRows(problem.value + first * stride, stride, of_values, r0, r1, S::kRows, tiles.row);
    if (HasTime(problem.bias)) S::LoadTimes(problem.bias.answers + first, r0, r1, S::kRows, tiles.row_times);

    float sums[S::kDimBlocks][4] = {};
    for (int c0 = static_cast<int>(FirstQuery(problem, item.row)); c0 < mask.length; c0 += S::kColumns) {
      const int c1 = Lesser(c0 + S::kColumns, mask.length);
      if (NoneVisible(mask, c0, c1, r0, r1)) continue;
      for (int channel = 0; channel < channels; ++channel) {
        const bool position = IsPosition(problem.bias, channel);
        __syncthreads();  // the last channel is done with
        S::LoadRows(problem.grads + query_first * channels * stride + channel * problem.value_dim, channels * stride,
                    of_grads, c0, c1, S::kColumns, tiles.column);
        if (position) tiles.LoadDistances(mask, c0, c1, r0, r1);
        if (!position) S::LoadTimes(problem.bias.asks + query_first, c0, c1, S::kColumns, tiles.column_times);
        __syncthreads();

        float grads[S::kPairBlocks][4] = {};
        MultiplyTile<T, D, S::kPairBlocks, false>(tiles.row + S::RowBase() * S::kStride, S::kStride,
                                                  tiles.column + S::ColumnBase() * S::kStride, S::kStride, grads);
        S::StoreExact(grads, nullptr, tiles.exact);
        __syncthreads();
        MapTile<T, D, true>(tiles, mask, position, function, r0, r1, c0, c1, tiles.maps, &parameters);
        __syncthreads();

        MultiplyTile<T, S::kColumns, S::kDimBlocks, true>(tiles.maps + S::RowBase() * S::kPairStride, S::kPairStride,
                                                          tiles.column + S::DimBase(), S::kStride, sums);
        if (position) {
          bias_grads.AddDistances(mask, r0, r1, c0, c1);
        } else {
          bias_grads.AddBuckets();
          parameters.EndTile();
        }
      }
    }
    S::WriteRows(sums, nullptr, 1.0f, problem.value_grads + first * stride, stride, of_values, r0, r1);
    bias_grads.EndRows();
  }
  if (HasBuckets(problem.bias)) bias_grads.Write();
  if (HasFunction(problem.bias)) parameters.Write(problem, tiles.time_sums);
}

}  // namespace fusedrec::attention
