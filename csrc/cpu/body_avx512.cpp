// The float32 body with AVX-512: sixteen lanes, codes of 4 bits by table look-up.
#if defined(__x86_64__)
#define QL_BODY_NAMESPACE avx512

#include <immintrin.h>

#include "cpu/body_f32.h"

namespace qlinear::cpu {
namespace avx512 {
namespace {

struct Vec {
  using Floats = __m512;
  static constexpr int kWidth = 16;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats load(const float* from) { return _mm512_load_ps(from); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512i load_words(const uint8_t* from) { return _mm512_load_si512(from); }

  // The codes that begin at bit `shift` of each word. The permutation looks at the lowest 4 bits of
  // an index only, so it masks, converts to float and costs one instruction.
  template <int kBits>
  static Floats code(__m512i words, unsigned shift) {
    const __m512i shifted = _mm512_srli_epi32(words, shift);
    if constexpr (kBits == 4) {
      const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return _mm512_permutexvar_ps(shifted, table);
    } else {
      return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)));
    }
  }

  // a a b b ...: word 4 t + b of a vector belongs to the 16 x 16 block b of its tile.
  static Floats pairs(float a, float b) {
    return _mm512_mask_blend_ps(0xcccc, _mm512_set1_ps(a), _mm512_set1_ps(b));
  }

  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
};

}  // namespace
}  // namespace avx512

const Body kAvx512Body = {QL_BODY_AVX512, avx512::f32_row_bytes, avx512::f32_prepare_row,
                          avx512::f32_multiply_block<avx512::Vec>};

}  // namespace qlinear::cpu
#endif
