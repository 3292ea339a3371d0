// Products in bfloat16 with AVX512_BF16, for 4-bit codes: twice the multiply-adds per instruction.
//
// Nothing is rounded on the way in. code - zero is an integer of at most 8 bits, which bfloat16
// holds exactly, and x is split into bfloat16 parts that add up to it exactly: one for bfloat16 x,
// two for float16 (11 significant bits), three for float32. vdpbf16ps multiplies exactly and adds
// in float32. It treats values below 2^-126 as zero, which only bfloat16 x can hold.
//
// The two 16-bit halves of a word are k and k + 1 of one row, which is the pair that vdpbf16ps
// wants. A permutation with the codes as indices looks up code - zero: it reads the lowest 5 bits
// of each half, so a table of 16 values, stored twice, needs no mask.
#if defined(__x86_64__)
#define QL_BODY_NAMESPACE avx512_bf16

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/body.h"
#include "cpu/columns.h"
#include "cpu/rows.h"
#include "layout.h"

namespace qlinear::cpu {
namespace avx512_bf16 {
namespace {

using layout::kTileK;
using layout::kTileN;

constexpr int kTileWords = kTileK / 2;  // pairs of bfloat16 in one part of a tile

int parts_of(const ql_linear_params& p) {
  const int dtype = p.x_dtype == QL_F32 ? p.compute_dtype : p.x_dtype;
  return dtype == QL_BF16 ? 1 : 2;
}

int64_t row_bytes(const ql_linear_params& p) {
  return layout::round_up(p.k, layout::kPadK) * 2 * parts_of(p);
}

// Which pair of k (k / 2 inside the tile) stands where: two vectors of 16 pairs per tile.
struct PairOrder {
  int pair[kTileWords];
};

constexpr PairOrder pair_order() {
  constexpr TileOrder order = tile_order(4);
  PairOrder pairs = {};
  // Positions q = 0 and 1 of tile_order are the even k of both vectors.
  for (int i = 0; i < kTileWords; ++i) pairs.pair[i] = order.k[i] / 2;
  return pairs;
}

// A row is [tile][part][32 pairs].
void prepare_row(const ql_linear_params& p, int64_t row, char* out) {
  static constexpr PairOrder kOrder = pair_order();
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  const int parts = parts_of(p);
  for (int64_t k = 0; k < k_padded; k += kTileK) {
    float left[kTileK];
    widen(p, row, k, kTileK, left);
    for (int part = 0; part < parts; ++part, out += kTileK * 2) {
      uint16_t rounded[kTileK];
      for (int i = 0; i < kTileK; ++i) {
        rounded[i] = float_to_bf16(left[i]);
        // What this part left over; nothing is left of infinities and NaN.
        const float rest = left[i] - bf16_to_float(rounded[i]);
        left[i] = rest - rest == 0.0f ? rest : 0.0f;
      }
      for (int i = 0; i < kTileWords; ++i) {
        std::memcpy(out + 4 * i, rounded + 2 * kOrder.pair[i], 4);
      }
    }
  }
}

// An integer of -255 .. 255 as bfloat16, exactly.
constexpr uint16_t small_bf16(int value) {
  if (value == 0) return 0;
  const int magnitude = value < 0 ? -value : value;
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  const int mantissa = (magnitude << (7 - exponent)) & 0x7f;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | mantissa);
}

struct alignas(64) Tables {
  uint16_t of_zero[256][16];  // code - zero for each code
};

constexpr Tables make_tables() {
  Tables tables = {};
  for (int zero = 0; zero < 256; ++zero) {
    for (int code = 0; code < 16; ++code) tables.of_zero[zero][code] = small_bf16(code - zero);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

template <bool kSymmetric>
__m512i table_of(float zero) {
  const auto* table = kTables.of_zero[kSymmetric ? 8 : static_cast<int>(zero)];
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)));
}

__m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

// a a b b ...: word 4 t + b of a vector belongs to the 16 x 16 block b of its tile.
constexpr __mmask16 kSecondGroup = 0xcccc;
constexpr __mmask32 kSecondGroupHalves = 0xf0f0f0f0;

struct Block {
  const ql_linear_params& p;
  const uint8_t* tiles;  // of this n-block
  const char* x;         // prepared rows
  int64_t row_bytes;
  int group_shift;
  int64_t rows;  // how many of them there are; a form that takes more repeats the last one
};

template <int kRowsArg, int kPartsArg, int kGroupArg, bool kSymmetricArg>
struct Form {
  static constexpr int kRows = kRowsArg;             // rows of x computed together
  static constexpr int kParts = kPartsArg;           // bfloat16 parts of x
  static constexpr int kGroup = kGroupArg;           // 32, 64, or 128 for anything larger
  static constexpr bool kSymmetric = kSymmetricArg;  // zero is 8 everywhere
};

// code - zero of the codes that begin at bit `shift` of each 16-bit half.
template <class F>
__m512bh decode(__m512i words, unsigned shift, __m512i table, __m512i second) {
  const __m512i index = _mm512_srli_epi32(words, shift);
  const __m512i values = _mm512_permutexvar_epi16(index, table);
  if constexpr (F::kGroup != 32 || F::kSymmetric) return as_bf16(values);
  return as_bf16(_mm512_mask_permutexvar_epi16(values, kSecondGroupHalves, index, second));
}

// 128 k for rows g and g + 8: two tiles.
template <class F>
void multiply_step(const Block& block, const Columns& columns, int64_t k, int step, int g,
                   __m512 (*totals)[F::kRows]) {
  __m512bh weights[2][2][2];  // [tile][row half][k half]
  int64_t groups[2], nexts[2];
  const char* x = block.x + k * 2 * F::kParts;
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile) {
    groups[tile] = (step * kStepK + tile * kTileK) >> block.group_shift;
    nexts[tile] = groups[tile] + (F::kGroup == 32 ? 1 : 0);
    const uint8_t* at = block.tiles + (k + tile * kTileK) * kTileN / 2 + 64 * g;
    const __m512i words = _mm512_load_si512(at);
    // The next chunk's codes, while this one is computed.
    _mm_prefetch(reinterpret_cast<const char*>(at) + kChunkK * kTileN / 2, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i table = table_of<F::kSymmetric>(columns.zero[groups[tile]][2 * g + h]);
      const __m512i second = table_of<F::kSymmetric>(columns.zero[nexts[tile]][2 * g + h]);
      weights[tile][h][0] = decode<F>(words, 4 * h, table, second);
      weights[tile][h][1] = decode<F>(words, 4 * h + 8, table, second);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < F::kRows; ++m) {
    const char* x_row = x + (m < block.rows ? m : block.rows - 1) * block.row_bytes;
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 3
      for (int part = 0; part < F::kParts; ++part) {
        const char* pairs = x_row + (tile * F::kParts + part) * kTileK * 2;
        const __m512bh low = as_bf16(_mm512_load_si512(pairs));
        const __m512bh high = as_bf16(_mm512_load_si512(pairs + 64));
        for (int h = 0; h < 2; ++h) {
          sums[h] = _mm512_dpbf16_ps(sums[h], weights[tile][h][0], low);
          sums[h] = _mm512_dpbf16_ps(sums[h], weights[tile][h][1], high);
        }
      }
      if (F::kGroup >= kStepK && tile == 0) continue;
      for (int h = 0; h < 2; ++h) {
        __m512 scale = _mm512_set1_ps(columns.scale[groups[tile]][2 * g + h]);
        if constexpr (F::kGroup == 32) {
          const __m512 second = _mm512_set1_ps(columns.scale[nexts[tile]][2 * g + h]);
          scale = _mm512_mask_blend_ps(kSecondGroup, scale, second);
        }
        totals[h][m] = _mm512_fmadd_ps(sums[h], scale, totals[h][m]);
        sums[h] = _mm512_setzero_ps();
      }
    }
  }
}

