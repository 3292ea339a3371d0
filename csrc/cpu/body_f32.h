// The float32 body for any vector width: Vec is one instruction set (body_avx2.cpp,
// body_avx512.cpp). 64 bytes of qweight are the codes of rows g and g + 8 of an n-block for 64 k
// (4 bits) or 32 k (8 bits), one output feature per register: products are summed lane by lane
// along k, scaled at the end of each group, and added up across lanes once at the very end.
//
// A row's sums are formed in the same order however many rows are computed together, so the result
// of a row never depends on its neighbours.
#pragma once

#include <cstdint>

#include "cpu/body.h"
#include "cpu/columns.h"
#include "cpu/rows.h"
#include "layout.h"

namespace qlinear::cpu {
namespace QL_BODY_NAMESPACE {

using layout::kTileK;
using layout::kTileN;

// What the inner loops need to know at compile time.
template <int kBitsArg, int kRowsArg, bool kOneScaleArg>
struct Form {
  static constexpr int kBits = kBitsArg;
  static constexpr int kRows = kRowsArg;                 // rows of x computed together
  static constexpr bool kOneScale = kOneScaleArg;        // one scale per step of 128 k
  static constexpr int kSegments = kBits == 4 ? 2 : 4;   // 64-byte vectors of a row pair per step
  static constexpr int kPositions = kBits == 4 ? 4 : 2;  // codes of one row in a 32-bit word
};

inline int64_t f32_row_bytes(const ql_linear_params& p) {
  return layout::round_up(p.k, layout::kPadK) * static_cast<int64_t>(sizeof(float));
}

inline void f32_prepare_row(const ql_linear_params& p, int64_t row, char* out) {
  static constexpr TileOrder kOrder4 = tile_order(4), kOrder8 = tile_order(8);
  const TileOrder& order = p.bits == 4 ? kOrder4 : kOrder8;
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  auto* x = reinterpret_cast<float*>(out);
  for (int64_t k = 0; k < k_padded; k += kTileK) {
    float tile[kTileK];
    widen(p, row, k, kTileK, tile);
    for (int i = 0; i < kTileK; ++i) x[k + i] = tile[order.k[i]];
  }
}

// Everything of one call that does not change inside a block.
struct Block {
  const ql_linear_params& p;
  const uint8_t* tiles;  // of this n-block
  const float* x;        // prepared rows
  int64_t k_padded;
  int group_shift;
  int64_t rows;  // how many rows there are; a form that takes more repeats the last one
};

// The step of 128 k that begins `step` steps into the chunk, for rows g and g + 8.
template <class Vec, class F>
void multiply_step(const Block& block, const Columns& columns, int64_t k, int step, int g,
                   typename Vec::Floats (*totals)[F::kRows]) {
  using Floats = typename Vec::Floats;
  Floats sums[2][F::kRows];
  for (int h = 0; h < 2; ++h) {
    for (int m = 0; m < F::kRows; ++m) sums[h][m] = Vec::zero();
  }
#pragma GCC unroll 4
  for (int segment = 0; segment < F::kSegments; ++segment) {
    constexpr int kSegmentK = kStepK / F::kSegments;
    const int64_t group = (step * kStepK + segment * kSegmentK) >> block.group_shift;
    // At 4 bits and groups of 32, the lanes of one vector belong to two groups.
    const int64_t next =
        F::kBits == 4 && !F::kOneScale && block.group_shift == 5 ? group + 1 : group;
    Floats zeros[2];
    for (int h = 0; h < 2; ++h) {
      zeros[h] = Vec::pairs(columns.zero[group][2 * g + h], columns.zero[next][2 * g + h]);
    }
    const uint8_t* words = block.tiles + (k + segment * kSegmentK) * kTileN * F::kBits / 8;
    const float* x = block.x + k + segment * kSegmentK;
    for (int part = 0; part < 16; part += Vec::kWidth) {
      const auto codes = Vec::load_words(words + 64 * g + 4 * part);
#pragma GCC unroll 4
      for (int q = 0; q < F::kPositions; ++q) {
        const Floats w0 = Vec::template code<F::kBits>(codes, F::kBits * 2 * q) - zeros[0];
        const Floats w1 = Vec::template code<F::kBits>(codes, F::kBits * (2 * q + 1)) - zeros[1];
        for (int m = 0; m < F::kRows; ++m) {
          const int64_t row = m < block.rows ? m : block.rows - 1;
          const Floats xs = Vec::load(x + row * block.k_padded + 16 * q + part);
          sums[0][m] = Vec::fma(w0, xs, sums[0][m]);
          sums[1][m] = Vec::fma(w1, xs, sums[1][m]);
        }
      }
    }
    if (F::kOneScale && segment + 1 < F::kSegments) continue;
    for (int h = 0; h < 2; ++h) {
      const Floats scale =
          Vec::pairs(columns.scale[group][2 * g + h], columns.scale[next][2 * g + h]);
      for (int m = 0; m < F::kRows; ++m) {
        totals[h][m] = Vec::fma(sums[h][m], scale, totals[h][m]);
        sums[h][m] = Vec::zero();
      }
    }
  }
}

template <class Vec, class F>
void multiply_rows(const Block& block, int64_t n_block, int64_t first_row) {
  typename Vec::Floats totals[8][2][F::kRows];
  for (auto& pair : totals) {
    for (int m = 0; m < F::kRows; ++m) pair[0][m] = pair[1][m] = Vec::zero();
  }
  Columns columns;
  for (int64_t begin = 0; begin < block.k_padded; begin += kChunkK) {
    columns.load(block.p, n_block, begin, block.k_padded);
    const int64_t left = (block.k_padded - begin) / kStepK;
    const int steps = static_cast<int>(left < kChunkK / kStepK ? left : kChunkK / kStepK);
    for (int g = 0; g < 8; ++g) {
      for (int step = 0; step < steps; ++step) {
        multiply_step<Vec, F>(block, columns, begin + step * kStepK, step, g, totals[g]);
      }
    }
  }
  for (int m = 0; m < F::kRows && m < block.rows; ++m) {
    alignas(64) float sums[kTileN];
    for (int n = 0; n < kTileN; ++n) sums[n] = Vec::sum(totals[n % 8][n / 8][m]);
    store_row(block.p, first_row + m, n_block, sums);
  }
}

// Decoding is what a few rows cost most, so 2 or 3 rows are computed as 4.
template <class Vec, int kBits, bool kOneScale>
void multiply_all_rows(Block block, int64_t n_block, int64_t first_row, int64_t rows) {
  for (int64_t row = 0; row < rows;) {
    block.rows = rows - row;
    const int64_t done = block.rows > 1 ? 4 : 1;
    if (done == 4) {
      multiply_rows<Vec, Form<kBits, 4, kOneScale>>(block, n_block, first_row + row);
    } else {
      multiply_rows<Vec, Form<kBits, 1, kOneScale>>(block, n_block, first_row + row);
    }
    row += done;
    block.x += done * block.k_padded;
  }
}

template <class Vec>
void f32_multiply_block(const ql_linear_params& p, const char* x, int64_t n_block,
                        int64_t first_row, int64_t rows) {
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  const auto* qweight = static_cast<const uint8_t*>(p.qweight);
  const Block block = {p,
                       qweight + n_block * kTileN * k_padded * p.bits / 8,
                       reinterpret_cast<const float*>(x),
                       k_padded,
                       group_shift(p.group_size),
                       rows};
  const bool one_scale = p.group_size == -1 || p.group_size >= kStepK;
  if (p.bits == 4) {
    (one_scale ? multiply_all_rows<Vec, 4, true>
               : multiply_all_rows<Vec, 4, false>)(block, n_block, first_row, rows);
  } else {
    (one_scale ? multiply_all_rows<Vec, 8, true>
               : multiply_all_rows<Vec, 8, false>)(block, n_block, first_row, rows);
  }
}

}  // namespace QL_BODY_NAMESPACE
}  // namespace qlinear::cpu
