// wgmma over the packed layout, as plainly as possible: proof that layout.h feeds it, not a fast
// path. One warpgroup computes 64 output features by kTokens rows of x; weights go from the packed
// words into the register operand, x is read from shared memory through a descriptor.
//
// Everything about registers, descriptors and order is from the PTX ISA, "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Operations" (wgmma). It is typed anew here, on purpose without
// the fragments of csrc/cuda.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "layout.h"

namespace wgmma {

namespace layout = qlinear::layout;

enum class Item { kF16, kBF16, kF32 };

// One step is a tile of the layout: 64 k, so a row of x is 128 bytes, eight chunks of 16 bytes.
inline constexpr int kStepK = layout::kTileK;
inline constexpr int kRowChunks = kStepK * 2 / 16;

// Where x lies in shared memory, and what the descriptor says about it. B is "K-major": k varies
// fastest. Its unit is the core matrix: 8 rows of 16 bytes (8 k). One instruction reads 16 k: two
// core matrices side by side along k, and kTokens / 8 along the rows of x.
//
//   plain     no swizzle: the 8 rows of a core matrix lie together, 128 bytes. Core matrices of the
//             same rows follow each other along k, so
//             leading dimension byte offset (from one core matrix to the next along k)   128
//             stride dimension byte offset (from one core matrix to the next 8 rows)    1024
//   swizzled  128-byte swizzle: rows of 128 bytes follow each other, and chunk c of row r lies at
//             place c ^ (r % 8): bits 4 to 6 of the address are combined with bits 7 to 9. The
//             pattern repeats every 1024 bytes and must begin at a multiple of that, so the base
//             offset is 0;
//             leading dimension byte offset: not used; by convention 16
//             stride dimension byte offset (from 8 rows to the next 8)                  1024
struct Placement {
  const char* name;
  bool swizzled;
  int leading_bytes, stride_bytes;
  bool is_right;  // by the manual; the others are there to tell which reading of it is
};

inline constexpr Placement kPlacements[] = {
    {"plain", false, 128, 1024, true},
    {"swizzled", true, 16, 1024, true},
    {"swizzled, leading offset 0", true, 0, 1024, true},
    {"plain, offsets swapped", false, 1024, 128, false},
    {"swizzled, offsets swapped", true, 1024, 16, false},
};

__host__ __device__ constexpr int offset_of(const Placement& placement, int row, int chunk) {
  return placement.swizzled ? row * 128 + (chunk ^ (row % 8)) * 16
                            : row / 8 * 1024 + chunk * 128 + row % 8 * 16;
}

// What the hardware reads for (row, chunk of two) from a start address, by the canonical layouts of
// the manual; the base is a multiple of 1024.
constexpr int described_offset(const Placement& placement, int start, int row, int chunk) {
  if (!placement.swizzled) {
    return start + row % 8 * 16 + row / 8 * placement.stride_bytes +
           chunk * placement.leading_bytes;
  }
  const int linear = start + row % 8 * 128 + row / 8 * placement.stride_bytes + chunk * 16;
  return linear ^ (linear >> 3 & 0x70);
}

// From one block of 16 k to the next: two core matrices, or 32 bytes within the swizzled row.
__host__ __device__ constexpr int block_bytes(const Placement& placement) {
  return placement.swizzled ? 32 : 256;
}

constexpr bool describes_what_is_stored(const Placement& placement) {
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < kRowChunks; ++chunk) {
      const int start = chunk / 2 * block_bytes(placement);
      if (described_offset(placement, start, row, chunk % 2) != offset_of(placement, row, chunk)) {
        return false;
      }
    }
  }
  return true;
}
static_assert(describes_what_is_stored(kPlacements[0]) && describes_what_is_stored(kPlacements[1]));
static_assert(describes_what_is_stored(kPlacements[2]));
static_assert(!describes_what_is_stored(kPlacements[3]));
static_assert(!describes_what_is_stored(kPlacements[4]));

// The matrix descriptor. Addresses and offsets lose their low four bits and keep 14.
//   bits  0 - 13 start address      bits 32 - 45 stride dimension byte offset
//   bits 16 - 29 leading dimension  bits 49 - 51 base offset, 0: patterns begin at their alignment
//                byte offset        bits 62 - 63 swizzle: 0 none, 1 128 bytes, 2 64, 3 32
__device__ __forceinline__ uint64_t descriptor(const Placement& placement, uint32_t address) {
  const auto encode = [](uint32_t value) { return static_cast<uint64_t>((value & 0x3ffff) >> 4); };
  return encode(address) | encode(static_cast<uint32_t>(placement.leading_bytes)) << 16 |
         encode(static_cast<uint32_t>(placement.stride_bytes)) << 32 |
         (placement.swizzled ? uint64_t{1} << 62 : 0);
}

