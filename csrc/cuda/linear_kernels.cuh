// The kernels of one format as a table, in the order of kForms.
#pragma once

#include "cuda/fed.cuh"
#include "cuda/linear.cuh"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kForm, bool kFineGroups>
const void* linear_function() {
  constexpr LinearForm form = kForms[kForm];
  if constexpr (!has_kernel(form, kBits, kFineGroups)) {
    return nullptr;
  } else if constexpr (form.form == Form::kAlone) {
    return reinterpret_cast<const void*>(
        &linear_alone<Dtype, kBits, form.token_blocks, kFineGroups>);
  } else {
    return reinterpret_cast<const void*>(
        &linear_fed<Dtype, kBits, form.token_blocks, kFineGroups, form.form>);
  }
}

template <typename Dtype, int kBits, int kForm, int kEnd>
void add_functions(LinearFunctions& table) {
  if constexpr (kForm < kEnd) {
    table.functions[kForm * kGroupForms] = linear_function<Dtype, kBits, kForm, false>();
    table.functions[kForm * kGroupForms + 1] = linear_function<Dtype, kBits, kForm, true>();
    add_functions<Dtype, kBits, kForm + 1, kEnd>(table);
  }
}

template <typename Dtype, int kBits>
LinearFunctions alone_functions() {
  LinearFunctions table{};
  add_functions<Dtype, kBits, 0, kAloneForms>(table);
  return table;
}

template <typename Dtype, int kBits>
LinearFunctions fed_functions() {
  LinearFunctions table{};
  add_functions<Dtype, kBits, kAloneForms, kLinearForms>(table);
  return table;
}

}  // namespace qlinear::cuda
