// The plans that choose_plan weighs, one after the other; apart from plan.h, which device code
// sees.
#pragma once

#include <functional>

#include "cuda/plan.h"

namespace qlinear::cuda {

// Shown a plan that can run, and the microseconds that the model expects of it.
using SeeCandidate = std::function<void(const ql_cuda_plan& plan, double microseconds)>;

// Shows the arrangements of a fed form that can run (plan_fed.cpp).
void see_fed(const ql_linear_params& params, const ql_cuda_device& device, int token_blocks,
             bool warpgroups, const SeeCandidate& see);

// Shows every arrangement that choose_plan weighs, one after the other.
void for_each_candidate(const ql_linear_params& params, const ql_cuda_device& device, int flags,
                        const SeeCandidate& see);

}  // namespace qlinear::cuda
