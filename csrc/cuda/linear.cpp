// ql_cuda_linear: checks, the plan, and the launch.
#include <atomic>
#include <cstdio>
#include <cstring>

#include "cuda/linear_kernels.h"
#include "cuda/plan.h"
#include "cuda/product.h"

namespace qlinear::cuda {
namespace {

constexpr int kMaxDevices = 64;

const void* kernel_function(int kernel) {
  static const LinearFunctions alone[kFormats] = {linear_f16_4(), linear_f16_8(), linear_bf16_4(),
                                                  linear_bf16_8()};
  static const LinearFunctions fed[kFormats] = {linear_f16_4_fed(), linear_f16_8_fed(),
                                                linear_bf16_4_fed(), linear_bf16_8_fed()};
  const KernelPlace place = kernel_place(kernel);
  return (place.form < kAloneForms ? alone : fed)[place.format]
      .functions[place.form * kGroupForms + place.fine];
}

// Lets a kernel use all the shared memory there is, once for each device.
cudaError_t allow_shared_memory(int kernel, const ql_cuda_device& info, int device) {
  static std::atomic<bool> allowed[kMaxDevices][kKernels];
  if (allowed[device][kernel].load(std::memory_order_acquire)) return cudaSuccess;
  const void* function = kernel_function(kernel);
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           info.shared_bytes_per_block);
  if (error != cudaSuccess) return error;
  allowed[device][kernel].store(true, std::memory_order_release);
  return cudaSuccess;
}

int check_pointers(const ql_linear_params& params) {
  if (params.m == 0 || params.n == 0) return QL_OK;
  if (params.qweight == nullptr || params.scales == nullptr || params.y == nullptr ||
      (params.x == nullptr && params.k > 0)) {
    return QL_NULL_POINTER;
  }
  return is_multiple(params.qweight, layout::kAlignBytes) &&
                 is_multiple(params.scales, layout::kVectorBytes) &&
                 is_multiple(params.zeros, layout::kVectorBytes)
             ? QL_OK
             : QL_MISALIGNED;
}

int check_workspace(const ql_cuda_plan& plan, const ql_cuda_launch& launch) {
  if (plan.workspace_bytes == 0) return QL_OK;
  return launch.workspace != nullptr && is_multiple(launch.workspace, 256) &&
                 launch.workspace_bytes >= plan.workspace_bytes
             ? QL_OK
             : QL_WORKSPACE;
}

LinearArgs linear_args(const ql_linear_params& params, const ql_cuda_plan& plan,
                       const ql_cuda_launch& launch) {
  const int64_t n_padded = layout::round_up(params.n, layout::kPadN);
  const int64_t k_padded = layout::round_up(params.k, layout::kPadK);
  const int64_t groups = layout::group_count(k_padded, params.group_size);
  const auto bytes = [](const void* pointer) { return static_cast<const unsigned char*>(pointer); };
  LinearArgs args{};
  args.x = bytes(params.x);
  args.qweight = bytes(params.qweight);
  args.scales = bytes(params.scales);
  args.zeros = params.zeros;
  args.output = output_of(params);
  args.step = step_args(params);
  args.counters = static_cast<int*>(launch.workspace);
  args.slots = reinterpret_cast<float*>(static_cast<unsigned char*>(launch.workspace) +
                                        partition::kCounterBytes);
  args.x_row_bytes = params.x_row_stride * item_bytes(params.x_dtype);
  args.x_advance_bytes = args.x_row_bytes * (plan.warps_n * 32 / partition::kRowChunks);
  args.code_block_bytes = layout::kTileN * k_padded * params.bits / 8;
  const int scale_item_bytes = item_bytes(params.scale_dtype);
  args.scale_block_bytes = groups * layout::kTileN * scale_item_bytes;
  args.zero_block_bytes = groups * layout::kTileN;
  const int step_groups = partition::groups_per_step(params.group_size);
  const bool has_zeros = params.zeros != nullptr;
  args.scale_chunks = step_groups * scale_item_bytes;
  args.zero_chunks = has_zeros ? step_groups : 0;
  args.code_step_bytes =
      static_cast<int>(partition::kStepK / layout::kTileK * layout::tile_bytes(params.bits));
  args.scale_step_bytes = params.group_size == -1 ? 0 : args.scale_chunks * layout::kVectorBytes;
  args.zero_step_bytes = params.group_size == -1 ? 0 : args.zero_chunks * layout::kVectorBytes;
  args.code_advance = plan.warps_k * args.code_step_bytes;
  args.scale_advance = plan.warps_k * args.scale_step_bytes;
  args.zero_advance = plan.warps_k * args.zero_step_bytes;
  args.x_item_bytes = item_bytes(params.x_dtype);
  args.stripes = stripes_of(params, plan);
  args.memory =
      partition::shared_memory({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                               params.bits, params.group_size, scale_item_bytes, has_zeros);
  args.m = static_cast<int>(params.m);
  args.k = static_cast<int>(params.k);
  args.n_blocks = static_cast<int>(n_padded / layout::kTileN);
  args.tile_steps = static_cast<int>(k_padded / partition::kStepK);
  args.m_tiles = plan.m_tiles;
  args.warps_n = plan.warps_n;
  while (1 << args.warps_n_log2 < plan.warps_n) ++args.warps_n_log2;
  args.warps_k = plan.warps_k;
  args.stages = plan.stages;
  args.x_dtype = params.x_dtype;
  args.x_async = x_can_be_copied(params);
  return args;
}

// Hands `args`, of either form, to the plan's kernel.
cudaError_t launch_kernel(const ql_cuda_plan& plan, void* args, bool dependent,
                          cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>(
      plan.warps_n * plan.warps_k * 32 + (plan.copy_warp != 0 ? partition::kCopyThreads : 0)));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (dependent) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  void* arguments[] = {args};
  return cudaLaunchKernelExC(&config, kernel_function(plan.kernel), arguments);
}

// What a plan depends on.
struct PlanKey {
  int64_t m, n, k, group_size;
  int32_t bits, bf16, scale_item_bytes, has_zeros, x_can_be_copied, device, flags, may_round;
};

// The plan for a problem: choosing weighs hundreds of candidates, so each thread remembers some.
ql_cuda_plan remembered_plan(const ql_linear_params& params, const ql_cuda_device& device,
                             const ql_cuda_launch& launch) {
  constexpr unsigned kRemembered = 512;
  struct Entry {
    PlanKey key;
    ql_cuda_plan plan;
  };
  thread_local Entry entries[kRemembered];  // all zero at first: no problem has m = 0 here
  PlanKey key{};
  key.m = params.m;
  key.n = params.n;
  key.k = params.k;
  key.group_size = params.group_size;
  key.bits = params.bits;
  key.bf16 = compute_dtype(params) == QL_BF16;
  key.scale_item_bytes = item_bytes(params.scale_dtype);
  key.has_zeros = params.zeros != nullptr;
  key.x_can_be_copied = x_can_be_copied(params);
  key.may_round = may_round(params);
  key.device = launch.device;
  key.flags = launch.flags & QL_CUDA_BATCH_INVARIANT;
  uint64_t words[sizeof(PlanKey) / 8], hash = 0;
  std::memcpy(words, &key, sizeof key);
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  Entry& entry = entries[hash >> 40 & (kRemembered - 1)];
  if (std::memcmp(&entry.key, &key, sizeof key) != 0) {
    entry.key = key;
    entry.plan = choose_plan(params, device, launch.flags);
  }
  return entry.plan;
}

}  // namespace

