// Which products one launch computes, and what they have to do with each other; pure host code.
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

// What a product has to do with those before it.
struct Tie {
  bool reads = false, writes = false;  // something of theirs
  int giver = -1;                      // the only one whose results it reads
};
Tie tie_of(const ql_linear_params* params, int place);

// Whether all that `to` reads is what `from` gives, as it is.
bool reads_results(const ql_linear_params& from, const ql_linear_params& to);

}  // namespace qlinear::cuda
