// Proves layout.h with g++ alone: some of it at compile time, and prints every place so that a
// Python test can compare it with the mirror in kernels/layout.py.
#include "layout.h"

#include <cstdio>
#include <initializer_list>

namespace layout = qlinear::layout;

// Every (byte, shift) of one padded weight is hit exactly once.
constexpr bool is_a_permutation(int64_t n_padded, int64_t k_padded, int bits) {
  bool seen[64 * 128 * 2] = {};
  const int per_byte = 8 / bits;
  for (int64_t n = 0; n < n_padded; ++n) {
    for (int64_t k = 0; k < k_padded; ++k) {
      const auto place = layout::code_place(n, k, k_padded, bits);
      const int64_t at = place.byte * per_byte + place.shift / bits;
      if (at < 0 || at >= n_padded * k_padded || seen[at]) return false;
      seen[at] = true;
    }
  }
  return true;
}

constexpr bool scales_are_a_permutation(int64_t n_padded, int64_t groups) {
  bool seen[64 * 8] = {};
  for (int64_t n = 0; n < n_padded; ++n) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = layout::scale_index(group, n, groups);
      if (at < 0 || at >= n_padded * groups || seen[at]) return false;
      seen[at] = true;
      if (layout::scale_position_to_n(static_cast<int>(at % 16)) != n % 16) return false;
    }
  }
  return true;
}

static_assert(is_a_permutation(64, 128, 4));
static_assert(is_a_permutation(64, 128, 8));
static_assert(scales_are_a_permutation(64, 4));
static_assert(layout::group_count(256, -1) == 1 && layout::group_count(256, 32) == 8);
static_assert(layout::group_of(255, -1) == 0 && layout::group_of(255, 64) == 3);
static_assert(layout::round_up(1, 64) == 64 && layout::round_up(128, 128) == 128);

int main() {
  std::printf("version %d\n", layout::kVersion);
  std::printf("align %d\n", layout::kAlignBytes);
  for (int bits : {4, 8}) {
    std::printf("bytes %d %lld %lld\n", bits, static_cast<long long>(layout::tile_bytes(bits)),
                static_cast<long long>(layout::qweight_bytes(64, 128, bits)));
    for (int n = 0; n < 64; ++n) {
      for (int k = 0; k < 256; ++k) {
        const auto place = layout::code_place(n, k, 256, bits);
        std::printf("code %d %d %d %lld %d\n", bits, n, k, static_cast<long long>(place.byte),
                    place.shift);
      }
    }
  }
  for (int n = 0; n < 64; ++n) {
    for (int group = 0; group < 3; ++group) {
      std::printf("scale %d %d %lld\n", n, group,
                  static_cast<long long>(layout::scale_index(group, n, 3)));
    }
  }
  return 0;
}
