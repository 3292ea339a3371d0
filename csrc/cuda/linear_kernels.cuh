// The kernels of one format as a table, in the order of kForms.
#pragma once

#include "cuda/linear.cuh"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kForm, bool kFineGroups>
const void* linear_function() {
  return reinterpret_cast<const void*>(
      &linear<Dtype, kBits, kForms[kForm].token_blocks, kFineGroups, kForms[kForm].form>);
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
