// Products of a whole warpgroup on Hopper (sm_90a): wgmma.mma_async, weights in registers and
// activations in shared memory. Formats of operands: PTX ISA, "Asynchronous warpgroup-level matrix
// instructions". A warp's 16 rows of weights lie in registers as for mma.m16n8k16, and so do the
// sums of each 8 columns: the rest of the kernel does not see which instruction multiplied.
#pragma once

#include "cuda/fragments.cuh"

namespace qlinear::cuda {

// Where the right operand lies, as the low word of its descriptor: the address in units of 16
// bytes, and a field that this mode does not use. A product further along k adds to it.
__device__ __forceinline__ uint32_t activation_descriptor(uint32_t address) {
  return (address & 0x3ffff) >> 4 | 1u << 16;
}
// The high word: 128-byte swizzle, eight rows of 128 bytes before the next eight.
inline constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;

// Before a first product, and after registers that products read or add to were written.
__device__ __forceinline__ void warpgroup_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// sums (of 64 x kColumns, this thread's share) = [sums +] weights (64 x 16) * activations.
template <typename Dtype, int kTokenBlocks>
struct WarpgroupProduct;

// Sums of one block of 8 columns as operands, and their places in the instruction's text.
#define QL_SUMS(block) \
  "+f"(sums[block][0]), "+f"(sums[block][1]), "+f"(sums[block][2]), "+f"(sums[block][3])
#define QL_SUMS_4(first) QL_SUMS(first), QL_SUMS(first + 1), QL_SUMS(first + 2), QL_SUMS(first + 3)
#define QL_SUMS_16(first) \
  QL_SUMS_4(first), QL_SUMS_4(first + 4), QL_SUMS_4(first + 8), QL_SUMS_4(first + 12)

#define QL_PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QL_PLACES_16 QL_PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QL_PLACES_32 \
  QL_PLACES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QL_PLACES_64                                                                             \
  QL_PLACES_32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define QL_PLACES_96                                                                             \
  QL_PLACES_64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define QL_WARPGROUP_PRODUCT(DTYPE, NAME, BLOCKS, COLUMNS, PLACES, A, LOW, HIGH, ADD, ...)       \
  template <>                                                                                    \
  struct WarpgroupProduct<DTYPE, BLOCKS> {                                                       \
    static __device__ __forceinline__ void run(float (&sums)[BLOCKS][4], const uint32_t (&a)[4], \
                                               uint32_t b, bool add) {                           \
      asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 d;\n\tsetp.ne.b32 p, " ADD                   \
                   ", 0;\n\tmov.b64 d, {" LOW ", " HIGH                                          \
                   "};\n\t"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." NAME "." NAME          \
                   " {" PLACES "}, {" A "}, d, p, 1, 1, 0;\n\t}"                                 \
                   : __VA_ARGS__                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(kDescriptorHigh),   \
                     "r"(static_cast<int>(add)));                                                \
    }                                                                                            \
  };

#define QL_WARPGROUP_PRODUCTS(DTYPE, NAME)                                                         \
  QL_WARPGROUP_PRODUCT(DTYPE, NAME, 2, "16", QL_PLACES_8, "%8, %9, %10, %11", "%12", "%13", "%14", \
                       QL_SUMS(0), QL_SUMS(1))                                                     \
  QL_WARPGROUP_PRODUCT(DTYPE, NAME, 4, "32", QL_PLACES_16, "%16, %17, %18, %19", "%20", "%21",     \
                       "%22", QL_SUMS_4(0))                                                        \
  QL_WARPGROUP_PRODUCT(DTYPE, NAME, 8, "64", QL_PLACES_32, "%32, %33, %34, %35", "%36", "%37",     \
                       "%38", QL_SUMS_4(0), QL_SUMS_4(4))                                          \
  QL_WARPGROUP_PRODUCT(DTYPE, NAME, 16, "128", QL_PLACES_64, "%64, %65, %66, %67", "%68", "%69",   \
                       "%70", QL_SUMS_16(0))                                                       \
  QL_WARPGROUP_PRODUCT(DTYPE, NAME, 24, "192", QL_PLACES_96, "%96, %97, %98, %99", "%100", "%101", \
                       "%102", QL_SUMS_16(0), QL_SUMS_4(16), QL_SUMS_4(20))

QL_WARPGROUP_PRODUCTS(F16, "f16")
QL_WARPGROUP_PRODUCTS(BF16, "bf16")

#undef QL_WARPGROUP_PRODUCTS
#undef QL_WARPGROUP_PRODUCT
#undef QL_PLACES_96
#undef QL_PLACES_64
#undef QL_PLACES_32
#undef QL_PLACES_16
#undef QL_PLACES_8
#undef QL_SUMS_16
#undef QL_SUMS_4
#undef QL_SUMS

// Keeps the compiler from moving uses of sums over a wait.
template <int kTokenBlocks>
__device__ __forceinline__ void hold_block(float (&sums)[kTokenBlocks][4]) {
#pragma unroll
  for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[token][i])::"memory");
  }
}

}  // namespace qlinear::cuda
