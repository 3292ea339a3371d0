// Plans: which tile, how many warps, stages and thread blocks for (m, n, k) on a device.
#include "cuda/plan.h"

#include <algorithm>

#include "cuda/candidates.h"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {
namespace {

using partition::kStepK;
using partition::kTokens;

bool known_dtype(int dtype) { return dtype >= QL_F16 && dtype <= QL_F32; }

// Shared memory of a thread block.
int memory_of(const ql_linear_params& params, const ql_cuda_plan& plan) {
  const int scale_bytes = item_bytes(params.scale_dtype);
  const bool has_zeros = params.zeros != nullptr;
  if (plan.copy_warp != 0) {
    return partition::fed_memory(fed_geometry(plan), params.bits, params.group_size, scale_bytes,
                                 has_zeros)
        .total;
  }
  return partition::shared_memory({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                                  params.bits, params.group_size, scale_bytes, has_zeros)
      .total;
}

int max_threads_of(const ql_cuda_plan& plan) {
  return plan.copy_warp != 0 ? partition::fed_max_threads(plan.token_blocks)
                             : partition::max_threads(plan.token_blocks);
}

// Hopper alone: its kernels are code for sm_90a.
bool has_copy_engine(const ql_cuda_device& device) { return device.major == 9; }

int64_t tiles_of(const ql_cuda_plan& plan) { return int64_t{plan.m_tiles} * plan.n_tiles; }

// The smallest form of this kind whose tile holds all rows, else the largest; 0 if there is none.
int token_blocks_for(const ql_linear_params& params, Form kind) {
  int blocks = 0;
  for (const LinearForm& form : kForms) {
    const bool fine = fine_groups(params.group_size);
    if (form.form == kind && blocks * kTokens < params.m && serves(form, params.bits, fine) &&
        (may_round(params) || !rounds(form, fine))) {
      blocks = form.token_blocks;
    }
  }
  return blocks;
}

// The model behind a choice; constants are fitted to sweeps on an H200 (docs/kernel.md).
constexpr int kInvariantWarpsK = 1;
constexpr double kReadBytesPerMicrosecond = 32.7e3;  // per multiprocessor, large layers
constexpr double kL2BytesPerMicrosecond = 82.1e3;    // per multiprocessor, weights and x together
constexpr double kShareBytesPerMicrosecond = 50e3;   // at which one thread block adds up shares
constexpr double kSplitMicroseconds = 4.72;          // what split tiles take beside that
constexpr double kTileMicroseconds = 0.53;           // what the end of a tile takes
constexpr double kOverlapMicroseconds = 1.07;        // of it, hidden by a launch that fits beside
constexpr double kStartMicroseconds = 1.9;
constexpr double kIdle = 0.429;
// Time per step beside the memory's, by rows of a tile.
constexpr double slowdown(int token_blocks, bool fine) {
  constexpr double kFine = 1.2;  // more sums to scale, beside 16 rows and more
  return token_blocks == 1 ? 1.24
                           : (fine ? kFine : 1.0) * (token_blocks == 2   ? 1.59
                                                     : token_blocks == 4 ? 2.67
                                                                         : 6.3);
}

double ceil_divide(double value, double by) {
  const double quotient = value / by;
  const double whole = static_cast<double>(static_cast<int64_t>(quotient));
  return whole < quotient ? whole + 1 : whole;
}

// Microseconds that a plan of the form alone should take.
double expected_time(const ql_linear_params& params, const ql_cuda_device& device,
                     const ql_cuda_plan& plan) {
  const double steps = static_cast<double>(tile_steps(params));
  const double tiles = static_cast<double>(tiles_of(plan)), sms = device.sm_count;
  const double columns = partition::warp_columns(plan.token_blocks) * plan.warps_n;
  const double rows = plan.token_blocks * kTokens;
  const double step_bytes = columns * partition::kStepK * params.bits / 8.0;
  const double x_bytes = rows * partition::kStepK * 2.0;
  const double ctas_per_sm = ceil_divide(plan.ctas, sms);
  // Fewer warps than fit leave memory and arithmetic idle.
  const double warps = ctas_per_sm * plan.warps_n * plan.warps_k;
  const double idle = std::max(1.0, partition::max_threads(plan.token_blocks) / 32 / warps);
  const double step_time =
      std::max(step_bytes / kReadBytesPerMicrosecond *
                   slowdown(plan.token_blocks, fine_groups(params.group_size)) *
                   (1 + kIdle * (idle - 1)),
               (step_bytes + x_bytes) / kL2BytesPerMicrosecond) *
      (1 + 0.01 * plan.warps_n);  // warps that share activations wait for each other
  if (plan.whole_tiles) {
    // Whole rounds of a group's steps: the last may not need every group.
    const double uneven = ceil_divide(steps, plan.warps_k) * plan.warps_k / steps;
    const double rounds = ceil_divide(tiles, plan.ctas);
    // A multiprocessor with less to do leaves more of the memory's rate to the others.
    const double per_sm = 0.6 * rounds * ctas_per_sm + 0.4 * tiles / sms;
    const double time = per_sm * steps * uneven * step_time + rounds * kTileMicroseconds;
    // The kernel behind this one fits beside it, where kernels may overlap at all.
    const bool overlaps = device.major >= 9 && idle >= 2.0;
    return overlapping_time(device, plan.ctas, time) + kStartMicroseconds -
           (overlaps ? kOverlapMicroseconds : 0.0);
  }
  const double share = tiles * steps / std::min(sms, static_cast<double>(plan.ctas));
  const double shares = plan.ctas / tiles + 1;
  return share * step_time + kTileMicroseconds + kSplitMicroseconds + kStartMicroseconds +
         0.03 * rows + shares * rows * columns * sizeof(float) / kShareBytesPerMicrosecond;
}

// Completes a plan whose form and warps are set, whole tiles or not; false if it cannot run.
bool finish_candidate(const ql_linear_params& params, const ql_cuda_device& device, int per_sm,
                      ql_cuda_plan& plan) {
  constexpr int kReserved = 1024;  // of each thread block's shared memory, for the system
  const int budget =
      std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm / per_sm - kReserved);
  plan.stages = most_stages(params, plan, budget);
  if (plan.stages < 2) return false;
  plan.ctas = 1;
  complete_plan(params, plan);
  const int64_t slots = int64_t{device.sm_count} * per_sm;
  int64_t ctas = std::min(tiles_of(plan), slots);
  if (!plan.whole_tiles) {
    const int64_t room =
        partition::kSlotsBytes /
        partition::slots_bytes({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages}, 1);
    // Every group of warps should have two steps at least.
    const int64_t busy = tiles_of(plan) * tile_steps(params) / (2 * plan.warps_k);
    ctas = std::min({slots, room, std::max(tiles_of(plan), busy)});
  }
  plan.ctas = static_cast<int32_t>(std::max<int64_t>(ctas, 1));
  complete_plan(params, plan);
  return plan_fault(params, device, plan) == nullptr;
}

// Shows all ways to arrange warps of the form alone that can run; false if none can.
bool see_warps(const ql_linear_params& params, const ql_cuda_device& device, bool invariant,
               ql_cuda_plan plan, const SeeCandidate& see) {
  bool any = false;
  for (plan.warps_n = partition::kMaxWarpsN; plan.warps_n >= 1; plan.warps_n /= 2) {
    for (plan.warps_k = 1; plan.warps_k <= partition::kMaxWarpsK; ++plan.warps_k) {
      // The order in which a row is summed must not depend on the number of rows.
      if (invariant && plan.warps_k != kInvariantWarpsK) continue;
      if (plan.warps_k > 1 && plan.warps_k > tile_steps(params)) break;
      // Thread blocks of fewer warps start and end more often than they help.
      if (plan.warps_n * plan.warps_k < std::min<int64_t>(4, tile_steps(params)) && !invariant) {
        continue;
      }
      const int most = max_threads_of(plan) / (plan.warps_n * plan.warps_k * 32);  // by registers
      for (int per_sm = 1; per_sm <= most; ++per_sm) {
        for (plan.whole_tiles = 1; plan.whole_tiles >= (invariant ? 1 : 0); --plan.whole_tiles) {
          ql_cuda_plan candidate = plan;
          if (!finish_candidate(params, device, per_sm, candidate)) continue;
          any = true;
          see(candidate, expected_time(params, device, candidate));
        }
      }
    }
  }
  return any;
}

}  // namespace

