// From a problem and a device to a plan, and whether a plan can run; pure host code.
#pragma once

#include "linear_cuda.h"
#include "partition.h"

namespace qlinear::cuda {

// QL_OK, or what is wrong with sizes, bits, group size or dtypes.
int check_problem(const ql_linear_params& params);

// The same, null pointers, empty products and descriptions that are no GPU's: whether the planner
// can be asked (plan_entries.cpp).
int check_question(const ql_linear_params* params, const ql_cuda_device* device, const void* out);

inline int64_t padded_n(const ql_linear_params& params) {
  return layout::round_up(params.n, layout::kPadN);
}
inline int64_t tile_steps(const ql_linear_params& params) {
  return layout::round_up(params.k, layout::kPadK) / partition::kStepK;
}

// Stages until a plan's ring would not fit `budget` bytes of shared memory; 1 if not even two do.
int most_stages(const ql_linear_params& params, ql_cuda_plan plan, int budget);

// Completes tiles, shared memory, kernel and workspace of a plan whose geometry is set.
void complete_plan(const ql_linear_params& params, ql_cuda_plan& plan);

// Null if the plan can run on the device, else what is wrong with it.
const char* plan_fault(const ql_linear_params& params, const ql_cuda_device& device,
                       const ql_cuda_plan& plan);

// Of a kernel that leaves multiprocessors idle the next one uses some, where kernels overlap.
double overlapping_time(const ql_cuda_device& device, int ctas, double microseconds);

// The candidate that the model expects most of; the first of several.
ql_cuda_plan choose_plan(const ql_linear_params& params, const ql_cuda_device& device, int flags);

partition::Stripes stripes_of(const ql_linear_params& params, const ql_cuda_plan& plan);

// Whether kernels may round weights to 16 bits: where results are rounded as coarsely, and scales
// are of the dtype that is multiplied.
bool may_round(const ql_linear_params& params);

// x's rows are multiplied in this dtype: their own, or what fp32 is rounded to.
inline int compute_dtype(const ql_linear_params& params) {
  return params.x_dtype == QL_F32 ? params.compute_dtype : params.x_dtype;
}

// Whether rows of x, as far as is known, can be copied 16 bytes at a time; a null x is aligned.
bool x_can_be_copied(const ql_linear_params& params);

// Of a completed plan with copy_warp.
inline partition::FedGeometry fed_geometry(const ql_cuda_plan& plan) {
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  return {plan.token_blocks, plan.tile_blocks, plan.warps_k,
          plan.stages,       plan.cluster,     tiles * plan.cluster > plan.ctas};
}

inline bool is_multiple(const void* pointer, int64_t of) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(of) == 0;
}

inline int item_bytes(int dtype) { return dtype == QL_F32 ? 4 : 2; }

}  // namespace qlinear::cuda
