// Plans of the fed forms: how many n-blocks a tile holds, how many thread blocks share its k, how
// warps are arranged; and the microseconds that the model expects of each.
#include <algorithm>

#include "cuda/candidates.h"
#include "cuda/linear_kernels.h"

namespace qlinear::cuda {
namespace {

constexpr int kWarps = partition::kWarpgroupWarps;

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Clusters that run at once, with nothing else: of the 132 multiprocessors of an H200 those of a
// size reach so many (cudaOccupancyMaxActiveClusters). 0 where the device is too small.
int64_t clusters_at_once(const ql_cuda_device& device, int cluster) {
  constexpr int kOf = 132, kReached[] = {132, 132, 117, 120, 110, 102, 105, 120};
  return int64_t{device.sm_count} * kReached[cluster - 1] / kOf / cluster;
}

// What the model knows of a form, in microseconds; fitted to sweeps on an H200 (docs/kernel.md).
struct FormTimes {
  double block;  // of an n-block's step, that a multiprocessor takes
  double step;   // of a step, that a warp takes
  double start;  // beside what every form takes
};
constexpr FormTimes times_of(int token_blocks, bool fine) {
  return token_blocks == 1 ? FormTimes{0.0240, 0.147, 1.54}
         : token_blocks == 2
             ? fine ? FormTimes{0.0300, 0.300, 1.24} : FormTimes{0.0212, 0.239, 1.24}
         : token_blocks == 4  ? FormTimes{0.0295, 0.113, 1.82}
         : token_blocks == 8  ? FormTimes{0.0357, 0.228, 0.69}
         : token_blocks == 16 ? FormTimes{0.0731, 0.171, 2.06}
                              : FormTimes{0.1097, 0.171, 2.06};
}
constexpr double kReadBytes = 4.17e6;   // a microsecond, all together
constexpr double kFixedShare = 0.10;    // of the rate, that no other multiprocessor can use
constexpr double kL2BytesOfOne = 82e3;  // weights and x, by one multiprocessor
constexpr double kName = 0.174;         // what a copying warp needs to name the boxes of a step
constexpr double kWarp = 0.033;         // what each warp of a thread block adds to its start
constexpr double kTileEnd = 1.36;
constexpr double kShallow = 0.4;     // a warpgroup's ring of two slots, against deeper ones
constexpr double kManyTiles = 0.01;  // of a warpgroup's tile: each asks the second cache for x
constexpr double kShare = 0.09;      // what a cluster takes to add up, beside
constexpr double kAddBlock = 0.188;  // 8 rows of an n-block, by a warp
constexpr double kDirectEnd = 1.77, kDirectBlock = 0.046;  // where warps store, and for 8 rows

double fed_time(const ql_linear_params& params, const ql_cuda_device& device,
                const ql_cuda_plan& plan) {
  const double steps = static_cast<double>(tile_steps(params));
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  const double rounds = static_cast<double>(divide_up(tiles, plan.ctas / plan.cluster));
  const double per_sm = static_cast<double>(divide_up(plan.ctas, device.sm_count));
  // Of a multiprocessor, whose thread blocks share what it can read and multiply.
  const double own_steps = rounds * steps / plan.cluster * per_sm;
  const double block_bytes =
      partition::code_bytes(layout::kTileN, params.bits) +
      partition::scale_bytes(layout::kTileN, params.group_size, item_bytes(params.scale_dtype)) +
      partition::zero_bytes(layout::kTileN, params.group_size, params.zeros != nullptr);
  const double step_bytes = plan.tile_blocks * block_bytes;
  const double x_bytes = plan.token_blocks * partition::kTokens * partition::kStepK * 2.0;
  const double blocks = static_cast<double>(padded_n(params)) / layout::kTileN;
  const double read = (kFixedShare * own_steps * plan.tile_blocks * device.sm_count +
                       (1 - kFixedShare) * blocks * steps) *
                      block_bytes / kReadBytes;
  const double through_l2 = own_steps * (step_bytes + x_bytes) / kL2BytesOfOne;
  const FormTimes times = times_of(plan.token_blocks, fine_groups(params.group_size));
  const int computed = plan.warps_n * partition::fed_blocks_per_warp(plan.token_blocks);
  const double turns = rounds * static_cast<double>(divide_up(
                                    divide_up(tile_steps(params), plan.cluster), plan.warps_k));
  const double compute = own_steps * computed * times.block + turns * times.step;
  const bool direct = plan.warpgroups != 0 && plan.cluster == 1 && plan.warps_k == 1;
  const double adding = kAddBlock * plan.token_blocks * plan.tile_blocks *
                        (plan.warps_k + (plan.cluster > 1 ? 2 : 0)) / (plan.warps_n * plan.warps_k);
  const double tile_end = direct ? kDirectEnd + kDirectBlock * plan.token_blocks
                                 : kTileEnd + (plan.cluster > 1 ? kShare : 0.0) + adding;
  const double name = rounds * steps / plan.cluster * kName;
  const double time = std::max({read, through_l2, name, compute}) + rounds * tile_end;
  const double shallow = plan.warpgroups != 0 && plan.stages == 2 ? kShallow : 0.0;
  const double many = plan.warpgroups != 0 ? kManyTiles * static_cast<double>(tiles) : 0.0;
  return times.start + kWarp * plan.warps_n * plan.warps_k + shallow + many +
         overlapping_time(device, plan.ctas, time);
}

// How many thread blocks of this plan a multiprocessor has registers and threads for.
int fit_registers(const ql_cuda_plan& plan) {
  constexpr int kRegisters = 65536, kStep = 8;
  const int each = kRegisters / partition::fed_bound(plan.token_blocks) / kStep * kStep;
  const int threads = plan.warps_n * plan.warps_k * 32 + partition::kCopyThreads;
  return kRegisters / (each * threads);
}

// Completes a plan whose tile, cluster and warps are set, for `per_sm` thread blocks on each
// multiprocessor; false if it cannot run.
bool finish(const ql_linear_params& params, const ql_cuda_device& device, int64_t clusters,
            int per_sm, ql_cuda_plan& plan) {
  constexpr int kReserved = 1024;  // of each thread block's shared memory, for the system
  if (per_sm > fit_registers(plan)) return false;
  plan.ctas = plan.cluster;
  plan.stages = 2;
  complete_plan(params, plan);
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  plan.ctas = static_cast<int32_t>(std::min(tiles, clusters)) * plan.cluster;
  plan.stages = most_stages(
      params, plan,
      std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm / per_sm - kReserved));
  if (plan.stages < 2) return false;
  complete_plan(params, plan);
  return plan_fault(params, device, plan) == nullptr;
}

// Shows all ways to arrange warps for a tile.
void see_tile(const ql_linear_params& params, const ql_cuda_device& device, int64_t clusters,
              int per_sm, ql_cuda_plan plan, const SeeCandidate& see) {
  const int of_warp = partition::fed_blocks_per_warp(plan.token_blocks);
  plan.warps_n = (plan.tile_blocks + of_warp - 1) / of_warp;
  if (plan.warpgroups != 0) plan.warps_n = (plan.warps_n + kWarps - 1) / kWarps * kWarps;
  const int most = partition::fed_max_threads(plan.token_blocks) / 32 / plan.warps_n;
  const int64_t steps = divide_up(tile_steps(params), plan.cluster);
  for (plan.warps_k = 1; plan.warps_k <= most; ++plan.warps_k) {
    // Of a short k some groups have no step; so be it where the copying warps need four to share
    // registers with.
    const bool enough = plan.warps_k <= steps || plan.warps_n * plan.warps_k == kWarps;
    if (!enough || plan.warps_n * plan.warps_k % kWarps != 0) continue;
    ql_cuda_plan candidate = plan;
    if (finish(params, device, clusters, per_sm, candidate)) {
      see(candidate, fed_time(params, device, candidate));
    }
  }
}

}  // namespace

