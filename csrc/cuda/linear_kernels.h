// The linear kernels by number: format of activations and codes, rows of x per tile, group sizes.
#pragma once

#include "cuda/linear_args.h"

namespace qlinear::cuda {

// The kernels of one format and group form.
struct LinearForm {
  int token_blocks;  // blocks of 8 rows that a tile holds
  Form form;
};
constexpr LinearForm kForms[] = {
    {1, Form::kAlone},         {2, Form::kAlone},         {4, Form::kAlone},
    {8, Form::kAlone},         {1, Form::kFed},           {2, Form::kFed},
    {4, Form::kFedWarpgroups}, {8, Form::kFedWarpgroups}, {16, Form::kFedWarpgroups},
    {24, Form::kFedWarpgroups}};
constexpr int kLinearForms = 10, kAloneForms = 4;
inline constexpr int kGroupForms = 2;  // groups of 128 and more; groups of 32 and 64
inline constexpr int kFormats = 4;     // {fp16, bf16} x {4, 8 bits}

constexpr bool fine_groups(int64_t group_size) { return group_size == 32 || group_size == 64; }

// Tiles of the most rows are left out where they gain least: fewer serve as well.
constexpr bool has_kernel(LinearForm form, int bits, bool fine) {
  return form.form == Form::kAlone
             ? form.token_blocks < 8 || (bits == 4 && !fine)
             : form.token_blocks < 16 || (!fine && (form.token_blocks == 16 || bits == 4));
}
// Fed kernels that round weights take groups of any size: there is one for all.
constexpr bool one_for_all_groups(LinearForm form) {
  return form.form != Form::kAlone && partition::fed_rounded(form.token_blocks, false);
}
// Whether a form serves groups of such a size, and whether it rounds weights then.
constexpr bool serves(LinearForm form, int bits, bool fine) {
  return has_kernel(form, bits, fine && !one_for_all_groups(form));
}
constexpr bool rounds(LinearForm form, bool fine) {
  return form.form != Form::kAlone && partition::fed_rounded(form.token_blocks, fine);
}

// A kernel's place among formats, forms and group forms. Numbers run through those that there are.
constexpr int kPlaces = kFormats * kLinearForms * kGroupForms;
struct KernelPlace {
  int format, form, fine;
};
struct KernelNumbers {
  int of_place[kPlaces];  // -1: there is none
  KernelPlace places[kPlaces];
  int count;
};
constexpr KernelNumbers kernel_numbers() {
  KernelNumbers numbers{};
  for (int i = 0; i < kPlaces; ++i) {
    const KernelPlace place{i / (kLinearForms * kGroupForms), i / kGroupForms % kLinearForms,
                            i % kGroupForms};
    const bool there =
        has_kernel(kForms[place.form], place.format % 2 != 0 ? 8 : 4, place.fine != 0);
    numbers.of_place[i] = there ? numbers.count : -1;
    if (there) numbers.places[numbers.count++] = place;
  }
  return numbers;
}
constexpr KernelNumbers kNumbers = kernel_numbers();
constexpr int kKernels = kNumbers.count;

struct LinearFunctions {
  const void* functions[kLinearForms * kGroupForms];  // null where there is none
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

// Number of a kernel; -1 if there is none.
constexpr int kernel_index(bool bf16, int bits, int form, int64_t group_size) {
  if (form < 0) return -1;
  const int format = 2 * (bf16 ? 1 : 0) + (bits == 8 ? 1 : 0);
  const bool fine = fine_groups(group_size) && !one_for_all_groups(kForms[form]);
  return kNumbers.of_place[(format * kLinearForms + form) * kGroupForms + (fine ? 1 : 0)];
}

// A kernel by its number, 0 to kKernels - 1.
constexpr KernelPlace kernel_place(int kernel) { return kNumbers.places[kernel]; }

}  // namespace qlinear::cuda
