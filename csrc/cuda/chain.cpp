// Several products one after the other: in one launch where they can be (plan_chain.h), else each
// launched to overlap with the one in front of it, so that its weights are on their way while that
// still adds up. Launched at once, or recorded into a graph that is launched as one.
#include <atomic>

#include "cuda/chain_kernels.h"
#include "cuda/host.h"
#include "cuda/plan.h"
#include "cuda/plan_chain.h"

namespace qlinear::cuda {
namespace {

constexpr int kMostLayers = 256;

ql_cuda_launch launch_of(const ql_cuda_launch& chain, const ql_cuda_plan* const* plans, int place,
                         int count) {
  ql_cuda_launch launch = chain;
  if (place > 0) launch.flags |= QL_CUDA_DEPENDENT;
  // The events are the chain's; one between two kernels would keep them apart.
  if (place > 0) launch.start_event = nullptr;
  if (place + 1 < count) launch.stop_event = nullptr;
  launch.plan = plans != nullptr ? plans[place] : nullptr;
  return launch;
}

int check_chain(const ql_linear_params* params, int count, const ql_cuda_launch* launch) {
  if (params == nullptr || launch == nullptr) return QL_NULL_POINTER;
  if (launch->plan != nullptr) return QL_BAD_PLAN;  // whose it would be is not told
  return count >= 1 && count <= kMostLayers ? QL_OK : QL_BAD_SHAPE;
}

constexpr int kMostDevices = 64;  // as device_info() knows

const void* function_of(const ql_linear_params& params) {
  return chain_function(compute_dtype(params) == QL_BF16, params.m <= partition::kTokens ? 1 : 2);
}

unsigned threads_of(const ql_linear_params& params) {
  const int warps = partition::chain_warps(static_cast<int>(params.m));
  return static_cast<unsigned>(partition::chain_threads(warps));
}

// Whether a thread block of the kernel for these products may run on each multiprocessor at the
// same time: not where a process has but a share of them. Asked once for each device and kernel.
bool can_run_together(const ql_linear_params& params, const ql_cuda_device& device, int ordinal) {
  enum : int { kUnknown, kYes, kNo };
  static std::atomic<int> known[kMostDevices][4];
  const int kernel = 2 * (compute_dtype(params) == QL_BF16) + (params.m > partition::kTokens);
  std::atomic<int>& answer = known[ordinal][kernel];
  if (answer.load(std::memory_order_acquire) == kUnknown) {
    const void* function = function_of(params);
    const auto shared_bytes = static_cast<size_t>(device.shared_bytes_per_block);
    int cooperative = 0, multiprocessors = 0, each = 0;
    const bool can =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             device.shared_bytes_per_block) == cudaSuccess &&
        cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, ordinal) ==
            cudaSuccess &&
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal) ==
            cudaSuccess &&
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &each, function, static_cast<int>(threads_of(params)), shared_bytes) == cudaSuccess &&
        cooperative != 0 && each * multiprocessors >= device.sm_count;
    if (!can) cudaGetLastError();
    answer.store(can ? kYes : kNo, std::memory_order_release);
  }
  return answer.load(std::memory_order_acquire) == kYes;
}

cudaError_t launch_together(const ql_linear_params& params, const ChainArgs& args,
                            const ql_cuda_device& device, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(device.sm_count));
  config.blockDim = dim3(threads_of(params));
  config.dynamicSmemBytes = static_cast<size_t>(args.memory.total);
  config.stream = stream;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<ChainArgs*>(&args)};
  return cudaLaunchKernelExC(&config, function_of(params), arguments);
}