Product::Product(const ql_linear_params& params, const ql_cuda_launch& launch)
    : params_(params), launch_(launch), guard_(launch, "linear", params.m, params.n, params.k) {}

int Product::prepare() {
  int status = check_problem(params_);
  if (status == QL_OK) status = check_pointers(params_);
  if (status == QL_OK) status = guard_.status();
  if (status != QL_OK || params_.m == 0 || params_.n == 0) return status;
  return prepare_kernel();
}

int Product::prepare_kernel() {
  plan_ =
      launch_.plan != nullptr ? *launch_.plan : remembered_plan(params_, guard_.device(), launch_);
  const char* fault = plan_fault(params_, guard_.device(), plan_);
  if (fault != nullptr) {
    set_error_text("linear m=%lld n=%lld k=%lld: %s", static_cast<long long>(params_.m),
                   static_cast<long long>(params_.n), static_cast<long long>(params_.k), fault);
    return QL_BAD_PLAN;
  }
  complete_plan(params_, plan_);
  const int status = check_workspace(plan_, launch_);
  if (status != QL_OK) return status;
  const cudaError_t error = allow_shared_memory(plan_.kernel, guard_.device(), launch_.device);
  if (error != cudaSuccess) return guard_.finish(error);
  if (plan_.copy_warp == 0) {
    args_ = linear_args(params_, plan_, launch_);
  } else if (!fed_args(params_, plan_, fed_)) {
    set_error_text("linear m=%lld n=%lld k=%lld: the driver cannot describe it to the copy engine",
                   static_cast<long long>(params_.m), static_cast<long long>(params_.n),
                   static_cast<long long>(params_.k));
    return QL_CUDA_ERROR;
  }
  return QL_OK;
}

