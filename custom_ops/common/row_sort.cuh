// Positions sorted by the row that each names, stably: eight bits of the row at a time, by stable_split.cuh.
//
// The result depends on the rows alone: sums over the positions of a row have the same order on every run.
#pragma once

#include "common/stable_split.cuh"

namespace fusedrec {
namespace row_sort {

constexpr int kDigitBits = 8;  // of a row, per pass

// Bins of a pass: digit of the row that position order[n] names (order null: n itself). A row out of range sorts as
// the last one, after all others.
struct DigitOf {
  const int32_t* __restrict__ index;
  const int32_t* __restrict__ order;
  uint32_t num_rows;
  int shift;

  __device__ uint32_t Row(int64_t n) const {
    const uint32_t row = static_cast<uint32_t>(index[order == nullptr ? n : order[n]]);
    return row < num_rows ? row : num_rows;
  }
  __device__ int operator()(int64_t n) const { return static_cast<int>(Row(n) >> shift & ((1u << kDigitBits) - 1)); }
};

static __global__ void __launch_bounds__(stable_split::kThreads)
    CountDigitsKernel(DigitOf digit_of, int64_t num_index, int64_t tiles, unsigned* __restrict__ counts) {
  FUSEDREC_DYNAMIC_SHARED(shared);
  stable_split::CountTile(digit_of, num_index, 1 << kDigitBits, tiles, reinterpret_cast<unsigned*>(shared), counts);
}

// sorted[.] = positions, by the digit and otherwise in the order that they had.
static __global__ void __launch_bounds__(stable_split::kThreads)
    PlaceDigitsKernel(DigitOf digit_of, int64_t num_index, int64_t tiles, const unsigned* __restrict__ counts,
                           const unsigned* __restrict__ totals, int32_t* __restrict__ sorted) {
  FUSEDREC_DYNAMIC_SHARED(shared);
  FUSEDREC_SHARED(unsigned, digit_begin, 1 << kDigitBits);
  FUSEDREC_SHARED(unsigned, warp_sums, stable_split::kWarps);
  const unsigned total = totals[threadIdx.x];  // as many threads as digits
  unsigned until = WarpInclusiveSum(total);
  if (Lane() == 31) warp_sums[Warp()] = until;
  __syncthreads();
  for (int w = 0; w < Warp(); ++w) until += warp_sums[w];
  digit_begin[threadIdx.x] = until - total;  // read behind the barriers of PlaceTile
  const auto place = [&](int64_t n, int digit, unsigned rank) {
    sorted[digit_begin[digit] + rank] = digit_of.order == nullptr ? static_cast<int32_t>(n) : digit_of.order[n];
  };
  stable_split::PlaceTile(digit_of, num_index, 1 << kDigitBits, tiles, reinterpret_cast<unsigned*>(shared), counts,
                          place);
}

// Scratch of SortByRow, of a Carver (launcher.cuh).
struct Scratch {
  template <typename Carver>
  Scratch(Carver* carver, int64_t num_index) {
    order[0] = carver->template Take<int32_t>(num_index);
    order[1] = carver->template Take<int32_t>(num_index);
    counts = carver->template Take<unsigned>(stable_split::Tiles(num_index) << kDigitBits);
    totals = carver->template Take<unsigned>(1 << kDigitBits);
  }
  int32_t* order[2];
  unsigned *counts, *totals;
};

#if !defined(__CUDACC_RTC__)
// Sorts positions [0, num_index), of rows below num_rows, at least one position; returns where they are.
inline int32_t* SortByRow(const Scratch& at, const int32_t* index, int64_t num_index, int64_t num_rows, void* stream) {
  const int64_t tiles = stable_split::Tiles(num_index);
  const int bins = 1 << kDigitBits, shared = stable_split::SharedBytes(bins);
  int32_t* order = nullptr;
  int passes = 0;
  for (int shift = 0; shift == 0 || num_rows >> shift > 0; shift += kDigitBits, ++passes) {
    int32_t* const sorted = at.order[passes % 2];
    const DigitOf digit_of{index, order, static_cast<uint32_t>(num_rows), shift};
    FUSEDREC_LAUNCH(CountDigitsKernel, static_cast<unsigned>(tiles), stable_split::kThreads, shared, stream, digit_of,
                    num_index, tiles, at.counts);
    FUSEDREC_LAUNCH(stable_split::SumOverTilesKernel, static_cast<unsigned>(bins), stable_split::SumThreads(tiles), 0,
                    stream, tiles, at.counts, at.totals);
    FUSEDREC_LAUNCH(PlaceDigitsKernel, static_cast<unsigned>(tiles), stable_split::kThreads, shared, stream, digit_of,
                    num_index, tiles, at.counts, at.totals, sorted);
    order = sorted;
  }
  return order;
}
#endif

}  // namespace row_sort
}  // namespace fusedrec
