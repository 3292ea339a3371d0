// Rows of many calls between host memory, where each call has its own place, and one matrix on the
// device: a launch either way, through the bus, without a copy in between.
//
// Without a bound on its blocks a launch has one for each chunk of each row, and these are
// everywhere at once. With few blocks, which leave the other multiprocessors to a product, each is
// as large as can be, and its walkers take the chunks in turn.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/host.h"
#include "cuda/rows.h"

namespace qlinear::cuda {
namespace {

constexpr int kThreads = 256;  // of a walker, which moves one chunk at a time
constexpr int kUnroll = 2;     // loads in flight of one thread: the bus is far
constexpr int kChunkBytes = kThreads * kUnroll * static_cast<int>(sizeof(uint4));
constexpr int kMostThreads = 1024;  // of a block of several walkers, or that has a row to itself
constexpr int kWalkers = kMostThreads / kThreads;
// Blocks of two launches have room on a multiprocessor side by side, where it has so many threads.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kBlocksTogether = 1;
#else
constexpr int kBlocksTogether = 2;
#endif
constexpr int64_t kMostBlocks = int64_t{1} << 20;

// Deals out the chunks of all rows to the walkers of a launch, threadIdx.y of each block.
class Walk {
 public:
  QL_DEVICE explicit Walk(uint32_t chunks) : chunks_(chunks) {
    const uint32_t walker = blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t walkers = gridDim.x * blockDim.y;
    row_ = walker / chunks;
    chunk_ = walker % chunks;
    row_step_ = walkers / chunks;
    chunk_step_ = walkers % chunks;
  }

  QL_DEVICE int64_t row() const { return row_; }
  QL_DEVICE int64_t chunk() const { return chunk_; }
  QL_DEVICE void next() {
    row_ += row_step_;
    chunk_ += chunk_step_;
    if (chunk_ < chunks_) return;
    chunk_ -= chunks_;
    ++row_;
  }

