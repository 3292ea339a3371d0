// float16 and bfloat16 to float and back, in plain integer code that any compiler takes.
// Narrowing rounds to nearest even, overflows to infinity and keeps NaN a (quiet) NaN, as IEEE 754
// and torch do; tests compare every 16-bit pattern.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_params.h"

#ifndef QL_BODY_NAMESPACE
#error "define QL_BODY_NAMESPACE: copies compiled for different processors must not be merged"
#endif

namespace qlinear::cpu {
namespace QL_BODY_NAMESPACE {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bf16_to_float(uint16_t value) {
  return bits_float(static_cast<uint32_t>(value) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x0040u);
  // Half of the last kept place, less one bit when that place is even: nearest, ties to even.
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float f16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t exponent = value >> 10 & 0x1fu;
  const uint32_t mantissa = value & 0x3ffu;
  if (exponent == 0x1fu) return bits_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112u) << 23 | mantissa << 13);
  // Zero and subnormals are mantissa * 2^-24, which float holds exactly.
  return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  }
  // From 65520 on (the middle between 65504 and 65536) everything rounds to infinity.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the mantissa, rounded by the FPU.
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

inline float load_float(const void* base, int64_t index, int dtype) {
  if (dtype == QL_F32) return static_cast<const float*>(base)[index];
  const uint16_t bits = static_cast<const uint16_t*>(base)[index];
  return dtype == QL_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

inline void store_float(void* base, int64_t index, int dtype, float value) {
  if (dtype == QL_F32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] =
        dtype == QL_F16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

}  // namespace QL_BODY_NAMESPACE
}  // namespace qlinear::cpu
