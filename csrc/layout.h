// The runtime layout of quantized weights: where every code, scale and zero point lies.
//
// This header is the one definition. It knows no CUDA header and no torch, every function is
// constexpr, and the very functions that kernels call are proven on a CPU with g++ alone.
// service/qlinear_service/kernels/layout.py mirrors it; a test compares the two.
// Why it looks like this, and what was rejected: docs/decisions/0001-runtime-layout.md.
//
// Codes. A tile is 16 output features (n) by 64 input features (k). Tiles of one n-block follow
// each other along k, so a warp that walks k reads one contiguous stretch:
//
//     qweight[n / 16][k / 64][tile bytes]
//
// Inside, everything is cut along the register fragments of the 16 x 16 operand of
// mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane 4 * g + t of a warp holds
// rows g and g + 8 and columns 2t, 2t + 1, 2t + 8, 2t + 9. Those eight codes are one 32-bit word
// (4 bits) or two (8 bits). Each lane owns aligned 16-byte vectors: one vector holds its words of
// four 16 x 16 blocks along k (4 bits), or of two (8 bits).
//
//     4 bits, one word, bit 0 on the right; the slot is n_half + 2 * k_half + 4 * k_odd:
//       slot    7        6       5      4      3        2       1      0
//       n     g + 8      g     g + 8    g    g + 8      g     g + 8    g
//       k     2t + 9  2t + 9   2t + 1 2t + 1 2t + 8  2t + 8    2t     2t
//     8 bits, word k_half of two; the byte is n_half + 2 * k_odd.
//
// So the two 16-bit halves of a word always hold k and k + 1 of the same row: `w & 0x000f000f` is
// one half2 register of the fragment without any shuffle. Row g + 8 sits in the odd nibbles, where
// the mask 0x00f000f0 yields 16 times the code: a kernel that scales accumulators may leave that
// factor in and divide the scale of that row by 16, which is exact.
// The word is a fragment of the A operand (m16 x k16, weights on the left), both halves of it are
// fragments of the B operand (k16 x n8, weights on the right), and four n-blocks are the register
// operand of wgmma.m64nNk16: one layout serves every path.
//
// Scales and zero points of one n-block follow each other along the groups:
//
//     scales[n / 16][group][16],  zeros[n / 16][group][16],  position 2 * (n % 8) + (n % 16) / 8
//
// so that the pair (g, g + 8) a lane needs is one aligned load.
#pragma once

#include <cstdint>

namespace qlinear::layout {

inline constexpr int kVersion = 1;

inline constexpr int kTileN = 16;  // output features of a tile: rows of the mma operand
inline constexpr int kTileK = 64;  // input features of a tile: four mma steps of 16
inline constexpr int kPadN = 64;   // n is padded to this: one wgmma register operand
inline constexpr int kPadK = 128;  // k is padded to this: one group of the largest size
inline constexpr int kWarpLanes = 32;
inline constexpr int kVectorBytes = 16;  // what one lane loads at once
inline constexpr int kAlignBytes = 64;   // of qweight's first byte: the widest load of any kernel

struct CodePlace {
  int64_t byte;  // offset in qweight
  int shift;     // of the code's lowest bit inside that byte
};

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr bool bits_supported(int bits) { return bits == 4 || bits == 8; }

constexpr bool group_size_supported(int64_t group_size) {
  return group_size == -1 || group_size == 32 || group_size == 64 || group_size == 128;
}

constexpr int64_t tile_bytes(int bits) { return kTileN * kTileK * bits / 8; }

constexpr int64_t qweight_bytes(int64_t n_padded, int64_t k_padded, int bits) {
  return n_padded * k_padded * bits / 8;
}

// Scale groups along k; -1 is one group for the whole column.
constexpr int64_t group_count(int64_t k_padded, int64_t group_size) {
  return group_size == -1 ? 1 : k_padded / group_size;
}

constexpr int64_t group_of(int64_t k, int64_t group_size) {
  return group_size == -1 ? 0 : k / group_size;
}

// Where the code of (n, k) lies.
constexpr CodePlace code_place(int64_t n, int64_t k, int64_t k_padded, int bits) {
  const int64_t tile = (n / kTileN) * (k_padded / kTileK) + k / kTileK;
  const int lane = static_cast<int>(4 * (n % 8) + (k % 8) / 2);
  const int n_half = static_cast<int>(n % 16 / 8);
  const int k_half = static_cast<int>(k % 16 / 8);
  const int k_odd = static_cast<int>(k % 2);
  const int block = static_cast<int>(k % kTileK / 16);  // which 16 x 16 block of the tile
  if (bits == 4) {
    const int slot = n_half + 2 * k_half + 4 * k_odd;
    const int byte = lane * kVectorBytes + 4 * block + slot / 2;
    return {tile * tile_bytes(4) + byte, slot % 2 * 4};
  }
  // 8 bits: two vectors per lane, 512 bytes apart; each holds two blocks of two words.
  const int vector = block / 2;
  const int word = 2 * (block % 2) + k_half;
  const int byte = (vector * kWarpLanes + lane) * kVectorBytes + 4 * word + n_half + 2 * k_odd;
  return {tile * tile_bytes(8) + byte, 0};
}

// Where the scale (or zero point) of (group, n) lies, in elements.
constexpr int64_t scale_index(int64_t group, int64_t n, int64_t groups) {
  return ((n / kTileN) * groups + group) * kTileN + 2 * (n % 8) + n % 16 / 8;
}

// The inverse of the order inside one n-block: position 0 .. 15 -> n % 16.
constexpr int scale_position_to_n(int position) { return position / 2 + 8 * (position % 2); }

static_assert(tile_bytes(4) == kWarpLanes * kVectorBytes);
static_assert(tile_bytes(8) == 2 * kWarpLanes * kVectorBytes);
static_assert(kPadK % kTileK == 0 && kPadN % kTileN == 0);

}  // namespace qlinear::layout
