// Operands from codes with fewer instructions than fragments.cuh, for kernels that know the sums of
// x: codes are multiplied with whatever offset their bits give them, and what the offset and the
// zero point add is taken off the fp32 sums of each scale group:
//
//   sum_k x[k] * (code[k] - zero) = (sum_k x[k] * operand[k]) / unit - zero_of(zero) * sum_k x[k]
//
// fp16: a masked code is a subnormal number, code * 2^-24 in the low bits; tensor cores multiply
// subnormal numbers exactly. bf16: 4-bit codes under an exponent of 128. bf16 has no room for 8-bit
// codes either way, so they take their exact form.
//
// zeros_of_sums is that zero_of for rows g and g + 8. The sums of x come from one product more,
// with kMinusOne everywhere in place of weights, so they are in units of row g.
#pragma once

#include "cuda/fragments.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits>
struct RawCodes;

template <>
struct RawCodes<F16, 4> {
  static constexpr bool kOffset = true;
  static constexpr int kWords = 1;
  static constexpr float kUnitLow = 0x1p24f, kUnitHigh = 0x1p20f;  // 1 / unit of rows g and g + 8
  static constexpr uint32_t kMinusOne = 0x80018001u;               // twice, in units of row g
  struct Zeros {};
  static __device__ __forceinline__ Zeros zeros(uint32_t, uint32_t) { return {}; }
  static __device__ __forceinline__ float2 zeros_of_sums(uint32_t low, uint32_t high) {
    return make_float2(static_cast<float>(low), static_cast<float>(high) * (kUnitLow / kUnitHigh));
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros&) {
    const uint32_t word = words[0], next = word >> 8;
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = next & 0x000f000fu;
    a[3] = next & 0x00f000f0u;
  }
};

template <>
struct RawCodes<F16, 8> {
  static constexpr bool kOffset = true;
  static constexpr int kWords = 2;
  static constexpr float kUnitLow = 0x1p24f, kUnitHigh = 0x1p24f;
  static constexpr uint32_t kMinusOne = 0x80018001u;
  struct Zeros {};
  static __device__ __forceinline__ Zeros zeros(uint32_t, uint32_t) { return {}; }
  static __device__ __forceinline__ float2 zeros_of_sums(uint32_t low, uint32_t high) {
    return make_float2(static_cast<float>(low), static_cast<float>(high) * (kUnitLow / kUnitHigh));
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // bytes 0 and 2, then 1 and 3
      a[2 * half] = words[half] & 0x00ff00ffu;
      a[2 * half + 1] = __byte_perm(words[half], 0u, 0x4341);
    }
  }
};

template <>
struct RawCodes<BF16, 4> {
  static constexpr bool kOffset = true;
  static constexpr int kWords = 1;
  static constexpr float kUnitLow = 1.0f, kUnitHigh = 1.0f;
  static constexpr uint32_t kMinusOne = 0xbf80bf80u;
  struct Zeros {};
  static __device__ __forceinline__ Zeros zeros(uint32_t, uint32_t) { return {}; }
  static __device__ __forceinline__ float2 zeros_of_sums(uint32_t low, uint32_t high) {
    return make_float2(static_cast<float>(128 + low), static_cast<float>(128 + high));
  }
  static __device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t* words,
                                                 const Zeros&) {
    const uint32_t word = words[0];
    constexpr uint32_t kMask = 0x000f000fu, kOne = 0x43004300u;
    a[0] = and_or(word, kMask, kOne);
    a[1] = and_or(word >> 4, kMask, kOne);
    a[2] = and_or(word >> 8, kMask, kOne);
    a[3] = and_or(word >> 12, kMask, kOne);
  }
};

// The exact form under the same names.
template <typename Dtype, int kBits>
struct ExactCodes : Codes<Dtype, kBits> {
  static constexpr bool kOffset = false;
  static __device__ __forceinline__ float2 zeros_of_sums(uint32_t, uint32_t) { return {}; }
  static constexpr float kUnitLow = 1.0f, kUnitHigh = 1.0f;
};
template <>
struct RawCodes<BF16, 8> : ExactCodes<BF16, 8> {};

// Either form.
template <typename Dtype, int kBits, bool kRaw>
struct ChosenCodes : RawCodes<Dtype, kBits> {};
template <typename Dtype, int kBits>
struct ChosenCodes<Dtype, kBits, false> : ExactCodes<Dtype, kBits> {};

}  // namespace qlinear::cuda
