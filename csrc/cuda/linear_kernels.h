// The linear kernels by number: format of activations and codes, rows of x per tile, group sizes.
#pragma once

#include "cuda/linear_args.h"

namespace qlinear::cuda {

// The kernels of one format and group form.
struct LinearForm {
  int token_blocks;  // blocks of 8 rows that a tile holds
  Form form;
};
inline constexpr LinearForm kForms[] = {
    {1, Form::kAlone},         {2, Form::kAlone},         {4, Form::kAlone},
    {8, Form::kAlone},         {1, Form::kFed},           {2, Form::kFed},
    {4, Form::kFedWarpgroups}, {8, Form::kFedWarpgroups}, {16, Form::kFedWarpgroups}};
inline constexpr int kLinearForms = 9, kAloneForms = 4;
inline constexpr int kGroupForms = 2;  // groups of 128 and more; groups of 32 and 64
inline constexpr int kFormats = 4;     // {fp16, bf16} x {4, 8 bits}
inline constexpr int kKernels = kFormats * kLinearForms * kGroupForms;

struct LinearFunctions {
  const void* functions[kLinearForms * kGroupForms];
};

// Of one format: the kernels for every GPU, or those for Hopper; null elsewhere.
LinearFunctions linear_f16_4();
LinearFunctions linear_f16_8();
LinearFunctions linear_bf16_4();
LinearFunctions linear_bf16_8();
LinearFunctions linear_f16_4_fed();
LinearFunctions linear_f16_8_fed();
LinearFunctions linear_bf16_4_fed();
LinearFunctions linear_bf16_8_fed();

// Index in kForms, or -1.
constexpr int form_of(int token_blocks, bool warpgroups, bool copy_warp) {
  const Form wanted = warpgroups ? Form::kFedWarpgroups : copy_warp ? Form::kFed : Form::kAlone;
  for (int form = 0; form < kLinearForms; ++form) {
    if (kForms[form].token_blocks == token_blocks && kForms[form].form == wanted &&
        (copy_warp || !warpgroups)) {
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
