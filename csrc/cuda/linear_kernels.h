// The linear kernels by number: format of activations and codes, rows of x per tile, group sizes.
#pragma once

#include "cuda/linear_args.h"

namespace qlinear::cuda {

// Blocks of 8 rows that a tile can hold.
inline constexpr int kTokenBlocks[] = {1, 2, 4, 8};
inline constexpr int kRowForms = 4;
inline constexpr int kGroupForms = 2;  // groups of 128 and more; groups of 32 and 64
inline constexpr int kFormats = 4;     // {fp16, bf16} x {4, 8 bits}
inline constexpr int kKernels = kFormats * kRowForms * kGroupForms;

struct LinearFunctions {
  const void* functions[kRowForms * kGroupForms];
};

LinearFunctions linear_f16_4();
LinearFunctions linear_f16_8();
LinearFunctions linear_bf16_4();
LinearFunctions linear_bf16_8();

constexpr int row_form(int token_blocks) {
  for (int form = 0; form < kRowForms; ++form) {
    if (kTokenBlocks[form] == token_blocks) return form;
  }
  return -1;
}

constexpr int kernel_index(bool bf16, int bits, int token_blocks, int64_t group_size) {
  const int format = 2 * (bf16 ? 1 : 0) + (bits == 8 ? 1 : 0);
  const int fine = group_size == 32 || group_size == 64 ? 1 : 0;
  return (format * kRowForms + row_form(token_blocks)) * kGroupForms + fine;
}

}  // namespace qlinear::cuda
