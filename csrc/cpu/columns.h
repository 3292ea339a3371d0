// Scales and zero points of one n-block, widened to float for a stretch of k.
//
// Bodies walk k in chunks of kChunkK: the activations of a few rows and the codes of one n-block
// then stay in a core's first cache, and scales are converted once per chunk instead of once per
// use.
#pragma once

#include <cstdint>

#include "cpu/half.h"
#include "layout.h"
#include "linear_params.h"

namespace qlinear::cpu {
namespace QL_BODY_NAMESPACE {

inline constexpr int kChunkK = 1024;
inline constexpr int kStepK = layout::kPadK;       // 128: one group of the largest size
inline constexpr int kChunkGroups = kChunkK / 32;  // of the smallest size

// in_chunk >> group_shift(...) is the group of the chunk: a division per step would be dear.
inline int group_shift(int64_t group_size) {
  return group_size == 32 ? 5 : (group_size == 64 ? 6 : (group_size == 128 ? 7 : 62));
}

struct Columns {
  // [group of the chunk][position of layout::scale_index]
  float scale[kChunkGroups][layout::kTileN];
  float zero[kChunkGroups][layout::kTileN];

  void load(const ql_linear_params& p, int64_t n_block, int64_t k_begin, int64_t k_padded) {
    const int64_t groups = layout::group_count(k_padded, p.group_size);
    const int64_t first = layout::group_of(k_begin, p.group_size);
    int64_t count = p.group_size == -1 ? 1 : kChunkK / p.group_size;
    if (count > groups - first) count = groups - first;
    const int64_t base = (n_block * groups + first) * layout::kTileN;
    for (int64_t group = 0; group < count; ++group) {
      for (int i = 0; i < layout::kTileN; ++i) {
        const int64_t at = base + group * layout::kTileN + i;
        scale[group][i] = load_float(p.scales, at, p.scale_dtype);
        if (p.zeros != nullptr) zero[group][i] = static_cast<float>(p.zeros[at]);
      }
    }
    if (p.zeros == nullptr) {
      const float middle = static_cast<float>(1 << (p.bits - 1));
      for (int64_t group = 0; group < count; ++group) {
        for (int i = 0; i < layout::kTileN; ++i) zero[group][i] = middle;
      }
    }
  }
};

// The order of k inside a tile in which vectors of codes come out of 16-word vectors of qweight:
// k = order.k[16 * q + word], where q counts the code positions of a row in one word (and, at 8
// bits, the two vectors of a lane). Derived from the layout, so that it cannot drift from it.
struct TileOrder {
  int k[layout::kTileK];
};

constexpr TileOrder tile_order(int bits) {
  TileOrder order = {};
  for (int k = 0; k < layout::kTileK; ++k) {
    const auto place = layout::code_place(0, k, layout::kPadK, bits);
    const int vector = static_cast<int>(place.byte) / 512;
    const int word = static_cast<int>(place.byte) % 512 / 4;
    const int slot = (static_cast<int>(place.byte) % 4 * 8 + place.shift) / bits;
    const int q = bits == 4 ? slot / 2 : 2 * vector + slot / 2;
    order.k[16 * q + word] = k;
  }
  return order;
}

}  // namespace QL_BODY_NAMESPACE
}  // namespace qlinear::cpu
