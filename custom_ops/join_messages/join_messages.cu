#include "join_messages/join_messages_cuda.h"

#include "common/pieces.cuh"
#include "common/launcher.cuh"

namespace fusedrec::join_messages {

// lengths[i, r] out of the headers in the block of rank r. One warp per rank. *wrong, 0 before, becomes 1 where a header
// does not agree with its block. No entry outside the block is read, whatever the headers say.
__global__ void __launch_bounds__(32) MessageLengthsKernel(const int64_t* __restrict__ message,
    const int64_t* __restrict__ block_begin, const int64_t* __restrict__ segments, int64_t num_messages,
    int64_t num_ranks, int32_t* __restrict__ lengths, int32_t* wrong) {
  const int64_t r = blockIdx.x, end = block_begin[r + 1];
  int64_t at = block_begin[r];
  for (int64_t i = 0; i < num_messages; ++i) {
    const int64_t free = end - at - segments[i];
    bool is_sound = free >= 0;
    int64_t ids = 0;
    for (int64_t s = Lane(); is_sound && s < segments[i]; s += 32) {
      const int64_t count = message[at + s];
      is_sound = 0 <= count && count <= free;  // before it is added: a damaged header must not overflow the sum
      if (is_sound) ids += count;
    }
    ids = WarpSum(ids);
    if (!__all_sync(kFullWarp, is_sound) || ids > free) {
      if (Lane() == 0) *wrong = 1;
      return;
    }
    if (Lane() == 0) lengths[i * num_ranks + r] = static_cast<int32_t>(segments[i] + ids);
    at += segments[i] + ids;
  }
  if (at != end && Lane() == 0) *wrong = 1;
}

}  // namespace fusedrec::join_messages

#ifndef __CUDACC_RTC__
using namespace fusedrec;                 // NOLINT
using namespace fusedrec::join_messages;  // NOLINT

static int CopyPieces(const std::vector<CopiedPiece>& pieces, int64_t total, const FusedrecAllocator* memory,
                      void* stream) {
  if (total == 0) return kCudaSuccess;
  const int64_t count = static_cast<int64_t>(pieces.size());
  CopiedPiece* on_device;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&on_device, count}}));
  FUSEDREC_TRY(CopyToDevice(on_device, pieces.data(), count, stream));
  FUSEDREC_LOOP(CopyPiecesKernel, total, stream, on_device, count, total);
  return LastError();
}

int fusedrec_join_messages(const int64_t* const* messages, const int32_t* const* splits, int64_t num_messages,
    int64_t num_ranks, const FusedrecAllocator* memory, int64_t* joined, int64_t joined_size, void* stream) {
  std::vector<const int64_t*> from(messages, messages + num_messages);
  std::vector<CopiedPiece> pieces;
  int64_t total = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t i = 0; i < num_messages; ++i) {
      const int32_t count = splits[i][r];
      pieces.push_back({total, from[i], joined + total});
      from[i] += count;
      total += count;
    }
  }
  FUSEDREC_TRY(Fill(joined + total, 0, (joined_size - total) * sizeof(int64_t), stream));
  return CopyPieces(pieces, total, memory, stream);
}

int fusedrec_message_lengths(const int64_t* message, const int32_t* splits, const int64_t* segments,
    int64_t num_messages, int64_t num_ranks, const FusedrecAllocator* memory, int32_t* lengths, void* stream) {
  std::vector<int64_t> block_begin(num_ranks + 1, 0);
  for (int64_t r = 0; r < num_ranks; ++r) block_begin[r + 1] = block_begin[r] + splits[r];
  if (num_ranks == 0) return kCudaSuccess;
  const int64_t count = num_messages * num_ranks;
  int64_t *begins, *segments_of;
  int32_t* on_device;  // the last one: wrong, so that one copy brings both
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&begins, num_ranks + 1}, {&segments_of, num_messages}, {&on_device, count + 1}}));
  FUSEDREC_TRY(CopyToDevice(begins, block_begin.data(), num_ranks + 1, stream));
  FUSEDREC_TRY(CopyToDevice(segments_of, segments, num_messages, stream));
  FUSEDREC_TRY(Fill(on_device, 0, (count + 1) * sizeof(int32_t), stream));
  FUSEDREC_LAUNCH(MessageLengthsKernel, static_cast<unsigned>(num_ranks), 32, 0, stream, message, begins,
                  segments_of, num_messages, num_ranks, on_device, on_device + count);
  FUSEDREC_TRY(LastError());
  std::vector<int32_t> answers(count + 1);
  FUSEDREC_TRY(CopyToHost(answers.data(), on_device, count + 1, stream));
  if (answers[count] != 0) return kCudaInvalidValue;
  for (int64_t i = 0; i < count; ++i) lengths[i] = answers[i];
  return kCudaSuccess;
}

int fusedrec_split_messages(const int64_t* message, const int32_t* lengths, int64_t num_messages, int64_t num_ranks,
                            const FusedrecAllocator* memory, int64_t* const* parts, void* stream) {
  std::vector<int64_t*> to(parts, parts + num_messages);
  std::vector<CopiedPiece> pieces;
  int64_t total = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t i = 0; i < num_messages; ++i) {
      const int32_t count = lengths[i * num_ranks + r];
      pieces.push_back({total, message + total, to[i]});
      to[i] += count;
      total += count;
    }
  }
  return CopyPieces(pieces, total, memory, stream);
}
#endif