template <class F>
void multiply_rows(const Block& block, int64_t n_block, int64_t first_row) {
  __m512 totals[8][2][F::kRows];
  for (auto& pair : totals) {
    for (int m = 0; m < F::kRows; ++m) pair[0][m] = pair[1][m] = _mm512_setzero_ps();
  }
  const int64_t k_padded = layout::round_up(block.p.k, layout::kPadK);
  Columns columns;
  for (int64_t begin = 0; begin < k_padded; begin += kChunkK) {
    columns.load(block.p, n_block, begin, k_padded);
    const int64_t left = (k_padded - begin) / kStepK;
    const int steps = static_cast<int>(left < kChunkK / kStepK ? left : kChunkK / kStepK);
    for (int g = 0; g < 8; ++g) {
      __m512 pair[2][F::kRows];
      std::memcpy(pair, totals[g], sizeof pair);
      for (int step = 0; step < steps; ++step) {
        multiply_step<F>(block, columns, begin + step * kStepK, step, g, pair);
      }
      std::memcpy(totals[g], pair, sizeof pair);
    }
  }
  for (int m = 0; m < F::kRows && m < block.rows; ++m) {
    alignas(64) float sums[kTileN];
    for (int n = 0; n < kTileN; ++n) sums[n] = _mm512_reduce_add_ps(totals[n % 8][n / 8][m]);
    store_row(block.p, first_row + m, n_block, sums);
  }
}

