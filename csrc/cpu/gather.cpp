// Columns of activations in the order of an act-order layer's packed weight.
#include <cstdint>

#include "linear_params.h"

namespace {

template <typename Item>
void gather_rows(const ql_gather_params& p) {
  const auto* x = static_cast<const Item*>(p.x);
  auto* out = static_cast<Item*>(p.out);
#pragma omp parallel for num_threads(p.threads < 1 ? 1 : p.threads) if (p.m >= 8)
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t k = 0; k < p.k; ++k) {
      out[row * p.k + k] = x[row * p.x_row_stride + p.permutation[k]];
    }
  }
}

}  // namespace

extern "C" int ql_cpu_gather(const ql_gather_params* params) {
  if (params == nullptr) return QL_NULL_POINTER;
  const ql_gather_params& p = *params;
  if (p.m < 0 || p.k < 0 || p.x_row_stride < p.k) return QL_BAD_SHAPE;
  if (p.item_bytes != 2 && p.item_bytes != 4) return QL_BAD_DTYPE;
  if (p.m == 0 || p.k == 0) return QL_OK;
  if (p.x == nullptr || p.out == nullptr || p.permutation == nullptr) return QL_NULL_POINTER;
  if (p.item_bytes == 2) {
    gather_rows<uint16_t>(p);
  } else {
    gather_rows<uint32_t>(p);
  }
  return QL_OK;
}
