#include "join_messages/cuda/join_messages_cuda.h"

#include <vector>

#include "common/launcher.cuh"
#include "join_messages/cuda/join_messages_cuda.cuh"

namespace fusedrec {
namespace join_messages {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;

struct LengthsScratch {
  LengthsScratch(void* memory, int64_t num_messages, int64_t num_ranks) : carver(memory) {
    block_begin = carver.Take<int64_t>(num_ranks + 1);
    segments = carver.Take<int64_t>(num_messages);
    lengths = carver.Take<int32_t>(num_messages * num_ranks + 1);  // the last one: wrong, so that one copy brings both
  }
  Carver carver;
  int64_t *block_begin, *segments;
  int32_t* lengths;
};

int64_t PiecesBytes(int64_t num_messages, int64_t num_ranks) {
  Carver carver(nullptr);
  carver.Take<CopiedPiece>(num_messages * num_ranks);
  return carver.bytes();
}

int CopyPieces(const std::vector<CopiedPiece>& pieces, int64_t total, void* scratch, void* stream) {
  if (total == 0) return kCudaSuccess;
  auto* const on_device = static_cast<CopiedPiece*>(scratch);
  const int64_t count = static_cast<int64_t>(pieces.size());
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(on_device, pieces.data(), count, stream));
  FUSEDREC_LAUNCH(CopyPiecesKernel, LoopBlocks(total, kPieceThreads), kPieceThreads, 0, stream, on_device, count, total);
  return LastError();
}

bool AreCounts(int64_t num_messages, int64_t num_ranks) {
  return num_messages >= 1 && num_messages <= kMost && num_ranks >= 0 && num_ranks <= kMost / num_messages;
}

}  // namespace
}  // namespace join_messages
}  // namespace fusedrec

using namespace fusedrec;                 // NOLINT
using namespace fusedrec::join_messages;  // NOLINT

int64_t fusedrec_join_messages_scratch_bytes(int64_t num_messages, int64_t num_ranks) {
  return PiecesBytes(num_messages, num_ranks);
}

int fusedrec_join_messages(const int64_t* const* messages, const int32_t* const* splits, int64_t num_messages,
                           int64_t num_ranks, void* scratch, int64_t* joined, int64_t joined_size, void* stream) {
  if (!AreCounts(num_messages, num_ranks) || joined_size > kMost) return kCudaInvalidValue;
  std::vector<const int64_t*> from(messages, messages + num_messages);
  std::vector<CopiedPiece> pieces;
  int64_t total = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t i = 0; i < num_messages; ++i) {
      const int32_t count = splits[i][r];
      if (count < 0 || count > joined_size - total) return kCudaInvalidValue;
      pieces.push_back({total, from[i], joined + total});
      from[i] += count;
      total += count;
    }
  }
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(joined + total, 0, (joined_size - total) * sizeof(int64_t), stream));
  return CopyPieces(pieces, total, scratch, stream);
}

int64_t fusedrec_message_lengths_scratch_bytes(int64_t num_messages, int64_t num_ranks) {
  return LengthsScratch(nullptr, num_messages, num_ranks).carver.bytes();
}

int fusedrec_message_lengths(const int64_t* message, const int32_t* splits, const int64_t* segments,
                             int64_t num_messages, int64_t num_ranks, void* scratch, int32_t* lengths, void* stream) {
  if (!AreCounts(num_messages, num_ranks)) return kCudaInvalidValue;
  std::vector<int64_t> block_begin(num_ranks + 1, 0);
  for (int64_t r = 0; r < num_ranks; ++r) {
    if (splits[r] < 0) return kCudaInvalidValue;
    block_begin[r + 1] = block_begin[r] + splits[r];
  }
  for (int64_t i = 0; i < num_messages; ++i) {
    if (segments[i] < 0 || segments[i] > kMost) return kCudaInvalidValue;
  }
  if (block_begin[num_ranks] > kMost) return kCudaInvalidValue;
  if (num_ranks == 0) return kCudaSuccess;
  const LengthsScratch at(scratch, num_messages, num_ranks);
  const int64_t count = num_messages * num_ranks;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.block_begin, block_begin.data(), num_ranks + 1, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.segments, segments, num_messages, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(at.lengths, 0, (count + 1) * sizeof(int32_t), stream));
  FUSEDREC_LAUNCH(MessageLengthsKernel, static_cast<unsigned>(num_ranks), 32, 0, stream, message, at.block_begin,
                  at.segments, num_messages, num_ranks, at.lengths, at.lengths + count);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  std::vector<int32_t> found(count + 1);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(found.data(), at.lengths, count + 1, stream));
  if (found[count] != 0) return kCudaInvalidValue;
  for (int64_t i = 0; i < count; ++i) lengths[i] = found[i];
  return kCudaSuccess;
}

int64_t fusedrec_split_messages_scratch_bytes(int64_t num_messages, int64_t num_ranks) {
  return PiecesBytes(num_messages, num_ranks);
}

int fusedrec_split_messages(const int64_t* message, const int32_t* lengths, int64_t num_messages, int64_t num_ranks,
                            void* scratch, int64_t* const* parts, void* stream) {
  if (!AreCounts(num_messages, num_ranks)) return kCudaInvalidValue;
  std::vector<int64_t*> to(parts, parts + num_messages);
  std::vector<CopiedPiece> pieces;
  int64_t total = 0;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t i = 0; i < num_messages; ++i) {
      const int32_t count = lengths[i * num_ranks + r];
      if (count < 0) return kCudaInvalidValue;
      pieces.push_back({total, message + total, to[i]});
      to[i] += count;
      total += count;
    }
  }
  return CopyPieces(pieces, total, scratch, stream);
}