void see_fed(const ql_linear_params& params, const ql_cuda_device& device, int token_blocks,
             bool warpgroups, const SeeCandidate& see) {
  constexpr int64_t kMostRounds = 4;  // more tiles one after the other only where they are small
  const int64_t blocks = padded_n(params) / layout::kTileN;
  const int64_t m_tiles = divide_up(params.m, int64_t{token_blocks} * partition::kTokens);
  const int most =
      partition::fed_max_threads(token_blocks) / 32 * partition::fed_blocks_per_warp(token_blocks);
  ql_cuda_plan plan{};
  plan.token_blocks = token_blocks;
  plan.warpgroups = warpgroups ? 1 : 0;
  plan.copy_warp = 1;
  plan.whole_tiles = 1;
  constexpr int kWays = 2 * partition::kMaxCluster;  // one thread block a multiprocessor, or two
  for (int way = 0; way < kWays; ++way) {
    const int per_sm = 1 + way % 2;
    plan.cluster = 1 + way / 2;
    if (plan.cluster > 1 && plan.cluster > tile_steps(params)) break;
    const int64_t clusters = per_sm * clusters_at_once(device, plan.cluster);
    if (clusters == 0) break;
    // In fewer rounds tiles would need more n-blocks than a thread block can have.
    const int64_t first =
        std::max<int64_t>(1, divide_up(divide_up(blocks, most) * m_tiles, clusters));
    int64_t last = 0;
    for (int64_t rounds = first; rounds <= std::max(first, kMostRounds); ++rounds) {
      // So many n-blocks that all tiles are done after so many rounds, and then whole warps of
      // them.
      const int64_t n_tiles = std::max<int64_t>(1, clusters * rounds / m_tiles);
      const int64_t least = std::max<int64_t>(partition::fed_blocks_per_warp(token_blocks),
                                              divide_up(blocks, n_tiles));
      for (const int64_t wanted : {least, layout::round_up(least, kWarps)}) {
        if (wanted == last || wanted > most) continue;
        plan.tile_blocks = static_cast<int32_t>(wanted);
        see_tile(params, device, clusters, per_sm, plan, see);
      }
      last = least;
    }
    // Of many tiles it matters less that their last round is full than how many warps are busy.
    for (int64_t wanted = kWarps; warpgroups && m_tiles > 1 && wanted <= most; wanted += kWarps) {
      plan.tile_blocks = static_cast<int32_t>(wanted);
      see_tile(params, device, clusters, per_sm, plan, see);
    }
  }
}

}  // namespace qlinear::cuda