// Orders this thread's accesses to registers before those of the next wgmma: needed before the
// first one and whenever sums or weights were touched in between.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_all() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Orders ordinary stores to shared memory before reads by wgmma, which uses the async proxy; to be
// followed by a barrier.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The compiler must neither move uses of these registers across here nor reuse them before.
template <int kCount>
__device__ __forceinline__ void hold(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
__device__ __forceinline__ void hold(uint32_t (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// sums[64 x kTokens] = A[64 x 16] * B[16 x kTokens] (+ sums). Of A, warp w holds rows 16 w to
// 16 w + 15; lane 4 g + t holds (row, k): register 0 (g, 2t), (g, 2t + 1); 1 (g + 8, 2t), ...;
// 2 (g, 2t + 8), ...; 3 (g + 8, 2t + 8), ...: the fragment of mma.m16n8k16. Of the sums it holds,
// for every 8 columns c, (g, c + 2t), (g, c + 2t + 1), (g + 8, c + 2t), (g + 8, c + 2t + 1).
// The immediates: A and B are not negated; B is not transposed, that is, K-major.
template <typename T, int kTokens>
__device__ void multiply(float (&sums)[kTokens / 2], const uint32_t (&a)[4], uint64_t b,
                         int accumulate);

#define WGMMA(CTYPE, TYPE, TOKENS, SUMS, A, B, ACCUMULATE, ...)                            \
  template <>                                                                              \
  __device__ __forceinline__ void multiply<CTYPE, TOKENS>(                                 \
      float (&d)[TOKENS / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE                               \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." TYPE "." TYPE \
                 " {" SUMS "}, {" A "}, " B ", p, 1, 1, 0;}"                               \
                 : __VA_ARGS__                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)     \
                 : "memory");                                                              \
  }
#define FOUR(at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define EIGHT(at) FOUR(at), FOUR(at + 4)
#define SUMS_4 "%0, %1, %2, %3"
#define SUMS_8 SUMS_4 ", %4, %5, %6, %7"
#define SUMS_32                                                                     \
  SUMS_8                                                                            \
  ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23," \
  " %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_OF(CTYPE, TYPE)                                                             \
  WGMMA(CTYPE, TYPE, 8, SUMS_4, "%4, %5, %6, %7", "%8", "%9", FOUR(0))                    \
  WGMMA(CTYPE, TYPE, 16, SUMS_8, "%8, %9, %10, %11", "%12", "%13", EIGHT(0))              \
  WGMMA(CTYPE, TYPE, 64, SUMS_32, "%32, %33, %34, %35", "%36", "%37", EIGHT(0), EIGHT(8), \
        EIGHT(16), EIGHT(24))
WGMMA_OF(__half, "f16")
WGMMA_OF(__nv_bfloat16, "bf16")

struct Problem {
  const unsigned char *x, *qweight, *scales, *zeros;  // zeros may be null
  float* y;                                           // [m, n]
  int m, n, k, k_padded, bits, group_size;
  Item scale_item;
};

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  const T values[2] = {T(low), T(high)};  // small integers: exact
  uint32_t bits;
  memcpy(&bits, values, sizeof bits);
  return bits;
}

template <typename T, int kTokens>
struct Kernel {
  const Problem& problem;
  const Placement& placement;
  unsigned char* const shared_x;
  const int lane = threadIdx.x % 32;
  const int n_block = blockIdx.x * 4 + threadIdx.x / 32;  // of 16 features: one for each warp
  const int first_token = blockIdx.y * kTokens;
  const int group_k = problem.group_size == -1 ? problem.k_padded : problem.group_size;
  const int groups = problem.k_padded / group_k;

  // Rows of x of one step, zero beyond the last row and the last k.
  __device__ void store_x(int k0) {
    const T* x = reinterpret_cast<const T*>(problem.x);
    for (int i = threadIdx.x; i < kTokens * kRowChunks; i += blockDim.x) {
      const int row = i / kRowChunks, chunk = i % kRowChunks, token = first_token + row;
      T values[8];
      for (int j = 0; j < 8; ++j) {
        const int k = k0 + chunk * 8 + j;
        const bool exists = token < problem.m && k < problem.k;
        values[j] = exists ? x[static_cast<int64_t>(token) * problem.k + k] : T(0.0f);
      }
      uint4 bits;
      memcpy(&bits, values, sizeof bits);
      *reinterpret_cast<uint4*>(shared_x + offset_of(placement, row, chunk)) = bits;
    }
  }

  // This lane's codes of a step: four 16-byte words at 4 bits, eight at 8 bits, in order of k.
  __device__ void load_codes(int k0, uint32_t (&words)[8]) {
    const int64_t tile = n_block * (problem.k_padded / kStepK) + k0 / kStepK;
    const unsigned char* from = problem.qweight + tile * layout::tile_bytes(problem.bits);
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
      if (vector == 1 && problem.bits == 4) break;
      const uint4 four = *reinterpret_cast<const uint4*>(from + (vector * 32 + lane) * 16);
      words[4 * vector] = four.x;
      words[4 * vector + 1] = four.y;
      words[4 * vector + 2] = four.z;
      words[4 * vector + 3] = four.w;
    }
  }

  // Zero points of rows g and g + 8, which lie side by side.
  __device__ float2 zeros_of(int group) const {
    if (problem.zeros == nullptr) {
      const float middle = static_cast<float>(1 << (problem.bits - 1));
      return make_float2(middle, middle);
    }
    const unsigned char* at =
        problem.zeros + layout::scale_index(group, 16 * n_block + lane / 4, groups);
    return make_float2(at[0], at[1]);
  }

  __device__ float scale_at(int64_t index) const {
    if (problem.scale_item == Item::kF32) {
      return reinterpret_cast<const float*>(problem.scales)[index];
    }
    return problem.scale_item == Item::kF16
               ? __half2float(reinterpret_cast<const __half*>(problem.scales)[index])
               : __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(problem.scales)[index]);
  }

  // Register i of the operand: the pair (k, k + 1) of codes that a mask leaves in both halves.
  __device__ void operand(const uint32_t (&words)[8], int block, float2 zeros, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = problem.bits == 4
                                ? words[block] >> (4 * i) & 0x000f000f
                                : words[2 * block + i / 2] >> (8 * (i % 2)) & 0x00ff00ff;
      const float zero = i % 2 == 0 ? zeros.x : zeros.y;
      a[i] = pair_of<T>(static_cast<float>(pair & 0xffff) - zero,
                        static_cast<float>(pair >> 16) - zero);
    }
  }

  __device__ void apply_scales(int group, const float (&sums)[kTokens / 2],
                               float (&totals)[kTokens / 2]) const {
    const int64_t index = layout::scale_index(group, 16 * n_block + lane / 4, groups);
    const float scale_g = scale_at(index), scale_g8 = scale_at(index + 1);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) totals[i] += (i / 2 % 2 ? scale_g8 : scale_g) * sums[i];
  }

  __device__ void store_y(const float (&totals)[kTokens / 2]) const {
    for (int i = 0; i < kTokens / 2; ++i) {
      const int n = 16 * n_block + lane / 4 + 8 * (i / 2 % 2);
      const int token = first_token + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      if (n < problem.n && token < problem.m) {
        problem.y[static_cast<int64_t>(token) * problem.n + n] = totals[i];
      }
    }
  }

  // Blocks kFirst to kLast - 1 of 16 k of a step, all of one scale group; its scales, where the
  // group ends with them. Without a branch, so that the wgmma stand next to each other.
  template <int kFirst, int kLast>
  __device__ void multiply_blocks(const uint32_t (&words)[8], int k0, float (&sums)[kTokens / 2],
                                  float (&totals)[kTokens / 2]) {
    const int begin = k0 + 16 * kFirst, end = k0 + 16 * kLast;
    const float2 zeros = zeros_of(begin / group_k);
    const int continues_group = begin % group_k != 0;
    const uint32_t x = static_cast<uint32_t>(__cvta_generic_to_shared(shared_x));
    uint32_t a[kLast - kFirst][4];
#pragma unroll
    for (int i = 0; i < kLast - kFirst; ++i) operand(words, kFirst + i, zeros, a[i]);
#pragma unroll
    for (int i = 0; i < kLast - kFirst; ++i) hold(a[i]);
    hold(sums);
    fence();
#pragma unroll
    for (int i = 0; i < kLast - kFirst; ++i) {
      const uint64_t b = descriptor(placement, x + (kFirst + i) * block_bytes(placement));
      multiply<T, kTokens>(sums, a[i], b, i > 0 || continues_group);
    }
    commit();
    wait_for_all();
    hold(sums);
#pragma unroll
    for (int i = 0; i < kLast - kFirst; ++i) hold(a[i]);
    if (end % group_k == 0) apply_scales(end / group_k - 1, sums, totals);
  }

  __device__ void run() {
    float sums[kTokens / 2] = {}, totals[kTokens / 2] = {};
    for (int k0 = 0; k0 < problem.k_padded; k0 += kStepK) {
      __syncthreads();  // all warps have waited for their reads of the step before
      store_x(k0);
      publish_shared();
      __syncthreads();
      uint32_t words[8] = {};
      load_codes(k0, words);
      if (group_k == 32) {
        multiply_blocks<0, 2>(words, k0, sums, totals);
        multiply_blocks<2, 4>(words, k0, sums, totals);
      } else {
        multiply_blocks<0, 4>(words, k0, sums, totals);
      }
    }
    store_y(totals);
  }
};

template <typename T, int kTokens>
__global__ void __launch_bounds__(128)
    linear(const __grid_constant__ Problem problem, const __grid_constant__ Placement placement) {
  __shared__ alignas(1024) unsigned char shared_x[kTokens * kRowChunks * 16];
  Kernel<T, kTokens>{problem, placement, shared_x}.run();
}

}  // namespace wgmma
