// One step of one warp: 16 output features of each of its n-blocks by 128 k, times all rows of x.
// The arithmetic that the forms share; where the bytes lie is told by them.
//
//   total += scale * (sum of a scale group's products - zero point * sum of x)
//
// Products and sums are fp32. The second term is there where codes are multiplied raw (raw.cuh);
// codes in their exact form have it taken off before.
#pragma once

#include "cuda/raw.cuh"
#include "cuda/values.cuh"

namespace qlinear::cuda {

using partition::kStepK;
using partition::kTokens;

// (a[0], a[2]: row g; a[1], a[3]: row g + 8) times the scale of its row.
template <typename Dtype>
__device__ __forceinline__ void scale_operand(uint32_t (&a)[4], uint32_t low, uint32_t high);
template <>
__device__ __forceinline__ void scale_operand<F16>(uint32_t (&a)[4], uint32_t low, uint32_t high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a[i]) : "r"(i % 2 == 0 ? low : high));
  }
}
template <>
__device__ __forceinline__ void scale_operand<BF16>(uint32_t (&a)[4], uint32_t low, uint32_t high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // a * b - 0: sm_90 has a product of its own, whose name ptxas of CUDA 12 does not know.
    asm("fma.rn.bf16x2 %0, %0, %1, %2;"
        : "+r"(a[i])
        : "r"(i % 2 == 0 ? low : high), "r"(0x80008000u));
  }
}

// kSplit: sums that products of an n-block take in turn, where there are few n-blocks: a product
// waits for the one before it of the same sums.
template <typename Dtype, int kBits, int kTokenBlocks, int kBlocks, bool kFineGroups, bool kRaw,
          int kSplit = 1>
struct Step {
  using Format = ChosenCodes<Dtype, kBits, kRaw>;
  static constexpr int kVectors = kBits / 4;  // of 16 bytes per lane and layout tile
  static constexpr int kTileRows = kTokenBlocks * kTokens;
  static constexpr int kBlockBytes = partition::code_bytes(layout::kTileN, kBits);
  static constexpr int kTileBytes = static_cast<int>(layout::tile_bytes(kBits));
  static constexpr int kStepK16 = kStepK / 16;
  static constexpr int kTileK16 = layout::kTileK / 16;
  static constexpr int kGroupK16 = kFineGroups ? 2 : kStepK16;  // products between two scalings
  static constexpr int kHalfBytes = kTileRows * partition::kHalfRowBytes;
  static constexpr int kPairBytes = 2 * kTokens * partition::kHalfRowBytes;
  using BlockSums = float[kTokenBlocks][4];
  using Totals = BlockSums[kBlocks];
  using Words = uint32_t[kVectors * 4];
  using Scales = float2[kBlocks];
  using SumsOfX = float[kTokenBlocks][2];  // of the rows that a lane has products of

  // Where a step's bytes of the warp's first n-block lie; all but x's as this lane reads them.
  struct Place {
    uint32_t x, codes, scales, zeros;
  };

  const StepArgs& args;
  const int lane;
  typename Format::Zeros symmetric;  // zero points where the layer has none of its own
  float2 symmetric_sums;             // the same, as raw codes take them off

  __device__ __forceinline__ Step(const StepArgs& a, int this_lane)
      : args(a),
        lane(this_lane),
        symmetric(Format::zeros(a.symmetric_zero, a.symmetric_zero)),
        symmetric_sums(Format::zeros_of_sums(a.symmetric_zero, a.symmetric_zero)) {}

  // What this lane adds to the beginning of a step's codes, scales and zero points, if `first` is
  // the warp's first n-block there. What belongs to rows g and g + 8 of an n-block lies side by
  // side.
  __device__ __forceinline__ Place lane_offsets(int first) const {
    const int pair =
        first * (kFineGroups ? args.groups_per_step : 1) * layout::kTileN + lane / 4 * 2;
    const int scale_bytes = args.scale_dtype == QL_F32 ? 4 : 2;
    return {0, static_cast<uint32_t>(first * kBlockBytes + lane * layout::kVectorBytes),
            static_cast<uint32_t>(pair * scale_bytes), static_cast<uint32_t>(pair)};
  }

  // Of scales and zero points: the pair of n-block j and this 16 k, in elements behind the first.
  __device__ __forceinline__ int pair_of(int j, int k16) const {
    if constexpr (!kFineGroups) return j * layout::kTileN;
    return (j * args.groups_per_step + (k16 >> args.group_shift)) * layout::kTileN;
  }

