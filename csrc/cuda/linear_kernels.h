// The linear kernels by number: format of activations and codes, rows of x per tile, group sizes.
#pragma once

#include "cuda/linear_args.h"

namespace qlinear::cuda {

// A kernel multiplies by warps, for every GPU, or by warpgroups, for Hopper; a form is that and how
// many blocks of 8 rows a tile holds.
struct LinearForm {
  int token_blocks;
  bool warpgroups;
};
inline constexpr LinearForm kForms[] = {{1, false}, {2, false}, {4, false}, {8, false},
                                        {4, true},  {8, true},  {16, true}};
inline constexpr int kWarpForms = 4, kWarpgroupForms = 3, kLinearForms = 7;
inline constexpr int kGroupForms = 2;  // groups of 128 and more; groups of 32 and 64
inline constexpr int kFormats = 4;     // {fp16, bf16} x {4, 8 bits}
inline constexpr int kKernels = kFormats * kLinearForms * kGroupForms;

struct LinearFunctions {
  const void* functions[kWarpForms * kGroupForms];
};

LinearFunctions linear_f16_4();
LinearFunctions linear_f16_8();
LinearFunctions linear_bf16_4();
LinearFunctions linear_bf16_8();
LinearFunctions linear_f16_4_wgmma();
LinearFunctions linear_f16_8_wgmma();
LinearFunctions linear_bf16_4_wgmma();
LinearFunctions linear_bf16_8_wgmma();

// Index in kForms, or -1.
constexpr int form_of(int token_blocks, bool warpgroups) {
  for (int form = 0; form < kLinearForms; ++form) {
    if (kForms[form].token_blocks == token_blocks && kForms[form].warpgroups == warpgroups) {
      return form;
    }
  }
  return -1;
}

constexpr int kernel_index(bool bf16, int bits, int form, int64_t group_size) {
  const int format = 2 * (bf16 ? 1 : 0) + (bits == 8 ? 1 : 0);
  const int fine = group_size == 32 || group_size == 64 ? 1 : 0;
  return (format * kLinearForms + form) * kGroupForms + fine;
}

}  // namespace qlinear::cuda