double overlapping_time(const ql_cuda_device& device, int ctas, double microseconds) {
  constexpr double kUsed = 0.265, kMost = 24.5;
  if (device.major < 9) return microseconds;
  const int64_t slots = (ctas + device.sm_count - 1) / device.sm_count * int64_t{device.sm_count};
  const double idle = 1.0 - static_cast<double>(ctas) / static_cast<double>(slots);
  return microseconds - kUsed * idle * std::min(microseconds, kMost);
}

int most_stages(const ql_linear_params& params, ql_cuda_plan plan, int budget) {
  int stages = 1;
  const int most = plan.copy_warp ? partition::kMaxStages : partition::kMaxStagesAlone;
  for (plan.stages = 2; plan.stages <= most; ++plan.stages) {
    if (memory_of(params, plan) > budget) break;
    stages = plan.stages;
  }
  return stages;
}

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

bool may_round(const ql_linear_params& params) {
  const int compute = compute_dtype(params);
  const bool no_finer = params.y_dtype == QL_BF16 || params.y_dtype == compute;
  return params.scale_dtype == compute && no_finer &&
         (compute == QL_BF16 || params.weights_fit != 0);
}

bool x_can_be_copied(const ql_linear_params& params) {
  const auto address = reinterpret_cast<uintptr_t>(params.x);
  return params.x_dtype != QL_F32 && address % layout::kVectorBytes == 0 &&
         (params.m <= 1 || params.x_row_stride * 2 % layout::kVectorBytes == 0);
}

