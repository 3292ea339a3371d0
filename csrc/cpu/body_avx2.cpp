// The float32 body with AVX2, FMA and F16C: eight lanes.
#if defined(__x86_64__)
#define QL_BODY_NAMESPACE avx2

#include <immintrin.h>

#include "cpu/body_f32.h"

namespace qlinear::cpu {
namespace avx2 {
namespace {

struct Vec {
  using Floats = __m256;
  static constexpr int kWidth = 8;

  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats load(const float* from) { return _mm256_load_ps(from); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256i load_words(const uint8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }

  // The codes that begin at bit `shift` of each word.
  template <int kBits>
  static Floats code(__m256i words, int shift) {
    const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words, shift), mask));
  }

  // a a b b a a b b: word 4 t + b of a vector belongs to the 16 x 16 block b of its tile.
  static Floats pairs(float a, float b) { return _mm256_setr_ps(a, a, b, b, a, a, b, b); }

  static float sum(Floats v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};

}  // namespace
}  // namespace avx2

const Body kAvx2Body = {QL_BODY_AVX2, avx2::f32_row_bytes, avx2::f32_prepare_row,
                        avx2::f32_multiply_block<avx2::Vec>};

}  // namespace qlinear::cpu
#endif
