// The channels of every engine that this processor can run, on one thread and on several, against the definitions in
// double, pair by pair.
#include <cstdint>
#include <vector>

#include "check.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_batch.h"
#include "threads.h"

namespace fusedrec {
namespace {

template <typename T>
struct Channels {
  std::vector<T> out, value, position, time;

  explicit Channels(const Batch& b)
      : out(2 * b.value.size()), value(b.value.size()), position(b.position.size()), time(b.time.size()) {}
};

Channels<double> Wanted(const Batch& b, const Masks& masks) {
  Channels<double> wanted(b);
  b.EachPair(masks, [&](int64_t i, int64_t j, int64_t at, int64_t bucket) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t vj = (j * kHeads + h) * kValueDim, first = 2 * (i * kHeads + h) * kValueDim;
      for (int64_t d = 0; d < kValueDim; ++d) {
        const int64_t of_position = first + d, of_time = first + kValueDim + d;
        wanted.out[of_position] += static_cast<double>(b.position[at]) * b.value[vj + d];
        wanted.out[of_time] += static_cast<double>(b.time[bucket]) * b.value[vj + d];
        wanted.value[vj + d] += static_cast<double>(b.position[at]) * b.channel_grads[of_position] +
                                static_cast<double>(b.time[bucket]) * b.channel_grads[of_time];
        wanted.position[at] += static_cast<double>(b.channel_grads[of_position]) * b.value[vj + d];
        wanted.time[bucket] += static_cast<double>(b.channel_grads[of_time]) * b.value[vj + d];
      }
    }
  });
  return wanted;
}

Channels<float> Run(const Batch& b, const Masks& masks, const TileEngine& engine, const ParallelFor& parallel_for) {
  Channels<float> found(b);
  JaggedBiasAttention(b.Rows(masks), b.value.data(), kValueDim, b.Bias(), engine, parallel_for, found.out.data());
  JaggedBiasAttentionGrad(b.Rows(masks), b.value.data(), kValueDim, b.Bias(), b.channel_grads.data(), engine,
                          parallel_for, found.value.data(),
                          {absl::MakeSpan(found.position), absl::MakeSpan(found.time)});
  return found;
}

void EveryEngine(const std::vector<int64_t>& lengths, const Masks& masks, bool far_times) {
  const Batch batch(lengths, masks, far_times);
  const Channels<double> wanted = Wanted(batch, masks);
  for (const TileEngine* engine : Engines()) {
    const Channels<float> found = Run(batch, masks, *engine, SerialFor);
    CheckClose(found.out, wanted.out, "out", engine->name);
    CheckClose(found.value, wanted.value, "value_grads", engine->name);
    CheckClose(found.position, wanted.position, "position_grads", engine->name);
    CheckClose(found.time, wanted.time, "time_grads", engine->name);
    const Channels<float> threaded = Run(batch, masks, *engine, Threads(3));
    CHECK(threaded.out == found.out && threaded.value == found.value && threaded.position == found.position &&
              threaded.time == found.time,
          "", engine->name, ": other bits on three threads");
  }
}

}  // namespace
}  // namespace fusedrec

TEST(jagged_channels) {
  using namespace fusedrec;
  EveryEngine({40, 17}, {0, 0, 0, 3}, true);
  EveryEngine({600}, {2, 0, 0, 70}, false);  // several units of keys
  EveryEngine({}, {0, 0, 0, 0}, false);
  if (kRacesAlone) return;
  for (const Masks& masks : AllMasks()) EveryEngine(AwkwardLengths(), masks, false);
}