void complete_plan(const ql_linear_params& params, ql_cuda_plan& plan) {
  if (plan.copy_warp == 0) {
    plan.tile_blocks = partition::blocks_per_warp(plan.token_blocks) * plan.warps_n;
    plan.cluster = 1;
  }
  const int64_t columns = int64_t{layout::kTileN} * plan.tile_blocks;
  const int64_t rows = int64_t{kTokens} * plan.token_blocks;
  plan.n_tiles = static_cast<int32_t>((padded_n(params) + columns - 1) / columns);
  plan.m_tiles = static_cast<int32_t>((params.m + rows - 1) / rows);
  plan.shared_bytes = memory_of(params, plan);
  plan.kernel = kernel_index(compute_dtype(params) == QL_BF16, params.bits,
                             form_of(plan.token_blocks, plan.warpgroups != 0, plan.copy_warp != 0),
                             params.group_size);
  plan.workspace_bytes =
      plan.whole_tiles
          ? 0
          : partition::kCounterBytes +
                partition::slots_bytes({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                                       plan.ctas);
}

const char* plan_fault(const ql_linear_params& params, const ql_cuda_device& device,
                       const ql_cuda_plan& plan) {
  if (plan.token_blocks == 0) {
    return "token_blocks is 0, as where no plan can run: too little shared memory or too many "
           "tiles";
  }
  if (form_of(plan.token_blocks, plan.warpgroups != 0, plan.copy_warp != 0) < 0) {
    return "token_blocks must be 1, 2, 4 or 8; with copy_warp 1 or 2; with that and warpgroups 4, "
           "8, 16 or 24";
  }
  if (kernel_index(false, params.bits,
                   form_of(plan.token_blocks, plan.warpgroups != 0, plan.copy_warp != 0),
                   params.group_size) < 0) {
    return plan.copy_warp != 0 ? "token_blocks must be 16 at most with 8 bits"
                               : "token_blocks must be 4 at most with 8 bits or groups of 32 or "
                                 "64, where copy_warp is 0";
  }
  if (plan.copy_warp != 0 && !may_round(params) &&
      partition::fed_rounded(plan.token_blocks, fine_groups(params.group_size))) {
    return "this kernel rounds weights to x's 16 bits; it needs results no finer than those, "
           "scales of x's dtype and, for fp16, weights_fit";
  }
  if (plan.copy_warp != 0 && !has_copy_engine(device)) {
    return "this device has no copy engine; set copy_warp to 0";
  }
  if (plan.copy_warp != 0 && !x_can_be_copied(params)) {
    return "the copy engine needs 16-bit x in rows that begin at multiples of 16 bytes; set "
           "copy_warp to 0";
  }
  const int64_t warps = int64_t{plan.warps_n} * plan.warps_k;
  if (plan.copy_warp != 0 && warps % partition::kWarpgroupWarps != 0) {
    return "warps_n * warps_k must be a multiple of 4 with copy_warp: registers move between fours";
  }
  if (plan.warpgroups != 0 && plan.warps_n % partition::kWarpgroupWarps != 0) {
    return "warps_n must be a multiple of 4 with warpgroups: four warps multiply together";
  }
  if (plan.copy_warp != 0) {
    const int64_t least = partition::fed_blocks_per_warp(plan.token_blocks);
    if (plan.warps_n < 1 || plan.tile_blocks < least || plan.tile_blocks > plan.warps_n * least) {
      return "tile_blocks must be 4 to 4 * warps_n with copy_warp, with warpgroups 1 to warps_n";
    }
    if (plan.cluster < 1 || plan.cluster > partition::kMaxCluster ||
        plan.ctas % plan.cluster != 0) {
      return "cluster must be 1 to 8 and divide ctas";
    }
    if (plan.whole_tiles == 0) return "whole_tiles must be 1 with copy_warp: clusters share tiles";
  } else if (plan.warps_n < 1 || plan.warps_n > partition::kMaxWarpsN ||
             (plan.warps_n & (plan.warps_n - 1)) != 0) {
    return "warps_n must be 1, 2, 4 or 8";
  }
  if (plan.warps_k < 1 || plan.warps_k > partition::kMaxWarpsK) return "warps_k must be 1 to 16";
  if (warps * 32 > max_threads_of(plan)) {
    return "too many warps for the registers of this kernel";
  }
  if (plan.stages < 2 ||
      plan.stages > (plan.copy_warp ? partition::kMaxStages : partition::kMaxStagesAlone)) {
    return "stages must be 2 to 4, or with copy_warp 2 to 8";
  }
  ql_cuda_plan complete = plan;
  complete_plan(params, complete);
  if (complete.shared_bytes > device.shared_bytes_per_block) {
    return "more shared memory than a thread block of this device can have";
  }
  const int64_t tiles = int64_t{complete.m_tiles} * complete.n_tiles;
  if (tiles >= int64_t{1} << 31) return "too many tiles";
  const int64_t granules = plan.whole_tiles ? tiles * complete.cluster : tiles * tile_steps(params);
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

void for_each_candidate(const ql_linear_params& params, const ql_cuda_device& device, int flags,
                        const SeeCandidate& see) {
  const bool invariant = (flags & QL_CUDA_BATCH_INVARIANT) != 0;
  ql_cuda_plan plan{};
  plan.token_blocks = token_blocks_for(params, Form::kAlone);
  // Fewer rows per tile where nothing else fits: small shared memory and wide codes. Without the
  // copy engine also where the model expects more of it: 99 KiB leave a large tile few warps.
  while ((!see_warps(params, device, invariant, plan, see) || !has_copy_engine(device)) &&
         plan.token_blocks > 1) {
    plan.token_blocks /= 2;
  }
  if (invariant || !has_copy_engine(device) || !x_can_be_copied(params)) return;
  const int few = token_blocks_for(params, Form::kFed);
  if (few == 0) return;  // weights may not be rounded, and groups are short
  if (few * kTokens >= params.m) {
    see_fed(params, device, few, false, see);
    return;
  }
  const bool fine = fine_groups(params.group_size);
  const int many = token_blocks_for(params, Form::kFedWarpgroups);
  // Several tiles of fewer rows may fill the device better than one of many.
  constexpr int kFewest = 8;
  for (const LinearForm& form : kForms) {
    const int blocks = form.token_blocks;
    if (form.form == Form::kFedWarpgroups && serves(form, params.bits, fine) &&
        (blocks == many || (blocks < many && blocks >= kFewest))) {
      see_fed(params, device, blocks, true, see);
    }
  }
}

ql_cuda_plan choose_plan(const ql_linear_params& params, const ql_cuda_device& device, int flags) {
  ql_cuda_plan best{};
  double best_time = 0;
  for_each_candidate(params, device, flags, [&](const ql_cuda_plan& candidate, double time) {
    if (best_time != 0 && time >= best_time) return;
    best = candidate;
    best_time = time;
  });
  return best;
}

}  // namespace qlinear::cuda