 private:
  int64_t row_;
  uint32_t chunk_, chunks_, row_step_, chunk_step_;
};

// At most a chunk.
template <typename Word>
__device__ __forceinline__ void copy_words(const unsigned char* from, unsigned char* to,
                                           int bytes) {
  constexpr int kSize = sizeof(Word);
#pragma unroll 1
  for (int at = threadIdx.x * kSize; at < bytes; at += kThreads * kUnroll * kSize) {
    Word words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int place = at + i * kThreads * kSize;
      if (place < bytes) words[i] = *reinterpret_cast<const Word*>(from + place);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int place = at + i * kThreads * kSize;
      if (place < bytes) *reinterpret_cast<Word*>(to + place) = words[i];
    }
  }
}

// What a chunk that begins at `begin` has, of `kChunk` at most.
template <int kChunk>
__device__ __forceinline__ int chunk_size(int64_t begin, int64_t all) {
  return static_cast<int>(all - begin < kChunk ? all - begin : kChunk);
}

// Bytes as they are. Rows lie at any even address: the widest words that both ends allow.
template <bool kToHost>
__global__ void __launch_bounds__(kMostThreads, kBlocksTogether)
    copy_rows(const __grid_constant__ RowTable table, unsigned char* device_rows, int64_t m,
              int64_t row_bytes, int64_t stride_bytes, uint32_t chunks) {
#pragma unroll 1
  for (Walk walk(chunks); walk.row() < m; walk.next()) {
    const int64_t begin = walk.chunk() * kChunkBytes;
    const int bytes = chunk_size<kChunkBytes>(begin, row_bytes);
    unsigned char* host = table.row(walk.row()) + begin;
    unsigned char* device = device_rows + walk.row() * stride_bytes + begin;
    const unsigned char* from = kToHost ? device : host;
    unsigned char* to = kToHost ? host : device;
    const uint64_t all = reinterpret_cast<uint64_t>(host) | reinterpret_cast<uint64_t>(device) |
                         static_cast<uint64_t>(bytes);
    if (all % sizeof(uint4) == 0) {
      copy_words<uint4>(from, to, bytes);
    } else if (all % sizeof(uint32_t) == 0) {
      copy_words<uint32_t>(from, to, bytes);
    } else {
      copy_words<uint16_t>(from, to, bytes);
    }
  }
}

__device__ __forceinline__ void convert(uint16_t from, uint16_t& to) { to = from; }
__device__ __forceinline__ void convert(uint32_t from, uint32_t& to) { to = from; }
__device__ __forceinline__ void convert(float from, __half& to) { to = __float2half_rn(from); }
__device__ __forceinline__ void convert(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}

// At most a chunk; four at a time where both ends are aligned.
template <typename To>
__device__ __forceinline__ void convert_columns(const float* from, To* to, int columns) {
  constexpr int kWide = 4;
  const bool wide = reinterpret_cast<uint64_t>(from) % sizeof(float4) == 0 &&
                    reinterpret_cast<uint64_t>(to) % (kWide * sizeof(To)) == 0;
  const int quads = wide ? columns / kWide : 0;
#pragma unroll 1
  for (int first = threadIdx.x; first < quads; first += kThreads * kUnroll) {
    float4 fours[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int quad = first + i * kThreads;
      if (quad < quads) fours[i] = reinterpret_cast<const float4*>(from)[quad];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int quad = first + i * kThreads;
      if (quad >= quads) break;
      union {
        To items[kWide];
        uint2 word;
      } out = {};
      convert(fours[i].x, out.items[0]);
      convert(fours[i].y, out.items[1]);
      convert(fours[i].z, out.items[2]);
      convert(fours[i].w, out.items[3]);
      reinterpret_cast<uint2*>(to)[quad] = out.word;
    }
  }
#pragma unroll 1
  for (int column = quads * kWide + threadIdx.x; column < columns; column += kThreads) {
    convert(from[column], to[column]);
  }
}

// fp32 in, 16 bits out.
template <typename To>
__global__ void __launch_bounds__(kMostThreads, kBlocksTogether)
    convert_rows(const __grid_constant__ RowTable table, To* device_rows, int64_t m,
                 int64_t columns, int64_t stride, uint32_t chunks) {
  constexpr int kChunk = kChunkBytes / sizeof(float);
#pragma unroll 1
  for (Walk walk(chunks); walk.row() < m; walk.next()) {
    const int64_t begin = walk.chunk() * kChunk;
    convert_columns(reinterpret_cast<const float*>(table.row(walk.row())) + begin,
                    device_rows + walk.row() * stride + begin, chunk_size<kChunk>(begin, columns));
  }
}

// A row crosses the bus once and in order, is turned in shared memory, and leaves in order: column
// by column across the bus would cost a transaction each.
template <typename From, typename To>
__global__ void __launch_bounds__(kMostThreads, kBlocksTogether)
    permute_rows(const __grid_constant__ RowTable table, const int32_t* __restrict__ permutation,
                 To* __restrict__ device_rows, int64_t m, int64_t columns, int64_t stride) {
  extern __shared__ uint4 shared[];
  To* row_items = reinterpret_cast<To*>(shared);
  constexpr int kWide = sizeof(uint4) / sizeof(From);
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
    const From* from = reinterpret_cast<const From*>(table.row(row));
    const bool wide = reinterpret_cast<uint64_t>(from) % sizeof(uint4) == 0;
    const int64_t groups = wide ? columns / kWide : 0;
#pragma unroll 1
    for (int64_t first = threadIdx.x; first < groups; first += kMostThreads * kUnroll) {
      union {
        uint4 word;
        From items[kWide];
      } in[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t group = first + i * kMostThreads;
        if (group < groups) in[i].word = reinterpret_cast<const uint4*>(from)[group];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t group = first + i * kMostThreads;
        if (group >= groups) break;
#pragma unroll
        for (int j = 0; j < kWide; ++j) convert(in[i].items[j], row_items[group * kWide + j]);
      }
    }
    for (int64_t i = groups * kWide + threadIdx.x; i < columns; i += kMostThreads) {
      convert(from[i], row_items[i]);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < columns; i += kMostThreads) {
      device_rows[row * stride + i] = row_items[permutation[i]];
    }
    __syncthreads();
  }
}

