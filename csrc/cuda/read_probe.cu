// Reads memory and does nothing else: the time below which no kernel that reads as much can get.
// Which way of reading is fastest depends on the size, so there are several; callers take the best.
#include "cuda/host.h"
#include "cuda/primitives.cuh"

namespace qlinear::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint4 load_streaming(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ __forceinline__ uint32_t mix(uint4 value) {
  return value.x ^ value.y ^ value.z ^ value.w;
}

// Each block reads one contiguous stretch, kLoads vectors per thread at a time. The sum of all that
// was read decides about a store, so that no read can be left out.
template <int kLoads>
__global__ void __launch_bounds__(kThreads)
    read(const uint4* __restrict__ from, int64_t vectors, uint32_t* sink) {
  const int64_t per_block = (vectors + gridDim.x - 1) / gridDim.x;
  const int64_t begin = per_block * blockIdx.x;
  const int64_t end = begin + per_block < vectors ? begin + per_block : vectors;
  uint32_t sum = 0;
  int64_t i = begin + threadIdx.x;
  for (; i + (kLoads - 1) * kThreads < end; i += kLoads * kThreads) {
    uint4 values[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      values[load] = load_streaming(from + i + load * kThreads);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) sum ^= mix(values[load]);
  }
  for (; i < end; i += kThreads) sum ^= mix(load_streaming(from + i));
  if (sum == 0x9e3779b9u) *sink = sum;
}

// The same through a ring in shared memory, as the linear kernels read: every thread copies what it
// uses itself.
template <int kStages, int kLoads>
__global__ void __launch_bounds__(kThreads)
    read_ring(const uint4* __restrict__ from, int64_t vectors, uint32_t* sink) {
  extern __shared__ __align__(128) unsigned char ring[];
  const int64_t steps = vectors / (kThreads * kLoads);
  const int64_t begin = steps * blockIdx.x / gridDim.x, end = steps * (blockIdx.x + 1) / gridDim.x;
  const uint32_t base = shared_address(ring) + threadIdx.x * 16;
  const auto fetch = [&](int64_t step, int stage) {
    if (step < end) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        copy_async(base + (stage * kLoads + load) * kThreads * 16,
                   from + (step * kLoads + load) * kThreads + threadIdx.x);
      }
    }
    copy_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(begin + stage, stage);
  uint32_t sum = 0;
  int stage = 0;
  for (int64_t step = begin; step < end; ++step) {
    copy_wait<kStages - 2>();
    fetch(step + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      sum ^= mix(load_shared_16(base + (stage * kLoads + load) * kThreads * 16));
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  if (blockIdx.x == 0) {
    for (int64_t i = steps * kThreads * kLoads + threadIdx.x; i < vectors; i += kThreads) {
      sum ^= mix(load_streaming(from + i));
    }
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

__global__ void empty() {}

constexpr int kRingBytes = 8 * 2 * kThreads * 16;  // 64 KiB: one block fits on every GPU

struct Variant {
  int loads, blocks_per_sm;  // loads 0: through the ring
};
constexpr Variant kVariants[] = {{8, 2}, {8, 4}, {8, 6}, {8, 8}, {4, 4}, {4, 8}, {0, 1}, {0, 2}};

cudaError_t launch_read(const Variant& variant, const uint4* from, int64_t vectors, uint32_t* sink,
                        int sm_count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(variant.blocks_per_sm * sm_count);
  if (variant.loads == 8) {
    read<8><<<blocks, kThreads, 0, stream>>>(from, vectors, sink);
  } else if (variant.loads == 4) {
    read<4><<<blocks, kThreads, 0, stream>>>(from, vectors, sink);
  } else {
    const cudaError_t error = cudaFuncSetAttribute(
        read_ring<8, 2>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
    if (error != cudaSuccess) return error;
    read_ring<8, 2><<<blocks, kThreads, kRingBytes, stream>>>(from, vectors, sink);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace qlinear::cuda

using namespace qlinear::cuda;

extern "C" int ql_cuda_read_variants(void) { return sizeof kVariants / sizeof kVariants[0]; }

extern "C" int ql_cuda_read_probe(const void* buffer, int64_t bytes, int variant, void* sink,
                                  const ql_cuda_launch* launch) {
  if (buffer == nullptr || sink == nullptr || launch == nullptr) return QL_NULL_POINTER;
  if (bytes < 0 || bytes % 16 != 0) return QL_BAD_SHAPE;
  if (variant < 0 || variant >= ql_cuda_read_variants()) {
    set_error_text("read probe variant %d; there are %d", variant, ql_cuda_read_variants());
    return QL_BAD_PLAN;
  }
  LaunchGuard guard(*launch, "read probe", 0, 0, bytes);
  if (guard.status() != QL_OK) return guard.status();
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  return guard.finish(launch_read(kVariants[variant], static_cast<const uint4*>(buffer), bytes / 16,
                                  static_cast<uint32_t*>(sink), guard.device().sm_count,
                                  guard.stream()));
}

extern "C" int ql_cuda_empty(const ql_cuda_launch* launch) {
  if (launch == nullptr) return QL_NULL_POINTER;
  LaunchGuard guard(*launch, "empty kernel", 0, 0, 0);
  if (guard.status() != QL_OK) return guard.status();
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  empty<<<1, 1, 0, guard.stream()>>>();
  return guard.finish(cudaGetLastError());
}