  __device__ __forceinline__ void load_scales(Scales& scales, const Place& at, int k16) const {
    if (args.scale_dtype == QL_F32) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const uint32_t from = at.scales + pair_of(j, k16) * 4;
        scales[j] = make_float2(__uint_as_float(load_shared_4(from)),
                                __uint_as_float(load_shared_4(from + 4)));
      }
      return;
    }
    uint32_t raw[kBlocks];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) raw[j] = load_shared_4(at.scales + pair_of(j, k16) * 2);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) scales[j] = scales_of(raw[j], 0, args.scale_dtype);
  }

  __device__ __forceinline__ uint32_t load_zero_pair(const Place& at, int j, int k16) const {
    return load_shared_2(at.zeros + pair_of(j, k16));
  }

  // Zero points as the exact form takes them, before its products.
  __device__ __forceinline__ typename Format::Zeros exact_zeros(const Place& at, int j,
                                                                int k16) const {
    if (Format::kOffset || !args.has_zeros) return symmetric;
    const uint32_t pair = load_zero_pair(at, j, k16);
    return Format::zeros(pair & 0xff, pair >> 8);
  }

  // Scales of a lane's rows g and g + 8, twice each, as scale_operand takes them; of x's dtype.
  struct Pair {
    uint32_t low, high;
  };
  __device__ __forceinline__ Pair load_pair(const Place& at, int j, int k16) const {
    const uint32_t scales = load_shared_4(at.scales + pair_of(j, k16) * 2);
    return {__byte_perm(scales, 0u, 0x1010), __byte_perm(scales, 0u, 0x3232)};
  }

  // totals += scale * (sums - zero * sums of x) for one n-block.
  __device__ __forceinline__ void apply_scales(BlockSums& totals, const BlockSums& sums,
                                               const SumsOfX& x_sums, float2 scale, const Place& at,
                                               int j, int k16) const {
    float2 zero = symmetric_sums;
    if (Format::kOffset && args.has_zeros) {
      const uint32_t pair = load_zero_pair(at, j, k16);
      zero = Format::zeros_of_sums(pair & 0xff, pair >> 8);
    }
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = sums[token][i];
        if constexpr (Format::kOffset) {
          sum = fmaf(i < 2 ? zero.x : zero.y, x_sums[token][i % 2], sum);
        }
        totals[token][i] = fmaf(i < 2 ? scale.x : scale.y, sum, totals[token][i]);
      }
    }
  }

  // What totals of row g (i < 2) and g + 8 are to be multiplied with at last.
  static __device__ __forceinline__ float unit(int i) {
    return i < 2 ? Format::kUnitLow : Format::kUnitHigh;
  }

  static __device__ __forceinline__ void clear(BlockSums& sums) {
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[token][i] = 0.0f;
    }
  }

  static __device__ __forceinline__ void add_sums(BlockSums& sums, const BlockSums& others) {
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[token][i] += others[token][i];
    }
  }

  // The lane's words of one layout tile of n-block j.
  __device__ __forceinline__ void load_words(Words& words, const Place& at, int j, int tile) const {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint4 loaded = load_shared_16(at.codes + j * kBlockBytes + tile * kTileBytes +
                                          vector * (32 * layout::kVectorBytes));
      words[4 * vector] = loaded.x;
      words[4 * vector + 1] = loaded.y;
      words[4 * vector + 2] = loaded.z;
      words[4 * vector + 3] = loaded.w;
    }
  }

  // What of the activations one load_matrices brings: k 0-7 and 8-15 of two blocks of rows, or,
  // where there is but one block, of two sixteenths of k. The address that this lane gives for the
  // first; others differ in bits that the swizzle leaves to an exclusive or, and by whole halves.
  __device__ __forceinline__ int matrix_row() const {
    return kTokenBlocks == 1
               ? partition::activation_offset(lane % 8, lane / 8, kTileRows)
               : partition::activation_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2, kTileRows);
  }

  // Where this lane's rows of each half of a step lie; another order of them may stand in for it.
  struct RowPlaces {
    uint32_t first;
    __device__ __forceinline__ uint32_t half(int number) const {
      return first + number * kHalfBytes;
    }
  };

  using RowsOfX = uint32_t[(kTokenBlocks + 1) / 2][4];
  // `row` is that of the half that holds k16.
  __device__ __forceinline__ void load_rows(RowsOfX& b, uint32_t row, int k16) const {
    if constexpr (kTokenBlocks == 1) {
      if (k16 % 2 == 0) load_matrices(b[0], row ^ (k16 / 2 % 2 * 64));
    } else {
#pragma unroll
      for (int pair = 0; pair < kTokenBlocks / 2; ++pair) {
        load_matrices(b[pair], (row + pair * kPairBytes) ^ (k16 % 4 * 32));
      }
    }
  }

  static __device__ __forceinline__ void multiply(BlockSums& sums, const uint32_t (&a)[4],
                                                  const RowsOfX& b, int k16) {
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
      const int at = kTokenBlocks == 1 ? k16 % 2 * 2 : token % 2 * 2;
      multiply_accumulate<Dtype>(sums[token], a, b[token / 2][at], b[token / 2][at + 1]);
    }
  }

  // Sums of x by one product for both blocks of rows, or for two sixteenths of k. What load_rows
  // brings is taken for the left operand as it lies: its third and fourth register stand where more
  // k would, so even columns of the right operand take the first two alone, odd ones the others.
  __device__ __forceinline__ void add_rows(float (&sums)[4], const RowsOfX& b) const {
    constexpr uint32_t kOne = Format::kMinusOne;
    const bool odd = lane / 4 % 2 != 0;
    multiply_accumulate<Dtype>(sums, b[0], odd ? 0u : kOne, odd ? kOne : 0u);
  }

  // Lane l has sums of row l / 4 and, if there are two blocks, of row l / 4 + 8 now; products are
  // of rows l % 4 * 2 + i.
  __device__ __forceinline__ void spread_sums(SumsOfX& x_sums, const float (&sums)[4]) const {
    const float first = sums[0] + sums[2], second = sums[1] + sums[3];
#pragma unroll
    for (int token = 0; token < kTokenBlocks; ++token) {
      const float sum = kTokenBlocks == 1 ? first + second : token == 0 ? first : second;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x_sums[token][i] = __shfl_sync(0xffffffffu, sum, (lane % 4 * 2 + i) * 4);
      }
    }
  }

  // The whole step by one warp for itself; all n-blocks share what is loaded of x.
  __device__ __forceinline__ void run(Totals& totals, const Place& at) const {
    run(totals, at, RowPlaces{at.x + matrix_row()});
  }

  template <typename Rows>
  __device__ __forceinline__ void run(Totals& totals, const Place& at, const Rows& rows) const {
    BlockSums sums[kBlocks][kSplit];
    float rows_sums[4];
    SumsOfX x_sums;
    Words words[kBlocks];
    typename Format::Zeros zeros[kBlocks];
    RowsOfX b;
    Scales scales;
#pragma unroll
    for (int k16 = 0; k16 < kStepK16; ++k16) {
      if (k16 % kTileK16 == 0) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) load_words(words[j], at, j, k16 / kTileK16);
      }
      load_rows(b, rows.half(k16 / 4), k16);
      if (k16 % kGroupK16 == 0) {
        load_scales(scales, at, k16);
#pragma unroll
        for (int i = 0; i < 4; ++i) rows_sums[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          zeros[j] = exact_zeros(at, j, k16);
#pragma unroll
          for (int i = 0; i < kSplit; ++i) clear(sums[j][i]);
        }
      }
      if constexpr (Format::kOffset) {
        if (kTokenBlocks == 2 || k16 % 2 == 0) add_rows(rows_sums, b);
      }
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        uint32_t a[4];
        Format::operand(a, &words[j][k16 % kTileK16 * Format::kWords], zeros[j]);
        multiply(sums[j][k16 % kSplit], a, b, k16);
      }
      if ((k16 + 1) % kGroupK16 == 0) {
        if constexpr (Format::kOffset) spread_sums(x_sums, rows_sums);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
          for (int i = 1; i < kSplit; ++i) add_sums(sums[j][0], sums[j][i]);
          apply_scales(totals[j], sums[j][0], x_sums, scales[j], at, j, k16);
        }
      }
    }
  }

  // The same with weights that are rounded to 16 bits, scale and all, so that sums run through all
  // of k.
  __device__ __forceinline__ void run_rounded(Totals& totals, const Place& at) const {
    if (args.has_zeros) {
      add_rounded<true>(totals, at);
    } else {
      add_rounded<false>(totals, at);
    }
  }

  template <bool kZeros>
  __device__ __forceinline__ void add_rounded(Totals& totals, const Place& at) const {
    const RowPlaces rows{at.x + matrix_row()};
    Words words[kBlocks];
    typename Format::Zeros zeros[kBlocks];
    Pair scales[kBlocks];
    RowsOfX b;
#pragma unroll
    for (int k16 = 0; k16 < kStepK16; ++k16) {
      load_rows(b, rows.half(k16 / 4), k16);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (k16 % kTileK16 == 0) load_words(words[j], at, j, k16 / kTileK16);
        if (k16 % kGroupK16 == 0) {
          scales[j] = load_pair(at, j, k16);
          if (kZeros) zeros[j] = exact_zeros(at, j, k16);
        }
        uint32_t a[4];
        Format::operand(a, &words[j][k16 % kTileK16 * Format::kWords],
                        kZeros ? zeros[j] : symmetric);
        scale_operand<Dtype>(a, scales[j].low, scales[j].high);
        multiply(totals[j], a, b, k16);
      }
    }
  }
};

}  // namespace qlinear::cuda