unsigned blocks_of(const ql_cuda_rows& rows, int64_t wanted) {
  int64_t most = kMostBlocks;
  if (rows.most_blocks > 0 && rows.most_blocks < most) most = rows.most_blocks;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

// Blocks and threads of a launch whose walkers share out so many chunks of each row.
struct Shape {
  dim3 blocks, threads;
};

Shape shape_of(const ql_cuda_rows& rows, int64_t chunks) {
  const int64_t walkers = rows.most_blocks > 0 ? kWalkers : 1;
  const int64_t turns = rows.m * chunks;  // fits: a table of so many rows would not
  return {dim3(blocks_of(rows, (turns + walkers - 1) / walkers)),
          dim3(kThreads, static_cast<unsigned>(walkers))};
}

int64_t chunks_of(int64_t row_bytes) { return (row_bytes + kChunkBytes - 1) / kChunkBytes; }

template <bool kToHost>
cudaError_t launch_copy(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  const int64_t item = item_bytes(rows.device_dtype), bytes = rows.columns * item;
  const int64_t chunks = chunks_of(bytes);
  const Shape shape = shape_of(rows, chunks);
  copy_rows<kToHost><<<shape.blocks, shape.threads, 0, stream>>>(
      table, static_cast<unsigned char*>(rows.device_rows), rows.m, bytes, rows.row_stride * item,
      static_cast<uint32_t>(chunks));
  return cudaGetLastError();
}

template <typename To>
cudaError_t launch_convert(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  const int64_t chunks = chunks_of(rows.columns * static_cast<int64_t>(sizeof(float)));
  const Shape shape = shape_of(rows, chunks);
  convert_rows<To><<<shape.blocks, shape.threads, 0, stream>>>(
      table, static_cast<To*>(rows.device_rows), rows.m, rows.columns, rows.row_stride,
      static_cast<uint32_t>(chunks));
  return cudaGetLastError();
}

template <typename From, typename To>
cudaError_t launch_permute(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  const int shared_bytes = static_cast<int>(rows.columns * sizeof(To));
  const auto kernel = permute_rows<From, To>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks_of(rows, rows.m), kMostThreads, shared_bytes, stream>>>(
      table, rows.permutation, static_cast<To*>(rows.device_rows), rows.m, rows.columns,
      rows.row_stride);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gather_rows(const ql_cuda_rows& rows, const RowTable& table,
                               cudaStream_t stream) {
  const bool converts = rows.host_dtype != rows.device_dtype;
  const bool to_half = rows.device_dtype == QL_F16;
  if (rows.permutation == nullptr) {
    if (!converts) return launch_copy<false>(rows, table, stream);
    return to_half ? launch_convert<__half>(rows, table, stream)
                   : launch_convert<__nv_bfloat16>(rows, table, stream);
  }
  if (!converts) {
    return rows.host_dtype == QL_F32 ? launch_permute<uint32_t, uint32_t>(rows, table, stream)
                                     : launch_permute<uint16_t, uint16_t>(rows, table, stream);
  }
  return to_half ? launch_permute<float, __half>(rows, table, stream)
                 : launch_permute<float, __nv_bfloat16>(rows, table, stream);
}

cudaError_t launch_scatter_rows(const ql_cuda_rows& rows, const RowTable& table,
                                cudaStream_t stream) {
  return launch_copy<true>(rows, table, stream);
}

}  // namespace qlinear::cuda