int Product::launch() {
  const bool dependent = (launch_.flags & QL_CUDA_DEPENDENT) != 0 && guard_.device().major >= 9;
  const bool is_empty = params_.m == 0 || params_.n == 0;
  args_.dependent = fed_.dependent = dependent;
  void* arguments = plan_.copy_warp == 0 ? static_cast<void*>(&args_) : static_cast<void*>(&fed_);
  const int begun = guard_.begin();
  if (begun != QL_OK) return begun;
  return guard_.finish(is_empty ? cudaSuccess
                                : launch_kernel(plan_, arguments, dependent, guard_.stream()));
}

}  // namespace qlinear::cuda

using namespace qlinear;
using namespace qlinear::cuda;

extern "C" int ql_cuda_linear(const ql_linear_params* params, const ql_cuda_launch* launch) {
  if (params == nullptr || launch == nullptr) return QL_NULL_POINTER;
  Product product(*params, *launch);
  const int status = product.prepare();
  return status == QL_OK ? product.launch() : status;
}

extern "C" int ql_cuda_plan_linear(const ql_linear_params* params, const ql_cuda_device* device,
                                   int flags, ql_cuda_plan* out) {
  const int status = check_question(params, device, out);
  if (status != QL_OK) return status;
  *out = choose_plan(*params, *device, flags);
  const char* fault = plan_fault(*params, *device, *out);
  if (fault == nullptr) return QL_OK;
  set_error_text("plan m=%lld n=%lld k=%lld on %s: %s", static_cast<long long>(params->m),
                 static_cast<long long>(params->n), static_cast<long long>(params->k), device->name,
                 fault);
  return QL_BAD_PLAN;
}

extern "C" int64_t ql_cuda_workspace_bytes(void) { return partition::kWorkspaceBytes; }
extern "C" int ql_cuda_kernel_count(void) { return kKernels; }

extern "C" const char* ql_cuda_kernel_name(int kernel) {
  static char names[kKernels][64];
  static const bool filled = [] {
    for (int i = 0; i < kKernels; ++i) {
      const KernelPlace place = kernel_place(i);
      const LinearForm form = kForms[place.form];
      std::snprintf(names[i], sizeof names[i], "linear_%s_b%d_rows%d_%s%s",
                    place.format / 2 ? "bf16" : "f16", place.format % 2 ? 8 : 4,
                    form.token_blocks * partition::kTokens,
                    one_for_all_groups(form) ? "g_any"
                    : place.fine             ? "g32_64"
                                             : "g128",
                    form.form == Form::kAlone ? ""
                    : form.form == Form::kFed ? "_fed"
                                              : "_fed_wgmma");
    }
    return true;
  }();
  return filled && kernel >= 0 && kernel < kKernels ? names[kernel] : "no such kernel";
}
