#include "cpu/pack_codes.h"

#include <cstring>

#include "layout.h"
#include "linear_params.h"

namespace {

using namespace qlinear::layout;

constexpr int kLanes = 4;  // t of layout.h
constexpr int kRows = 8;   // g of layout.h

// Eight codes, one a byte, as one integer: byte g is the code of row g.
uint64_t eight(const uint8_t* codes) {
  uint64_t word;
  std::memcpy(&word, codes, sizeof word);
  return word;
}

// 4 bits: the word of row g is the bytes (k_odd, k_half) of pairs (g, g + 8).
void pack_tile4(const uint8_t* codes, int64_t stride, uint8_t* out) {
  for (int block = 0; block < kTileK / 16; ++block) {
    for (int t = 0; t < kLanes; ++t) {
      uint64_t pairs[4];  // 2 * k_odd + k_half: codes of rows g and g + 8 side by side in byte g
      for (int slot = 0; slot < 4; ++slot) {
        const uint8_t* row = codes + (16 * block + 8 * (slot % 2) + 2 * t + slot / 2) * stride;
        pairs[slot] = eight(row) | eight(row + kRows) << 4;
      }
      for (int g = 0; g < kRows; ++g) {
        uint32_t word = 0;
        for (int slot = 0; slot < 4; ++slot) {
          word |= static_cast<uint32_t>(pairs[slot] >> (8 * g) & 0xff) << (8 * slot);
        }
        std::memcpy(out + (kLanes * g + t) * kVectorBytes + 4 * block, &word, sizeof word);
      }
    }
  }
}

// 8 bits: a word for each k_half, its bytes are (k_odd, n_half).
void pack_tile8(const uint8_t* codes, int64_t stride, uint8_t* out) {
  for (int pair = 0; pair < kTileK / 8; ++pair) {  // 2 * block + k_half
    for (int t = 0; t < kLanes; ++t) {
      const uint8_t* even = codes + (8 * pair + 2 * t) * stride;
      const uint64_t bytes[4] = {eight(even), eight(even + kRows), eight(even + stride),
                                 eight(even + stride + kRows)};
      const int vector = pair / 4;
      for (int g = 0; g < kRows; ++g) {
        uint32_t word = 0;
        for (int byte = 0; byte < 4; ++byte) {
          word |= static_cast<uint32_t>(bytes[byte] >> (8 * g) & 0xff) << (8 * byte);
        }
        const int lane = kLanes * g + t;
        std::memcpy(out + (vector * kWarpLanes + lane) * kVectorBytes + 4 * (pair % 4), &word,
                    sizeof word);
      }
    }
  }
}

}  // namespace

extern "C" int ql_cpu_pack_codes(const uint8_t* codes, int64_t row_stride, int64_t k, int64_t n,
                                 int bits, uint8_t* out, int threads) {
  if (!bits_supported(bits)) return QL_BAD_BITS;
  if (k < 0 || n < 0 || k % kTileK != 0 || n % kTileN != 0 || row_stride < n) return QL_BAD_SHAPE;
  if (k == 0 || n == 0) return QL_OK;
  if (codes == nullptr || out == nullptr) return QL_NULL_POINTER;
  const int64_t k_tiles = k / kTileK, tile = tile_bytes(bits);
  // Tiles along n are neighbours in a row of codes, so that each cache line is read once.
#pragma omp parallel for num_threads(threads < 1 ? 1 : threads)
  for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
    for (int64_t block = 0; block < n / kTileN; ++block) {
      const uint8_t* corner = codes + k_tile * kTileK * row_stride + block * kTileN;
      uint8_t* place = out + (block * k_tiles + k_tile) * tile;
      if (bits == 4) {
        pack_tile4(corner, row_stride, place);
      } else {
        pack_tile8(corner, row_stride, place);
      }
    }
  }
  return QL_OK;
}
