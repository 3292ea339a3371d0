// Plans: which tile, how many warps, stages and thread blocks for (m, n, k) on a device.
#include "cuda/plan.h"

#include <algorithm>

#include "cuda/linear_kernels.h"

namespace qlinear::cuda {
namespace {

using partition::kStepK;
using partition::kTokens;

int64_t padded_n(const ql_linear_params& params) {
  return layout::round_up(params.n, layout::kPadN);
}
int64_t tile_steps(const ql_linear_params& params) {
  return layout::round_up(params.k, layout::kPadK) / kStepK;
}
bool known_dtype(int dtype) { return dtype >= QL_F16 && dtype <= QL_F32; }

partition::SharedMemory memory_of(const ql_linear_params& params, const ql_cuda_plan& plan) {
  return partition::shared_memory({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                                  params.bits, params.group_size, item_bytes(params.scale_dtype),
                                  params.zeros != nullptr);
}

int power_of_two_up_to(int64_t value) {
  int power = 1;
  while (2 * power <= value) power *= 2;
  return power;
}

// Stages until the ring would not fit `budget` bytes of shared memory.
int most_stages(const ql_linear_params& params, ql_cuda_plan plan, int budget) {
  int stages = 1;
  for (plan.stages = 2; plan.stages <= partition::kMaxStages; ++plan.stages) {
    if (memory_of(params, plan).total > budget) break;
    stages = plan.stages;
  }
  return stages;
}

bool has_warpgroups(const ql_cuda_device& device) { return device.major == 9; }

// The smallest form whose tile holds all rows, else the largest.
LinearForm form_for(int64_t m, bool warpgroups) {
  LinearForm best{};
  for (const LinearForm& form : kForms) {
    if (form.warpgroups == warpgroups && best.token_blocks * kTokens < m) best = form;
  }
  return best;
}

// Whether whole tiles keep the thread blocks nearly evenly busy.
bool whole_tiles_are_even(int64_t tiles, int64_t slots) {
  const int64_t rounds = (tiles + slots - 1) / slots;
  return static_cast<double>(tiles) / static_cast<double>(rounds * slots) >= 0.9;
}

}  // namespace

int check_problem(const ql_linear_params& params) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (params.m < 0 || params.n < 0 || params.k < 0) return QL_BAD_SHAPE;
  if (params.m >= kMost || params.n >= kMost / 2 || params.k >= kMost / 2) return QL_BAD_SHAPE;
  if (params.k == 0 && params.m > 0 && params.n > 0) return QL_BAD_SHAPE;  // there is no such layer
  if (params.m > 1 && (params.x_row_stride < params.k || params.y_row_stride < params.n)) {
    return QL_BAD_SHAPE;
  }
  if (!layout::bits_supported(params.bits)) return QL_BAD_BITS;
  if (!layout::group_size_supported(params.group_size)) return QL_BAD_GROUP_SIZE;
  if (!known_dtype(params.x_dtype) || !known_dtype(params.scale_dtype) ||
      !known_dtype(params.bias_dtype) || !known_dtype(params.y_dtype)) {
    return QL_BAD_DTYPE;
  }
  const int compute = compute_dtype(params);
  return compute == QL_F16 || compute == QL_BF16 ? QL_OK : QL_BAD_DTYPE;
}

void complete_plan(const ql_linear_params& params, ql_cuda_plan& plan) {
  const int64_t columns = int64_t{partition::warp_columns(plan.token_blocks)} * plan.warps_n;
  const int64_t rows = int64_t{kTokens} * plan.token_blocks;
  plan.n_tiles = static_cast<int32_t>((padded_n(params) + columns - 1) / columns);
  plan.m_tiles = static_cast<int32_t>((params.m + rows - 1) / rows);
  plan.shared_bytes = memory_of(params, plan).total;
  plan.kernel = kernel_index(compute_dtype(params) == QL_BF16, params.bits,
                             form_of(plan.token_blocks, plan.warpgroups != 0), params.group_size);
  plan.workspace_bytes =
      plan.whole_tiles
          ? 0
          : partition::kCounterBytes +
                partition::slots_bytes({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                                       plan.ctas);
}

const char* plan_fault(const ql_linear_params& params, const ql_cuda_device& device,
                       const ql_cuda_plan& plan) {
  if (form_of(plan.token_blocks, plan.warpgroups != 0) < 0) {
    return "token_blocks must be 1, 2, 4 or 8, or with warpgroups 4, 8 or 16";
  }
  if (plan.warpgroups != 0 && !has_warpgroups(device)) {
    return "this device has no warpgroup products";
  }
  if (plan.warpgroups != 0 && plan.warps_n % partition::kWarpgroupWarps != 0) {
    return "warps_n must be 4 or 8 with warpgroups: four warps multiply together";
  }
  if (plan.warps_n < 1 || plan.warps_n > partition::kMaxWarpsN ||
      (plan.warps_n & (plan.warps_n - 1)) != 0) {
    return "warps_n must be 1, 2, 4 or 8";
  }
  if (plan.warps_k < 1 || plan.warps_k > partition::kMaxWarpsK) return "warps_k must be 1 to 16";
  if (plan.warps_n > 1 && plan.warps_k > partition::kMaxBarrierGroups) {
    return "warps_k must be 15 at most where warps_n is above 1: so many named barriers there are";
  }
  if (plan.warps_n * plan.warps_k * 32 > partition::max_threads(plan.token_blocks)) {
    return "too many warps for the registers of this kernel";
  }
  if (plan.stages < 2 || plan.stages > partition::kMaxStages) return "stages must be 2 to 4";
  ql_cuda_plan complete = plan;
  complete_plan(params, complete);
  if (complete.shared_bytes > device.shared_bytes_per_block) {
    return "more shared memory than a thread block of this device can have";
  }
  const int64_t tiles = int64_t{complete.m_tiles} * complete.n_tiles;
  if (tiles >= int64_t{1} << 31) return "too many tiles";
  const int64_t granules = plan.whole_tiles ? tiles : tiles * tile_steps(params);
  if (plan.ctas < 1 || plan.ctas > granules) {
    return "ctas must be 1 at least, and at most one per tile (whole_tiles) or step";
  }
  if (!plan.whole_tiles && granules >= int64_t{1} << 31) {
    return "too many steps to split tiles between thread blocks; set whole_tiles";
  }
  if (complete.workspace_bytes > partition::kWorkspaceBytes) return "too large a workspace";
  if (!plan.whole_tiles && tiles * int64_t{sizeof(int32_t)} > partition::kCounterBytes) {
    return "too many tiles to split them between thread blocks; set whole_tiles";
  }
  return nullptr;
}

partition::Stripes stripes_of(const ql_linear_params& params, const ql_cuda_plan& plan) {
  const int steps = static_cast<int>(tile_steps(params));
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  return plan.whole_tiles ? partition::Stripes{tiles, steps, plan.ctas}
                          : partition::Stripes{tiles * steps, 1, plan.ctas};
}

ql_cuda_plan choose_plan(const ql_linear_params& params, const ql_cuda_device& device, int flags) {
  ql_cuda_plan plan{};
  const bool invariant = (flags & QL_CUDA_BATCH_INVARIANT) != 0;
  const int64_t steps = tile_steps(params);
  const bool warpgroups = has_warpgroups(device) && params.m > 16 && !invariant;
  plan.token_blocks = form_for(params.m, warpgroups).token_blocks;
  plan.warpgroups = warpgroups ? 1 : 0;
  // Few rows: warps share out k, so that no tile is split between thread blocks. More rows: warps
  // side by side, so that activations are read by fewer of them.
  plan.warps_n = plan.token_blocks == 16 ? 8 : std::min(plan.token_blocks, 4);
  plan.warps_k = partition::max_threads(plan.token_blocks) / 32 / plan.warps_n;
  if (plan.token_blocks >= 4) plan.warps_k = plan.token_blocks == 16 ? 1 : 2;
  if (invariant) plan.warps_k = 2;  // a row's sum must not depend on the number of rows
  plan.warps_k = std::min(plan.warps_k, power_of_two_up_to(std::max<int64_t>(steps, 1)));
  plan.stages = most_stages(params, plan, device.shared_bytes_per_block);
  while (plan.stages < 2 && plan.warps_n > (warpgroups ? 4 : 1)) {
    plan.warps_n /= 2;
    plan.stages = most_stages(params, plan, device.shared_bytes_per_block);
  }
  while (plan.stages < 2 && plan.warps_k > 1 && !invariant) {
    plan.warps_k /= 2;
    plan.stages = most_stages(params, plan, device.shared_bytes_per_block);
  }
  while (plan.stages < 2 &&
         plan.token_blocks > (warpgroups ? 4 : 1)) {  // fewer rows change no row's sum
    plan.token_blocks /= 2;
    plan.stages = most_stages(params, plan, device.shared_bytes_per_block);
  }
  plan.whole_tiles = 1;
  complete_plan(params, plan);
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  const int64_t slots = device.sm_count;
  plan.ctas = static_cast<int32_t>(std::min(tiles, slots));
  if (!invariant && !whole_tiles_are_even(tiles, slots) && tiles < 16 * slots) {
    plan.whole_tiles = 0;
    plan.ctas = static_cast<int32_t>(
        std::min(slots, std::max<int64_t>(tiles, tiles * steps / (2 * plan.warps_k))));
  }
  complete_plan(params, plan);
  return plan;
}

}  // namespace qlinear::cuda
