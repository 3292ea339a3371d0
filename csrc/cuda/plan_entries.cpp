// The planner behind its C interface, as far as it needs no GPU: both libraries hold these entries,
// so that plans can be looked at where no CUDA library is.
#include "cuda/candidates.h"

using namespace qlinear::cuda;

namespace {

// The planner divides by these numbers and walks as far as they say: nonsense would have no end.
bool is_described(const ql_cuda_device& device) {
  constexpr int kMostMultiprocessors = 1 << 16;
  return device.major > 0 && device.minor >= 0 && device.sm_count > 0 &&
         device.sm_count <= kMostMultiprocessors && device.shared_bytes_per_block > 0 &&
         device.shared_bytes_per_sm >= device.shared_bytes_per_block;
}

}  // namespace

int qlinear::cuda::check_question(const ql_linear_params* params, const ql_cuda_device* device,
                                  const void* out) {
  if (params == nullptr || device == nullptr || out == nullptr) return QL_NULL_POINTER;
  const int status = check_problem(*params);
  if (status != QL_OK) return status;
  if (params->m == 0 || params->n == 0) return QL_BAD_SHAPE;
  return is_described(*device) ? QL_OK : QL_BAD_DESCRIPTION;
}

extern "C" int ql_cuda_plan_candidates(const ql_linear_params* params, const ql_cuda_device* device,
                                       int flags, int64_t capacity, ql_cuda_plan* plans,
                                       double* microseconds, int64_t* count) {
  const int status = check_question(params, device, count);
  if (status != QL_OK) return status;
  if (capacity > 0 && (plans == nullptr || microseconds == nullptr)) return QL_NULL_POINTER;
  *count = 0;
  for_each_candidate(*params, *device, flags, [&](const ql_cuda_plan& plan, double time) {
    if (*count < capacity) {
      plans[*count] = plan;
      microseconds[*count] = time;
    }
    ++*count;
  });
  return QL_OK;
}

extern "C" int ql_cuda_complete_plan(const ql_linear_params* params, const ql_cuda_device* device,
                                     ql_cuda_plan* plan, const char** fault) {
  const int status = check_question(params, device, plan);
  if (status != QL_OK) return status;
  const char* found = plan_fault(*params, *device, *plan);
  if (fault != nullptr) *fault = found;
  if (found != nullptr) return QL_BAD_PLAN;
  complete_plan(*params, *plan);
  return QL_OK;
}
