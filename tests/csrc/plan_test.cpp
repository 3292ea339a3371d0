// Proves the planner of cuda/plan.cpp with g++ alone: for every problem and device there is a plan
// that can run there, and plans that cannot are refused. Prints what test_partition.py
// reads.
#include "cuda/plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "cuda/candidates.h"
#include "cuda/linear_kernels.h"
#include "plan_problems.h"
#include "shapes.h"

namespace layout = qlinear::layout;
namespace partition = qlinear::partition;
using qlinear::cuda::check_problem;
using qlinear::cuda::choose_plan;
using qlinear::cuda::complete_plan;
using qlinear::cuda::for_each_candidate;
using qlinear::cuda::plan_fault;
using qlinear::cuda::stripes_of;
using namespace problems;

namespace {

struct Sections {
  Section runnable{"runnable"}, memory{"shared_memory"}, workspace{"workspace"}, tiles{"tiles"};
  Section stripes{"stripes"}, kernel{"kernel"}, invariant{"batch_invariant"};
};

qlinear::cuda::Form form_of_plan(const ql_cuda_plan& plan) {
  using qlinear::cuda::Form;
  return plan.warpgroups ? Form::kFedWarpgroups : plan.copy_warp ? Form::kFed : Form::kAlone;
}

// Weights may be rounded to x's 16 bits: results and scales have no more, and fp16 holds them all.
bool rounding_allowed(const ql_linear_params& params) {
  if (params.x_dtype != params.scale_dtype || params.y_dtype == QL_F32) return false;
  return params.x_dtype == QL_BF16 ? params.y_dtype == QL_BF16 : params.weights_fit == 1;
}

// Tiles cover all rows and features, none is empty, and a lower one would not hold all rows.
bool tiles_fit(const ql_linear_params& params, const ql_cuda_plan& plan) {
  const int64_t rows = 8 * plan.token_blocks, columns = 16 * int64_t{plan.tile_blocks};
  const int64_t n_padded = layout::round_up(params.n, layout::kPadN);
  for (const auto& form : qlinear::cuda::kForms) {
    const bool fine = qlinear::cuda::fine_groups(params.group_size);
    const bool there = qlinear::cuda::serves(form, params.bits, fine) &&
                       (rounding_allowed(params) || !qlinear::cuda::rounds(form, fine));
    if (there && form.form == form_of_plan(plan) && form.token_blocks < plan.token_blocks &&
        8 * form.token_blocks >= params.m) {
      return false;
    }
  }
  return plan.m_tiles * rows >= params.m && (plan.m_tiles - 1) * rows < params.m &&
         plan.n_tiles * columns >= n_padded && (plan.n_tiles - 1) * columns < n_padded;
}

// The number leads back to format, form and groups, and the device can run the form.
bool kernel_fits(const ql_linear_params& params, const ql_cuda_device& device,
                 const ql_cuda_plan& plan) {
  if (plan.kernel < 0 || plan.kernel >= qlinear::cuda::kKernels) return false;
  const auto place = qlinear::cuda::kernel_place(plan.kernel);
  const auto form = qlinear::cuda::kForms[place.form];
  using qlinear::cuda::Form;
  const bool device_fits =
      form.form == Form::kAlone || (device.major == 9 && plan.warps_n * plan.warps_k % 4 == 0);
  const bool warps_fit = form.form != Form::kFedWarpgroups || plan.warps_n % 4 == 0;
  const bool fine = params.group_size == 32 || params.group_size == 64;
  if (qlinear::cuda::rounds(form, fine) && !rounding_allowed(params)) return false;
  return place.format / 2 == (params.x_dtype == QL_BF16) &&
         place.format % 2 == (params.bits == 8) && form.token_blocks == plan.token_blocks &&
         form.form == form_of_plan(plan) &&
         place.fine == (fine && !qlinear::cuda::one_for_all_groups(form)) && device_fits &&
         warps_fit;
}

// Shared memory that the kernel will use, and threads that it may have.
int shared_bytes_of(const ql_linear_params& params, const ql_cuda_plan& plan) {
  const int item = params.scale_dtype == QL_F32 ? 4 : 2;
  const bool has_zeros = params.zeros != nullptr;
  if (plan.copy_warp != 0) {
    return partition::fed_memory(qlinear::cuda::fed_geometry(plan), params.bits, params.group_size,
                                 item, has_zeros)
        .total;
  }
  return partition::shared_memory({plan.token_blocks, plan.warps_n, plan.warps_k, plan.stages},
                                  params.bits, params.group_size, item, has_zeros)
      .total;
}
int most_threads(const ql_cuda_plan& plan) {
  return plan.copy_warp != 0 ? partition::fed_max_threads(plan.token_blocks)
                             : partition::max_threads(plan.token_blocks);
}

// Registers of a thread block at its start, which every thread gets as many of as the largest block
// could have, in eights; the kernels of the form alone take as many threads as they have room for.
int registers_of(const ql_cuda_plan& plan) {
  const int threads = plan.warps_n * plan.warps_k * 32;
  if (plan.copy_warp == 0) return threads * (65536 / most_threads(plan));
  const int each = 65536 / partition::fed_bound(plan.token_blocks) / 8 * 8;
  return (threads + partition::kCopyThreads) * each;
}

// Every step of every tile is somebody's, and every warp has one: of the form alone by its stripes,
// of the fed forms by whole tiles whose k the thread blocks of a cluster share.
bool work_fits(const ql_linear_params& params, const ql_cuda_plan& plan) {
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  const int64_t steps = layout::round_up(params.k, layout::kPadK) / partition::kStepK;
  if (plan.copy_warp != 0) {
    const int64_t own = (steps + plan.cluster - 1) / plan.cluster;
    return plan.whole_tiles == 1 && plan.cluster >= 1 && plan.cluster <= partition::kMaxCluster &&
           plan.ctas % plan.cluster == 0 && plan.ctas <= tiles * plan.cluster &&
           plan.cluster <= steps && (plan.warps_k <= own || plan.warps_n * plan.warps_k == 4) &&
           plan.tile_blocks <= plan.warps_n * partition::fed_blocks_per_warp(plan.token_blocks);
  }
  const auto stripes = stripes_of(params, plan);
  return stripes.granules * stripes.granule_steps == tiles * steps && stripes.ctas == plan.ctas &&
         (plan.whole_tiles == 0 || stripes.granule_steps == steps) && plan.warps_k <= steps;
}

void check_plan(Sections& sections, const ql_linear_params& params, const ql_cuda_device& device,
                int flags, const ql_cuda_plan& plan) {
  const char* fault = plan_fault(params, device, plan);
  const auto text = [&] { return words(params, device, flags, plan); };
  const auto check = [&](Section& section, bool holds) {
    section.check(holds, "%s", holds ? "" : text().c_str());
  };
  // All thread blocks are resident at once: their registers and shared memory fit side by side.
  const int per_sm = (plan.ctas + device.sm_count - 1) / device.sm_count;
  const bool resident = per_sm * registers_of(plan) <= 65536 &&
                        per_sm * (plan.shared_bytes + 1024) <= device.shared_bytes_per_sm;
  check(sections.runnable, fault == nullptr && resident);
  check(sections.memory, plan.shared_bytes == shared_bytes_of(params, plan) &&
                             plan.shared_bytes <= device.shared_bytes_per_block &&
                             plan.warps_n * plan.warps_k * 32 <= most_threads(plan));
  const int64_t tiles = int64_t{plan.m_tiles} * plan.n_tiles;
  const int64_t slot = 4 * int64_t{8} * plan.token_blocks * 32 * plan.warps_n;
  check(sections.workspace,
        plan.whole_tiles == 1
            ? plan.workspace_bytes == 0
            : plan.workspace_bytes == partition::kCounterBytes + 2 * plan.ctas * slot &&
                  plan.workspace_bytes <= partition::kWorkspaceBytes &&
                  4 * tiles <= partition::kCounterBytes);
  check(sections.tiles, tiles_fit(params, plan));
  check(sections.stripes, work_fits(params, plan));
  check(sections.kernel, kernel_fits(params, device, plan));
}

// A row is summed up in the same order for every m: the same shares of k, by one thread block and
// the same instruction.
void check_invariant(Sections& sections, ql_linear_params params, const ql_cuda_device& device) {
  int warps_k = 0;
  for (const int64_t m : shapes::kRows) {
    params.m = m;
    const auto plan = choose_plan(params, device, QL_CUDA_BATCH_INVARIANT);
    check_plan(sections, params, device, QL_CUDA_BATCH_INVARIANT, plan);
    if (warps_k == 0) warps_k = plan.warps_k;
    const bool holds = plan.warps_k == warps_k && plan.whole_tiles == 1 && plan.warpgroups == 0;
    sections.invariant.check(
        holds, "%s", holds ? "" : words(params, device, QL_CUDA_BATCH_INVARIANT, plan).c_str());
  }
}

// All problems on every `parts`-th kind of device from `part` on.
void check_every_problem(int part, int parts) {
  Sections sections;
  shapes::for_each([&](int64_t k, int64_t n) {
    for_each_form(params_of(1, n, k), [&](ql_linear_params params) {
      for (size_t i = part; i < std::size(kKinds); i += parts) {
        const Kind kind = kKinds[i];
        for (const int multiprocessors : shapes::kMultiprocessors) {
          const auto device = device_of(multiprocessors, kind);
          for (const int64_t m : shapes::kRows) {
            params.m = m;
            params.x_dtype = m % 2 == 0 ? QL_F16 : QL_BF16;
            if (params.scale_dtype != QL_F32) {
              params.scale_dtype = m % 11 == 0 ? int{QL_F16} : params.x_dtype;
            }
            params.weights_fit = m % 3 != 0;
            params.y_dtype = m % 5 == 0 ? QL_F32 : m % 7 < 3 ? QL_BF16 : QL_F16;
            check_plan(sections, params, device, 0, choose_plan(params, device, 0));
          }
          if (multiprocessors == shapes::kMultiprocessors[0] || multiprocessors == 132) {
            check_invariant(sections, params, device);
          }
        }
      }
    });
  });
}

// The largest sizes that the contract lets in: every number must still fit where it is kept.
void check_largest() {
  Sections sections;
  const int64_t most_m = (int64_t{1} << 31) - 1, most = (int64_t{1} << 30) - 1;
  const int64_t sizes[][3] = {{most_m, 64, 128}, {1, most, 128},   {1, 64, most},
                              {1, 10240, most},  {4096, 64, most}, {int64_t{1} << 28, 4096, 4096},
                              {1, most, 4096}};
  for (const auto& size : sizes) {
    for (const Kind kind : kKinds) {
      const auto device = device_of(132, kind);
      for_each_form(params_of(size[0], size[1], size[2]), [&](const ql_linear_params& params) {
        sections.runnable.check(check_problem(params) == QL_OK, "sizes are refused");
        for (const int flags : {0, int{QL_CUDA_BATCH_INVARIANT}}) {
          check_plan(sections, params, device, flags, choose_plan(params, device, flags));
        }
      });
    }
  }
}

bool same(const ql_cuda_plan& one, const ql_cuda_plan& other) {
  return std::memcmp(&one, &other, sizeof one) == 0;
}

// All that is weighed can run as it is, and the choice is the first of the best.
void check_candidates() {
  Section section("candidates");
  for (const Kind kind : kKinds) {
    for (const int flags : {0, static_cast<int>(QL_CUDA_BATCH_INVARIANT)}) {
      for (const int64_t m : {1, 9, 64, 250}) {
        for (const auto& [k, n] : shapes::kLayers) {
          const ql_linear_params params = params_of(m, n, k);
          const ql_cuda_device device = device_of(108, kind);
          std::vector<std::pair<double, ql_cuda_plan>> found;
          for_each_candidate(params, device, flags, [&](const ql_cuda_plan& plan, double time) {
            ql_cuda_plan again = plan;
            complete_plan(params, again);
            section.check(
                time > 0 && plan_fault(params, device, plan) == nullptr && same(again, plan), "%s",
                words(params, device, flags, plan).c_str());
            found.emplace_back(time, plan);
          });
          const auto best = std::min_element(
              found.begin(), found.end(),
              [](const auto& one, const auto& other) { return one.first < other.first; });
          section.check(
              best != found.end() && same(best->second, choose_plan(params, device, flags)),
              "m %lld n %lld k %lld: the choice is another", static_cast<long long>(m),
              static_cast<long long>(n), static_cast<long long>(k));
        }
      }
    }
  }
}

}  // namespace

// With two numbers a part of the work: which one, and of how many that may run side by side.
int main(int count, char** words) {
  const int part = count > 2 ? std::atoi(words[1]) : 0, parts = count > 2 ? std::atoi(words[2]) : 1;
  check_every_problem(part, parts);
  if (part != 0) return 0;
  check_candidates();
  check_largest();
  check_refusals();
  return 0;
}
