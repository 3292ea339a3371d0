// Weights of some output features in float32, row by row in natural order: what a matrix product of
// another library needs. The callers of this take a slab of features at a time, so that the wide
// weights stay in cache and never amount to a second copy of the layer.
#define QL_BODY_NAMESPACE dequantize

#include <cstdint>
#include <cstring>

#include "cpu/columns.h"
#include "layout.h"
#include "linear_params.h"

namespace qlinear::cpu {
namespace dequantize {
namespace {

using layout::kTileK;
using layout::kTileN;

constexpr TileOrder kOrder4 = tile_order(4), kOrder8 = tile_order(8);

// One tile: out[n % 16][k % 64].
void decode_tile(const ql_linear_params& p, const uint8_t* tile, const Columns& columns,
                 int64_t in_chunk, float (*out)[kTileK]) {
  const TileOrder& order = p.bits == 4 ? kOrder4 : kOrder8;
  const uint32_t mask = (1u << p.bits) - 1;
  const int shift = group_shift(p.group_size);
  for (int g = 0; g < 8; ++g) {
    for (int q = 0; q < 4; ++q) {
      // As in body_f32.h: at 8 bits, q counts two vectors of two positions each.
      const int vector = p.bits == 4 ? 0 : q / 2;
      const int position = p.bits == 4 ? q : q % 2;
      uint32_t words[16];
      std::memcpy(words, tile + 512 * vector + 64 * g, sizeof words);
      for (int h = 0; h < 2; ++h) {
        for (int word = 0; word < 16; ++word) {
          const int k = order.k[16 * q + word];
          const int64_t group = (in_chunk + k) >> shift;
          const auto code = static_cast<float>(words[word] >> (p.bits * (2 * position + h)) & mask);
          out[g + 8 * h][k] =
              (code - columns.zero[group][2 * g + h]) * columns.scale[group][2 * g + h];
        }
      }
    }
  }
}

void decode_block(const ql_linear_params& p, int64_t n_block, int64_t features, float* out) {
  const int64_t k_padded = layout::round_up(p.k, layout::kPadK);
  const auto* tiles =
      static_cast<const uint8_t*>(p.qweight) + n_block * kTileN * k_padded * p.bits / 8;
  Columns columns;
  for (int64_t k = 0; k < p.k; k += kTileK) {
    if (k % kChunkK == 0) columns.load(p, n_block, k, k_padded);
    float tile[kTileN][kTileK];
    decode_tile(p, tiles + k * kTileN * p.bits / 8, columns, k % kChunkK, tile);
    const int64_t count = p.k - k < kTileK ? p.k - k : kTileK;
    for (int64_t n = 0; n < features; ++n) {
      std::memcpy(out + n * p.k + k, tile[n], static_cast<size_t>(count) * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace dequantize
}  // namespace qlinear::cpu

extern "C" int ql_cpu_dequantize(const ql_linear_params* params, int64_t n_begin, int64_t n_count,
                                 float* out) {
  using namespace qlinear;
  if (params == nullptr || out == nullptr) return QL_NULL_POINTER;
  const ql_linear_params& p = *params;
  if (p.qweight == nullptr || p.scales == nullptr) return QL_NULL_POINTER;
  if (!layout::bits_supported(p.bits)) return QL_BAD_BITS;
  if (!layout::group_size_supported(p.group_size)) return QL_BAD_GROUP_SIZE;
  if (p.k < 0 || n_begin < 0 || n_count < 0 || n_begin % layout::kTileN != 0 || n_begin > p.n ||
      n_count > p.n - n_begin) {
    return QL_BAD_SHAPE;
  }
  const int64_t n_blocks = (n_count + layout::kTileN - 1) / layout::kTileN;
#pragma omp parallel for num_threads(p.threads < 1 ? 1 : p.threads) if (p.threads > 1)
  for (int64_t block = 0; block < n_blocks; ++block) {
    const int64_t left = n_count - block * layout::kTileN;
    cpu::dequantize::decode_block(p, n_begin / layout::kTileN + block,
                                  left < layout::kTileN ? left : layout::kTileN,
                                  out + block * layout::kTileN * p.k);
  }
  return QL_OK;
}
