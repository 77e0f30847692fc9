// The kernel of jagged attention, in its three passes; the idea stands in jagged_attention_cuda.h.
#pragma once

#include "jagged_attention/cuda/attention_bias_grads.cuh"
#include "jagged_attention/cuda/attention_engine.cuh"
#include "jagged_attention/cuda/attention_gate.cuh"
#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/attention_shared.cuh"
#include "jagged_attention/cuda/attention_time_function.cuh"

namespace fusedrec::attention {

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The scores of a tile become weights (SiLU of score and bias, 0 where hidden) and their derivatives.
template <typename T, int D, bool kKeyRows>
__device__ inline void Weigh(const Problem<T>& problem, const SharedTiles<T, D>& tiles, const RowMask& mask,
                             const TimeFunction& function, uint32_t of_head, int r0, int r1, int c0, int c1,
                             float (*scores)[4], float (*slopes)[4]) {
  using S = Shape<T, D>;
  const RelativeBias& bias = tiles.bias;
  const int row_base = S::RowBase() + (Lane() >> 2), column_base = S::ColumnBase() + 2 * (Lane() & 3);
  const int low = kKeyRows ? LowestDistance(mask, c1, r0) : LowestDistance(mask, r1, c0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row_base + 8 * half, row = r0 + r;
    int bucket = -1;
#pragma unroll
    for (int n = 0; n < S::kPairBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = column_base + 8 * n + e, column = c0 + c;
        const int query = kKeyRows ? column : row, key = kKeyRows ? row : column;
        const bool visible =
            row < r1 && column < c1 &&
            VisiblePairs<uint32_t>(mask, problem.dropped, of_head, mask.Number(query), query, key) != 0;
        float weight = 0.0f, slope = 0.0f;
        if (visible) {
          float score = problem.alpha * scores[n][2 * half + e];
          if (HasPosition(bias)) score += tiles.distances[mask.Place(key) - mask.Place(query) - low];
          const int64_t* const asks = kKeyRows ? tiles.column_times + c : tiles.row_times + r;
          const int64_t* const answers = kKeyRows ? tiles.row_times + r : tiles.column_times + c;
          if (HasFunction(bias)) {
            float parameter_slopes[kTimeParameters];
            score += function.At(*asks, *answers, parameter_slopes);
          } else if (HasBuckets(bias)) {
            bucket = BucketOf(bias, *asks, *answers, bucket);
            score += bias.time_weights[bucket];
          }
          const float gate = Sigmoid(score);
          weight = score * gate;
          slope = gate * (1.0f + score * (1.0f - gate));
        }
        scores[n][2 * half + e] = weight;
        slopes[n][2 * half + e] = slope;
        if (kKeyRows && HasBuckets(bias)) {
          tiles.buckets[r * S::kExactStride + c] = static_cast<uint16_t>(visible ? bucket : kNoBucket);
        }
      }
    }
  }
}

enum Pass { kForward, kQueryGrads, kKeyGrads };

