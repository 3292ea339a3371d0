// Rows of many calls between host memory, where each call has its own place, and one matrix on the
// device: a launch either way, through the bus, without a copy in between.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/host.h"
#include "cuda/rows.h"

namespace qlinear::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // loads in flight of one thread: the bus is far
constexpr int64_t kChunkBytes = int64_t{kThreads} * kUnroll * sizeof(uint4);
constexpr int kRowThreads = 1024;  // of a block that has a whole row to itself
constexpr int64_t kMostRowBlocks = 65535;

template <typename Word>
__device__ __forceinline__ void copy_words(const unsigned char* from, unsigned char* to,
                                           int64_t begin, int64_t end) {
  constexpr int kSize = sizeof(Word);
#pragma unroll 1
  for (int64_t at = begin + threadIdx.x * kSize; at < end;
       at += int64_t{kThreads} * kUnroll * kSize) {
    Word words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t place = at + int64_t{i} * kThreads * kSize;
      if (place < end) words[i] = *reinterpret_cast<const Word*>(from + place);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t place = at + int64_t{i} * kThreads * kSize;
      if (place < end) *reinterpret_cast<Word*>(to + place) = words[i];
    }
  }
}

// Bytes as they are. Rows lie at any even address: the widest words that both ends allow.
template <bool kToHost>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ RowTable table, unsigned char* device_rows, int64_t m,
              int64_t row_bytes, int64_t stride_bytes) {
  const int64_t begin = blockIdx.x * kChunkBytes;
  const int64_t end = begin + kChunkBytes < row_bytes ? begin + kChunkBytes : row_bytes;
#pragma unroll 1
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    unsigned char* host = table.row(row);
    unsigned char* device = device_rows + row * stride_bytes;
    const unsigned char* from = kToHost ? device : host;
    unsigned char* to = kToHost ? host : device;
    const uint64_t all = reinterpret_cast<uint64_t>(host) | reinterpret_cast<uint64_t>(device) |
                         static_cast<uint64_t>(row_bytes);
    if (all % sizeof(uint4) == 0) {
      copy_words<uint4>(from, to, begin, end);
    } else if (all % sizeof(uint32_t) == 0) {
      copy_words<uint32_t>(from, to, begin, end);
    } else {
      copy_words<uint16_t>(from, to, begin, end);
    }
  }
}

__device__ __forceinline__ void convert(uint16_t from, uint16_t& to) { to = from; }
__device__ __forceinline__ void convert(uint32_t from, uint32_t& to) { to = from; }
__device__ __forceinline__ void convert(float from, __half& to) { to = __float2half_rn(from); }
__device__ __forceinline__ void convert(float from, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(from);
}

// fp32 in, 16 bits out. Four at a time where rows are aligned.
template <typename To>
__global__ void __launch_bounds__(kThreads)
    convert_rows(const __grid_constant__ RowTable table, To* device_rows, int64_t m,
                 int64_t columns, int64_t stride) {
  constexpr int kWide = 4;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    const float* from = reinterpret_cast<const float*>(table.row(row));
    To* to = device_rows + row * stride;
    const bool wide = reinterpret_cast<uint64_t>(from) % sizeof(float4) == 0 &&
                      reinterpret_cast<uint64_t>(to) % (kWide * sizeof(To)) == 0;
    const int64_t quads = wide ? columns / kWide : 0;
    for (int64_t quad = first; quad < quads; quad += step) {
      const float4 four = reinterpret_cast<const float4*>(from)[quad];
      union {
        To items[kWide];
        uint2 word;
      } out = {};
      convert(four.x, out.items[0]);
      convert(four.y, out.items[1]);
      convert(four.z, out.items[2]);
      convert(four.w, out.items[3]);
      reinterpret_cast<uint2*>(to)[quad] = out.word;
    }
    for (int64_t column = quads * kWide + first; column < columns; column += step) {
      convert(from[column], to[column]);
    }
  }
}

// A row crosses the bus once and in order, is turned in shared memory, and leaves in order: column
// by column across the bus would cost a transaction each.
template <typename From, typename To>
__global__ void __launch_bounds__(kRowThreads)
    permute_rows(const __grid_constant__ RowTable table, const int32_t* __restrict__ permutation,
                 To* __restrict__ device_rows, int64_t m, int64_t columns, int64_t stride) {
  extern __shared__ uint4 shared[];
  To* row_items = reinterpret_cast<To*>(shared);
  constexpr int kWide = sizeof(uint4) / sizeof(From);
  for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
    const From* from = reinterpret_cast<const From*>(table.row(row));
    const bool wide = reinterpret_cast<uint64_t>(from) % sizeof(uint4) == 0;
    const int64_t groups = wide ? columns / kWide : 0;
    for (int64_t group = threadIdx.x; group < groups; group += kRowThreads) {
      union {
        uint4 word;
        From items[kWide];
      } in;
      in.word = reinterpret_cast<const uint4*>(from)[group];
#pragma unroll
      for (int i = 0; i < kWide; ++i) convert(in.items[i], row_items[group * kWide + i]);
    }
    for (int64_t i = groups * kWide + threadIdx.x; i < columns; i += kRowThreads) {
      convert(from[i], row_items[i]);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < columns; i += kRowThreads) {
      device_rows[row * stride + i] = row_items[permutation[i]];
    }
    __syncthreads();
  }
}

dim3 grid_of(int64_t columns, int64_t per_block, int64_t m) {
  return dim3(static_cast<unsigned>((columns + per_block - 1) / per_block),
              static_cast<unsigned>(m < kMostRowBlocks ? m : kMostRowBlocks));
}

template <bool kToHost>
cudaError_t launch_copy(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  const int64_t item = item_bytes(rows.device_dtype), bytes = rows.columns * item;
  copy_rows<kToHost><<<grid_of(bytes, kChunkBytes, rows.m), kThreads, 0, stream>>>(
      table, static_cast<unsigned char*>(rows.device_rows), rows.m, bytes, rows.row_stride * item);
  return cudaGetLastError();
}

template <typename To>
cudaError_t launch_convert(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  convert_rows<To><<<grid_of(rows.columns, 4 * kThreads, rows.m), kThreads, 0, stream>>>(
      table, static_cast<To*>(rows.device_rows), rows.m, rows.columns, rows.row_stride);
  return cudaGetLastError();
}

template <typename From, typename To>
cudaError_t launch_permute(const ql_cuda_rows& rows, const RowTable& table, cudaStream_t stream) {
  const int shared_bytes = static_cast<int>(rows.columns * sizeof(To));
  const auto kernel = permute_rows<From, To>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(rows.m < kMostRowBlocks ? rows.m : kMostRowBlocks);
  kernel<<<blocks, kRowThreads, shared_bytes, stream>>>(table, rows.permutation,
                                                        static_cast<To*>(rows.device_rows), rows.m,
                                                        rows.columns, rows.row_stride);
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
