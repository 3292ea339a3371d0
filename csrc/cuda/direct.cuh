// Results straight from a warp's sums to global memory, where nobody else holds a part of them: no
// warp waits for another, and the next tile's products need not wait for the stores.
#pragma once

#include "cuda/values.cuh"
#include "partition.h"

namespace qlinear::cuda {

// The 8 x 8 matrix of 16-bit numbers that a warp holds, a pair of a row's in each lane, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Sums of 16 features by 8 rows of x for each block: a lane has those of features g and g + 8 and
// of rows 2 t and 2 t + 1, for g = lane / 4, t = lane % 4. Columns of y that are even lie at
// multiples of 4 bytes, which Output::y_vector says.
template <typename Packed, int kBlocks>
__device__ __forceinline__ void store_pairs(const Output& output, const float (&sums)[kBlocks][4],
                                            int64_t row0, int rows, int n0, int lane,
                                            const float (&bias)[2]) {
  const int row = lane / 4, n = n0 + lane % 4 * 2;
  unsigned char* to = output.y + ((row0 + row) * output.y_row_stride + n) * 2;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t pairs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pairs[half] = transpose_matrix(
          Packed::pack(sums[block][2 * half] + bias[half], sums[block][2 * half + 1] + bias[half]));
    }
    if (row + block * partition::kTokens < rows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = n + half * 8;
        if (column + 1 < output.n) {
          *reinterpret_cast<uint32_t*>(to + half * 16) = pairs[half];
        } else if (column < output.n) {
          *reinterpret_cast<unsigned short*>(to + half * 16) =
              static_cast<unsigned short>(pairs[half]);
        }
      }
    }
    to += partition::kTokens * output.y_row_stride * 2;
  }
}

template <int kBlocks>
__device__ __forceinline__ void store_floats(const Output& output, const float (&sums)[kBlocks][4],
                                             int64_t row0, int rows, int n0, int lane,
                                             const float (&bias)[2]) {
  const int row = lane % 4 * 2, n = n0 + lane / 4;
  float* to = reinterpret_cast<float*>(output.y) + (row0 + row) * output.y_row_stride + n;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_row = row + block * partition::kTokens + i % 2 < rows;
      if (is_row && n + i / 2 * 8 < output.n) {
        to[i % 2 * output.y_row_stride + i / 2 * 8] = sums[block][i] + bias[i / 2];
      }
    }
    to += partition::kTokens * output.y_row_stride;
  }
}

// What a warp holds of a tile whose `rows` rows begin at row0: features from n0 on.
template <int kBlocks>
__device__ __forceinline__ void store_directly(const Output& output,
                                               const float (&sums)[kBlocks][4], int64_t row0,
                                               int rows, int n0, int lane) {
  if (n0 >= output.n) return;
  float bias[2] = {0.0f, 0.0f};
  if (output.bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = n0 + lane / 4 + half * 8;
      if (n < output.n) bias[half] = load_value(output.bias, n, output.bias_dtype);
    }
  }
  if (output.y_dtype == QL_F16) {
    store_pairs<F16>(output, sums, row0, rows, n0, lane, bias);
  } else if (output.y_dtype == QL_BF16) {
    store_pairs<BF16>(output, sums, row0, rows, n0, lane, bias);
  } else {
    store_floats(output, sums, row0, rows, n0, lane, bias);
  }
}

}  // namespace qlinear::cuda