template <typename T, int D, Pass kPass>
__global__ void __launch_bounds__(Shape<T, D>::kThreads) AttentionKernel(Problem<T> problem) {
  using S = Shape<T, D>;
  constexpr bool kKeyRows = kPass == kKeyGrads;
  FUSEDREC_DYNAMIC_SHARED(memory);
  SharedTiles<T, D> tiles;
  tiles.Carve(memory, kPass != kForward, kKeyRows, problem.bias);
  tiles.LoadTables(problem.bias);
  const TimeFunction function(problem.bias);
  ParameterSums<T, D> parameters;
  BiasGradSums<T, D> bias_grads(problem, tiles);
  if (kKeyRows) bias_grads.Begin();
  const int row_base = S::RowBase(), column_base = S::ColumnBase(), dim_base = S::DimBase();
  const int64_t stride_qk = problem.heads * problem.qk_dim, stride_value = problem.heads * problem.value_dim;
  const HeadColumns columns_qk{static_cast<int>(problem.qk_dim)}, columns_value{static_cast<int>(problem.value_dim)};

  for (int64_t i = blockIdx.x; i < problem.num_items[kKeyRows] * problem.heads; i += gridDim.x) {
    const Item item = problem.items[kKeyRows][i / problem.heads];
    const int64_t first = problem.row_splits[item.row], query_first = QueryStart(problem, item.row);
    const int64_t head = i % problem.heads;
    const RowMask mask = MaskOf(problem, item.row);
    const uint32_t of_head = HeadBits(problem, item.row, head);
    const int r0 = item.begin, r1 = Lesser(r0 + S::kRows, mask.length);
    // Beginnings of the sequence and head in the tensors of keys and values, and of queries and outputs.
    const int64_t at_key = first * stride_qk + head * problem.qk_dim;
    const int64_t at_value = first * stride_value + head * problem.value_dim;
    const int64_t at_query = query_first * stride_qk + head * problem.qk_dim;
    const int64_t at_out = query_first * stride_value + head * problem.value_dim;

    __syncthreads();  // the last item is done with the tiles
    S::LoadRows(kKeyRows ? problem.key + at_key : problem.query + at_query, stride_qk, columns_qk, r0, r1, S::kRows,
                tiles.row_a);
    if (kPass != kForward) {
      S::LoadRows(kKeyRows ? problem.value + at_value : problem.grads + at_out, stride_value, columns_value, r0, r1,
                  S::kRows, tiles.row_b);
    }
    if (HasTime(problem.bias)) {
      S::LoadTimes(kKeyRows ? problem.bias.answers + first : problem.bias.asks + query_first, r0, r1, S::kRows, tiles.row_times);
    }
    if (!kKeyRows) S::LoadScale(problem.scale, query_first, problem.scale_stride, r0, r1, S::kRows, tiles.scale);

    float sums_a[S::kDimBlocks][4] = {}, sums_b[kKeyRows ? S::kDimBlocks : 1][4] = {};
    for (int c0 = kKeyRows ? static_cast<int>(FirstQuery(problem, item.row)) : 0; c0 < mask.length; c0 += S::kColumns) {
      const int c1 = Lesser(c0 + S::kColumns, mask.length);
      if (kKeyRows ? NoneVisible(mask, c0, c1, r0, r1) : NoneVisible(mask, r0, r1, c0, c1)) continue;
      __syncthreads();  // the last tile of columns is done with
      S::LoadRows(kKeyRows ? problem.query + at_query : problem.key + at_key, stride_qk, columns_qk, c0, c1,
                  S::kColumns, tiles.column_a);
      S::LoadRows(kKeyRows ? problem.grads + at_out : problem.value + at_value, stride_value, columns_value, c0,
                  c1, S::kColumns, tiles.column_b);
      if (HasTime(problem.bias)) {
        S::LoadTimes(kKeyRows ? problem.bias.asks + query_first : problem.bias.answers + first, c0, c1, S::kColumns,
                     tiles.column_times);
      }
      if (kKeyRows) S::LoadScale(problem.scale, query_first, problem.scale_stride, c0, c1, S::kColumns, tiles.scale);
      if (HasPosition(problem.bias)) {
        if (kKeyRows) {
          tiles.LoadDistances(mask, c0, c1, r0, r1);
        } else {
          tiles.LoadDistances(mask, r0, r1, c0, c1);
        }
      }
      __syncthreads();

      float scores[S::kPairBlocks][4] = {}, slopes[S::kPairBlocks][4];
      MultiplyTile<T, D, S::kPairBlocks, false>(tiles.row_a + row_base * S::kStride, S::kStride,
                                                tiles.column_a + column_base * S::kStride, S::kStride, scores);
      Weigh<T, D, kKeyRows>(problem, tiles, mask, function, of_head, r0, r1, c0, c1, scores, slopes);
      if (kPass == kForward) S::StorePairs(scores, nullptr, false, tiles.pair_a);
      if (kPass == kKeyGrads) S::StorePairs(scores, tiles.scale, true, tiles.pair_a);
      if (kPass != kForward) {
        float products[S::kPairBlocks][4] = {};
        MultiplyTile<T, D, S::kPairBlocks, false>(tiles.row_b + row_base * S::kStride, S::kStride,
                                                  tiles.column_b + column_base * S::kStride, S::kStride, products);
#pragma unroll
        for (int n = 0; n < S::kPairBlocks; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) products[n][e] *= slopes[n][e];
        }
        S::StorePairs(products, tiles.scale, kKeyRows, kKeyRows ? tiles.pair_b : tiles.pair_a);
        if (kKeyRows && (HasPosition(problem.bias) || HasTime(problem.bias))) S::StoreExact(products, tiles.scale, tiles.exact);
      }
      __syncthreads();

      const int pairs = row_base * S::kPairStride;
      MultiplyTile<T, S::kColumns, S::kDimBlocks, true>((kKeyRows ? tiles.pair_b : tiles.pair_a) + pairs,
          S::kPairStride, (kPass == kForward ? tiles.column_b : tiles.column_a) + dim_base, S::kStride, sums_a);
      if constexpr (kKeyRows) {
        MultiplyTile<T, S::kColumns, S::kDimBlocks, true>(tiles.pair_a + pairs, S::kPairStride,
                                                          tiles.column_b + dim_base, S::kStride, sums_b);
        if (HasPosition(problem.bias)) bias_grads.AddDistances(mask, r0, r1, c0, c1);
        bias_grads.AddBuckets();
        if (HasFunction(problem.bias)) parameters.AddTile(tiles, function, r1 - r0, c1 - c0);
      }
    }
    if constexpr (kPass == kForward) {
      S::WriteRows(sums_a, tiles.scale, 1.0f, problem.out + at_out, stride_value, columns_value, r0, r1);
      if (problem.gate != nullptr && IsLastOf(problem.heads, problem.done + i / problem.heads)) {
        GateTokens(OutputGate<T>(problem), query_first + r0, query_first + r1);
      }
    } else if constexpr (kPass == kQueryGrads) {
      S::WriteRows(sums_a, nullptr, problem.alpha, problem.query_grads + at_query, stride_qk, columns_qk, r0, r1);
    } else {
      S::WriteRows(sums_a, nullptr, problem.alpha, problem.key_grads + at_key, stride_qk, columns_qk, r0, r1);
      S::WriteRows(sums_b, nullptr, 1.0f, problem.value_grads + at_value, stride_value, columns_value, r0, r1);
      bias_grads.EndRows();
    }
  }
  if (kKeyRows && HasBuckets(problem.bias)) bias_grads.Write();
  if (kKeyRows && HasFunction(problem.bias)) parameters.Write(problem, tiles.time_sums);
}

}  // namespace fusedrec::attention