// Decoding is what a few rows cost most, so 5 to 7 rows are computed as 8 and 2 or 3 as 4.
template <int kParts, int kGroup, bool kSymmetric>
void multiply_all_rows(Block block, int64_t n_block, int64_t first_row, int64_t rows) {
  for (int64_t row = 0; row < rows;) {
    block.rows = rows - row;
    int64_t done = 1;
    if (block.rows > 4) {
      multiply_rows<Form<8, kParts, kGroup, kSymmetric>>(block, n_block, first_row + row);
      done = 8;
    } else if (block.rows > 1) {
      multiply_rows<Form<4, kParts, kGroup, kSymmetric>>(block, n_block, first_row + row);
      done = 4;
    } else {
      multiply_rows<Form<1, kParts, kGroup, kSymmetric>>(block, n_block, first_row + row);
    }
    row += done;
    block.x += done * block.row_bytes;
  }
}

template <int kParts, bool kSymmetric>
void multiply_group(const Block& block, int64_t n_block, int64_t first_row, int64_t rows) {
  switch (block.p.group_size) {
    case 32:
      return multiply_all_rows<kParts, 32, kSymmetric>(block, n_block, first_row, rows);
    case 64:
      return multiply_all_rows<kParts, 64, kSymmetric>(block, n_block, first_row, rows);
    default:
      return multiply_all_rows<kParts, 128, kSymmetric>(block, n_block, first_row, rows);
  }
}

void multiply_block(const ql_linear_params& p, const char* x, int64_t n_block, int64_t first_row,
                    int64_t rows) {
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  const auto* qweight = static_cast<const uint8_t*>(p.qweight);
  const Block block = {
      p,   qweight + n_block * kTileN * k_padded / 2, x, row_bytes(p), group_shift(p.group_size),
      rows};
  if (p.zeros == nullptr) {
    (parts_of(p) == 1 ? multiply_group<1, true> : multiply_group<2, true>)(block, n_block,
                                                                           first_row, rows);
  } else {
    (parts_of(p) == 1 ? multiply_group<1, false> : multiply_group<2, false>)(block, n_block,
                                                                             first_row, rows);
  }
}

}  // namespace
}  // namespace avx512_bf16

const Body kAvx512Bf16Body = {QL_BODY_AVX512_BF16, avx512_bf16::row_bytes, avx512_bf16::prepare_row,
                              avx512_bf16::multiply_block};

}  // namespace qlinear::cpu
#endif
