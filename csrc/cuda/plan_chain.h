// Which products one launch computes, and which of them wait for those before; pure host code.
#pragma once

#include "chain_partition.h"
#include "cuda/plan.h"

namespace qlinear::cuda {

inline constexpr int kChainPieceK = partition::kHalfRowBytes / 2;  // of x, as copies bring it

inline int blocks_of(const ql_linear_params& params) {
  return static_cast<int>(padded_n(params) / layout::kTileN);
}
inline bool one_group(const ql_linear_params& params) { return params.group_size == -1; }

// How many of `count` products, from the first on, one launch computes; at most kChainLayers, and
// below 2 none.
int chain_length(const ql_linear_params* params, int count, const ql_cuda_device& device);

// Whether a product reads what one before it writes, or writes what one of them reads or writes.
bool chain_waits(const ql_linear_params* params, int place);

}  // namespace qlinear::cuda