// The first `length` products in one launch; `done` says whether that can be.
int run_together(const ql_linear_params* params, int length, const ql_cuda_launch& launch,
                 bool& done) {
  LaunchGuard guard(launch, "linear chain", params->m, params->n, params->k);
  if (guard.status() != QL_OK) return guard.status();
  done = can_run_together(*params, guard.device(), launch.device);
  if (!done) return QL_OK;
  ChainArgs args;
  if (!chain_args(params, length, guard.device(), launch.workspace, args)) {
    set_error_text("a chain of %d layers: the driver cannot describe it to the copy engine",
                   length);
    return QL_CUDA_ERROR;
  }
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  return guard.finish(launch_together(*params, args, guard.device(), guard.stream()));
}

int run_chain(const ql_linear_params* params, const ql_cuda_plan* const* plans, int count,
              const ql_cuda_launch& chain) {
  int status = QL_OK;
  const ql_cuda_device* device = device_info(chain.device, &status);
  if (device == nullptr) return status;
  const bool may = plans == nullptr && (chain.flags & QL_CUDA_BATCH_INVARIANT) == 0 &&
                   chain.workspace != nullptr && is_multiple(chain.workspace, 256) &&
                   chain.workspace_bytes >= partition::kCounterBytes;
  for (int place = 0; place < count; ++place) {
    const int length = may ? chain_length(params + place, count - place, *device) : 0;
    if (length >= 2) {
      ql_cuda_launch launch = launch_of(chain, plans, place, count);
      if (place + length == count) launch.stop_event = chain.stop_event;
      bool done = false;
      status = run_together(params + place, length, launch, done);
      if (status != QL_OK) return status;
      if (done) {
        place += length - 1;
        continue;
      }
    }
    const ql_cuda_launch launch = launch_of(chain, plans, place, count);
    status = ql_cuda_linear(params + place, &launch);
    if (status != QL_OK) return status;
  }
  return QL_OK;
}

int check(cudaError_t error, int count) {
  return check_cuda(error, "recording a chain of layers", 0, 0, count);
}

// Between the two calls nothing is launched, it is recorded; a failure ends the recording, too.
int record(const ql_linear_params* params, const ql_cuda_plan* const* plans, int count,
           const ql_cuda_launch& launch, cudaGraphExec_t* out) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  int status = check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), count);
  if (status != QL_OK) return status;
  status = run_chain(params, plans, count, launch);
  cudaGraph_t graph = nullptr;
  const int ended = check(cudaStreamEndCapture(stream, &graph), count);
  if (status == QL_OK) status = ended;
  if (status == QL_OK) status = check(cudaGraphInstantiate(out, graph, 0), count);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

}  // namespace
}  // namespace qlinear::cuda

using namespace qlinear::cuda;

extern "C" int ql_cuda_linear_chain(const ql_linear_params* params,
                                    const ql_cuda_plan* const* plans, int count,
                                    const ql_cuda_launch* launch) {
  const int status = check_chain(params, count, launch);
  return status == QL_OK ? run_chain(params, plans, count, *launch) : status;
}

extern "C" int ql_cuda_record_chain(const ql_linear_params* params,
                                    const ql_cuda_plan* const* plans, int count,
                                    const ql_cuda_launch* launch, void** chain) {
  int status = chain == nullptr ? QL_NULL_POINTER : check_chain(params, count, launch);
  if (status != QL_OK) return status;
  *chain = nullptr;
  LaunchGuard guard(*launch, "recording a chain of layers", 0, 0, count);
  if (guard.status() != QL_OK) return guard.status();
  return record(params, plans, count, *launch, reinterpret_cast<cudaGraphExec_t*>(chain));
}

extern "C" int ql_cuda_launch_chain(void* chain, const ql_cuda_launch* launch) {
  if (chain == nullptr || launch == nullptr) return QL_NULL_POINTER;
  LaunchGuard guard(*launch, "launching a chain of layers", 0, 0, 0);
  if (guard.status() != QL_OK) return guard.status();
  const int begun = guard.begin();
  if (begun != QL_OK) return begun;
  return guard.finish(cudaGraphLaunch(static_cast<cudaGraphExec_t>(chain), guard.stream()));
}

extern "C" void ql_cuda_free_chain(void* chain) {
  if (chain != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(chain));
}
