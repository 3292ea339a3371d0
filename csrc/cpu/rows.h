// Rows of activations in and rows of results out, shared by all bodies.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "cpu/half.h"
#include "layout.h"
#include "linear_params.h"

namespace qlinear::cpu {
namespace QL_BODY_NAMESPACE {

// What float32 x is rounded to before the product, as the tensor cores of a GPU need it.
inline float round_to(float value, int dtype) {
  if (dtype == QL_F16) return f16_to_float(float_to_f16(value));
  if (dtype == QL_BF16) return bf16_to_float(float_to_bf16(value));
  return value;
}

// Row `row` of x in float, rounded to the compute dtype, `count` values from k_begin on; zeros
// beyond k.
inline void widen(const ql_linear_params& p, int64_t row, int64_t k_begin, int count, float* out) {
  const int64_t base = row * p.x_row_stride + k_begin;
  const int64_t left = p.k - k_begin;
  const int real = static_cast<int>(left < 0 ? 0 : (left < count ? left : count));
  int i = 0;
#if defined(__F16C__)
  if (p.x_dtype == QL_F16) {
    const auto* x = static_cast<const uint16_t*>(p.x) + base;
    for (; i + 8 <= real; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
  } else if (p.x_dtype == QL_F32 && p.compute_dtype == QL_F16) {
    const auto* x = static_cast<const float*>(p.x) + base;
    for (; i + 8 <= real; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
  }
#endif
  for (; i < real; ++i) {
    const float value = load_float(p.x, base + i, p.x_dtype);
    out[i] = p.x_dtype == QL_F32 ? round_to(value, p.compute_dtype) : value;
  }
  for (; i < count; ++i) out[i] = 0.0f;
}

// One row of one block: adds the bias, rounds once, leaves out what lies beyond n.
inline void store_row(const ql_linear_params& p, int64_t row, int64_t n_block, float* sums) {
  const int64_t n_begin = n_block * layout::kTileN;
  const int64_t left = p.n - n_begin;
  const int count = static_cast<int>(left < layout::kTileN ? left : layout::kTileN);
  if (p.bias != nullptr) {
    for (int n = 0; n < count; ++n) sums[n] += load_float(p.bias, n_begin + n, p.bias_dtype);
  }
  const int64_t base = row * p.y_row_stride + n_begin;
#if defined(__F16C__)
  if (p.y_dtype == QL_F16 && count == layout::kTileN) {
    auto* y = static_cast<uint16_t*>(p.y) + base;
    for (int n = 0; n < layout::kTileN; n += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(sums + n), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + n), halves);
    }
    return;
  }
#endif
  for (int n = 0; n < count; ++n) store_float(p.y, base + n, p.y_dtype, sums[n]);
}

}  // namespace QL_BODY_NAMESPACE
}  // namespace qlinear::cpu
