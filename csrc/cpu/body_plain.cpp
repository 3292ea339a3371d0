// The plain body: one loop that names every feature of the format, for any processor, and what the
// faster bodies are compared with. It decodes a tile of 16 n x 64 k to float once (exact for 16-bit
// scales) and lets all rows use it. Every row is summed in the same order whatever m is.
#define QL_BODY_NAMESPACE plain

#include <cstdint>

#include "cpu/body.h"
#include "cpu/half.h"
#include "cpu/rows.h"
#include "layout.h"

namespace qlinear::cpu {
namespace plain {
namespace {

using layout::kTileK;
using layout::kTileN;

int64_t row_bytes(const ql_linear_params& p) {
  return layout::round_up(p.k, layout::kPadK) * static_cast<int64_t>(sizeof(float));
}

void prepare_row(const ql_linear_params& p, int64_t row, char* out) {
  widen(p, row, 0, static_cast<int>(layout::round_up(p.k, layout::kPadK)),
        reinterpret_cast<float*>(out));
}

// Decodes one tile to weights[k][n], scale applied.
void decode_tile(const ql_linear_params& p, int64_t n_block, int64_t k_tile, int64_t k_padded,
                 float (*weights)[kTileN]) {
  const int64_t groups = layout::group_count(k_padded, p.group_size);
  const auto* bytes = static_cast<const uint8_t*>(p.qweight);
  const int mask = (1 << p.bits) - 1;
  const float middle = static_cast<float>(1 << (p.bits - 1));
  for (int k = 0; k < kTileK; ++k) {
    const int64_t group = layout::group_of(k_tile * kTileK + k, p.group_size);
    for (int n = 0; n < kTileN; ++n) {
      const auto place =
          layout::code_place(n_block * kTileN + n, k_tile * kTileK + k, k_padded, p.bits);
      const int code = bytes[place.byte] >> place.shift & mask;
      const int64_t at = layout::scale_index(group, n_block * kTileN + n, groups);
      const float zero = p.zeros == nullptr ? middle : static_cast<float>(p.zeros[at]);
      weights[k][n] = (static_cast<float>(code) - zero) * load_float(p.scales, at, p.scale_dtype);
    }
  }
}

void multiply_block(const ql_linear_params& p, const char* x, int64_t n_block, int64_t first_row,
                    int64_t rows) {
  constexpr int64_t kMostRows = 32;  // their sums stay in a core's first cache
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  float weights[kTileK][kTileN];
  for (int64_t begin = 0; begin < rows; begin += kMostRows) {
    const int64_t some = rows - begin < kMostRows ? rows - begin : kMostRows;
    float sums[kMostRows][kTileN] = {};
    for (int64_t k_tile = 0; k_tile < k_padded / kTileK; ++k_tile) {
      decode_tile(p, n_block, k_tile, k_padded, weights);
      for (int64_t row = 0; row < some; ++row) {
        const float* x_tile =
            reinterpret_cast<const float*>(x) + (begin + row) * k_padded + k_tile * kTileK;
        for (int k = 0; k < kTileK; ++k) {
          for (int n = 0; n < kTileN; ++n) sums[row][n] += x_tile[k] * weights[k][n];
        }
      }
    }
    for (int64_t row = 0; row < some; ++row) {
      store_row(p, first_row + begin + row, n_block, sums[row]);
    }
  }
}

}  // namespace
}  // namespace plain

const Body kPlainBody = {QL_BODY_PLAIN, plain::row_bytes, plain::prepare_row,
                         plain::multiply_block};

}  // namespace qlinear::cpu
