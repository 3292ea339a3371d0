// From packed codes to operands of the tensor cores: exact, without a conversion per code.
//
// Integers are placed into the mantissa of a float whose exponent makes one unit in the last place
// worth 1: 0x6400 is 1024 in fp16, 0x4300 is 128 in bf16, 0x4b000000 is 2^23 in fp32. Subtracting
// that number plus the zero point leaves code - zero_point, which all three hold exactly. Scales
// never touch 16-bit numbers: they multiply fp32 sums at the end of each group.
//
// `Zeros` holds the constants that one row of weights needs; `operand` turns the codes of a 16 x 16
// block into the A operand of mma.m16n8k16. Order of codes in a word: layout.h.
#pragma once

#include "cuda/primitives.cuh"
#include "linear_params.h"

namespace qlinear::cuda {

struct F16 {
  using Type = __half;
  static constexpr int kDtype = QL_F16;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

struct BF16 {
  using Type = __nv_bfloat16;
  static constexpr int kDtype = QL_BF16;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

template <typename Dtype, int kBits>
struct Codes;

__device__ __forceinline__ uint32_t twice(uint32_t half_bits) { return half_bits * 0x10001u; }

__device__ __forceinline__ uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// a * b + c, rounded once.
__device__ __forceinline__ uint32_t multiply_add_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// a + b as a * 1 + b: sm_80 has no bf16 addition.
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return result;
}

template <>
struct Codes<F16, 4> {
  static constexpr int kWords = 1;  // of 32 bits in a 16 x 16 block, per lane
  // Row g is subtracted; row g + 8 arrives times 16, so it is scaled and shifted by one fma.
  struct Zeros {
    uint32_t low, high;  // 1024 + zero, and -(64 + zero)
  };
  static __device__ __forceinline__ Zeros zeros(uint32_t row_g, uint32_t row_g8) {
    return {twice(0x6400u + row_g), twice(0xd400u + (row_g8 << 4))};
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros& zeros) {
    const uint32_t word = words[0], next = word >> 8;
    constexpr uint32_t kOne = 0x64006400u, kSixteenth = 0x2c002c00u;
    a[0] = subtract_f16x2(and_or(word, 0x000f000fu, kOne), zeros.low);
    a[1] = multiply_add_f16x2(and_or(word, 0x00f000f0u, kOne), kSixteenth, zeros.high);
    a[2] = subtract_f16x2(and_or(next, 0x000f000fu, kOne), zeros.low);
    a[3] = multiply_add_f16x2(and_or(next, 0x00f000f0u, kOne), kSixteenth, zeros.high);
  }
};

template <>
struct Codes<BF16, 4> {
  static constexpr int kWords = 1;
  struct Zeros {
    uint32_t low, high;  // -(128 + zero) of rows g and g + 8
  };
  static __device__ __forceinline__ Zeros zeros(uint32_t row_g, uint32_t row_g8) {
    return {twice(0xc300u + row_g), twice(0xc300u + row_g8)};
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros& zeros) {
    const uint32_t word = words[0];
    constexpr uint32_t kMask = 0x000f000fu, kOne = 0x43004300u;
    a[0] = add_bf16x2(and_or(word, kMask, kOne), zeros.low);
    a[1] = add_bf16x2(and_or(word >> 4, kMask, kOne), zeros.high);
    a[2] = add_bf16x2(and_or(word >> 8, kMask, kOne), zeros.low);
    a[3] = add_bf16x2(and_or(word >> 12, kMask, kOne), zeros.high);
  }
};

template <>
struct Codes<F16, 8> {
  static constexpr int kWords = 2;
  struct Zeros {
    uint32_t low, high;  // 1024 + zero of rows g and g + 8
  };
  static __device__ __forceinline__ Zeros zeros(uint32_t row_g, uint32_t row_g8) {
    return {twice(0x6400u + row_g), twice(0x6400u + row_g8)};
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros& zeros) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // bytes 0 and 2, then 1 and 3, each under 0x64
      a[2 * half] = subtract_f16x2(__byte_perm(words[half], 0x64u, 0x4240), zeros.low);
      a[2 * half + 1] = subtract_f16x2(__byte_perm(words[half], 0x64u, 0x4341), zeros.high);
    }
  }
};

template <>
struct Codes<BF16, 8> {
  static constexpr int kWords = 2;
  struct Zeros {
    float low, high;  // 2^23 + zero: bf16 has too few bits for 8-bit codes in its mantissa
  };
  static __device__ __forceinline__ Zeros zeros(uint32_t row_g, uint32_t row_g8) {
    return {__uint_as_float(0x4b000000u + row_g), __uint_as_float(0x4b000000u + row_g8)};
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros& zeros) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = words[half];
      a[2 * half] = BF16::pack(code<0>(word) - zeros.low, code<2>(word) - zeros.low);
      a[2 * half + 1] = BF16::pack(code<1>(word) - zeros.high, code<3>(word) - zeros.high);
    }
  }

 private:
  template <int kByte>
  static __device__ __forceinline__ float code(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | kByte));
  }
};

// sums += A (16 x 16, row-major fragment) * B (16 x 8), fp32 sums.
template <typename Dtype>
__device__ __forceinline__ void multiply_accumulate(float (&sums)[4], const uint32_t (&a)[4],
                                                    uint32_t b_low, uint32_t b_high);

template <>
__device__ __forceinline__ void multiply_accumulate<F16>(float (&sums)[4], const uint32_t (&a)[4],
                                                         uint32_t b_low, uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

template <>
__device__ __forceinline__ void multiply_accumulate<BF16>(float (&sums)[4], const uint32_t (&a)[4],
                                                          uint32_t b_low, uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

}  // namespace qlinear::cuda
