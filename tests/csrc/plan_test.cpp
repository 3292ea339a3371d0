// Proves the planner of cuda/plan.cpp with g++ alone: for every problem and device there is a plan
// that can run there, and plans that cannot are refused. Prints what test_plan.py reads.
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
#include "shapes.h"

namespace layout = qlinear::layout;
namespace partition = qlinear::partition;
using qlinear::cuda::check_problem;
using qlinear::cuda::choose_plan;
using qlinear::cuda::complete_plan;
using qlinear::cuda::for_each_candidate;
using qlinear::cuda::plan_fault;
using qlinear::cuda::stripes_of;

namespace {

// Shared memory of a thread block, and the compute capability's first number: A10 and L4, A100,
// H100 and H200, and those after it, which lack the warpgroup products of 9.0.
struct Kind {
  int shared_kib, major;
};
constexpr Kind kKinds[] = {{99, 8}, {163, 8}, {227, 9}, {227, 10}, {99, 12}};
constexpr int kDtypes[] = {QL_F16, QL_BF16, QL_F32};

ql_linear_params params_of(int64_t m, int64_t n, int64_t k) {
  ql_linear_params params{};
  params.m = m;
  params.n = n;
  params.k = k;
  params.x_row_stride = k;
  params.y_row_stride = n;
  params.group_size = 128;
  params.bits = 4;
  params.x_dtype = params.compute_dtype = params.scale_dtype = QL_F16;
  params.bias_dtype = params.y_dtype = QL_F16;
  params.threads = 1;
  return params;
}

ql_cuda_device device_of(int multiprocessors, Kind kind) {
  ql_cuda_device device{};
  device.sm_count = multiprocessors;
  device.major = kind.major;
  device.shared_bytes_per_block = kind.shared_kib * 1024;
  device.shared_bytes_per_sm = (kind.shared_kib + 1) * 1024;
  device.supported = 1;
  return device;
}

std::string words(const ql_linear_params& p, const ql_cuda_device& device, int flags,
                  const ql_cuda_plan& plan) {
  char text[400];
  std::snprintf(text, sizeof text,
                "m %lld n %lld k %lld bits %d group_size %lld scale_dtype %d zeros %d on %d x %d "
                "bytes, major %d, flags %d: warpgroups %d token_blocks %d warps_n %d warps_k %d "
                "stages %d ctas %d whole %d tile_blocks %d cluster %d",
                static_cast<long long>(p.m), static_cast<long long>(p.n),
                static_cast<long long>(p.k), p.bits, static_cast<long long>(p.group_size),
                p.scale_dtype, p.zeros != nullptr, device.sm_count, device.shared_bytes_per_block,
                device.major, flags, plan.warpgroups, plan.token_blocks, plan.warps_n, plan.warps_k,
                plan.stages, plan.ctas, plan.whole_tiles, plan.tile_blocks, plan.cluster);
  return text;
}

// Every form of weights: bits, group size, dtype of the scales, zero points.
template <typename See>
void for_each_form(ql_linear_params params, See see) {
  static const uint8_t some_zeros = 0;
  for (const int bits : {4, 8}) {
    for (const int group_size : {-1, 32, 64, 128}) {
      for (const int scale_dtype : {QL_F16, QL_F32}) {
        for (const uint8_t* zeros : {static_cast<const uint8_t*>(nullptr), &some_zeros}) {
          params.bits = bits;
          params.group_size = group_size;
          params.scale_dtype = scale_dtype;
          params.zeros = zeros;
          see(params);
        }
      }
    }
  }
}

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

void check_refused_plans() {
  Section section("refused_plans");
  const auto params = params_of(100, 4096, 4096);
  const auto device = device_of(132, {227, 9});
  const ql_cuda_plan good = choose_plan(params, device, QL_CUDA_BATCH_INVARIANT);
  section.check(plan_fault(params, device, good) == nullptr, "the plan itself");
  const auto refused = [&](const char* what, auto change) {
    ql_cuda_plan plan = good;
    change(plan);
    section.check(plan_fault(params, device, plan) != nullptr, "%s", what);
  };
  using Plan = ql_cuda_plan&;
  for (const int wrong : {-1, 0, 3, 5, 6, 7, 9, 16}) {
    refused("token_blocks", [&](Plan plan) { plan.token_blocks = wrong; });
    refused("warps_n", [&](Plan plan) { plan.warps_n = wrong; });
  }
  for (const int wrong : {-1, 0, 17, 1 << 30}) {
    refused("warps_k", [&](Plan plan) { plan.warps_k = wrong; });
  }
  for (const int wrong : {-1, 0, 1, partition::kMaxStages + 1, 1 << 30}) {
    refused("stages", [&](Plan plan) { plan.stages = wrong; });
  }
  for (const int wrong : {-1, 0, 1 << 30}) {
    refused("ctas", [&](Plan plan) { plan.ctas = wrong; });
  }
  for (const int token_blocks : {1, 2, 4, 8}) {  // one warp more than the registers allow
    refused("threads", [&](Plan plan) {
      plan = {};
      plan.token_blocks = token_blocks;
      plan.warps_n = token_blocks == 1 ? 2 : 1;
      plan.warps_k = token_blocks == 1 ? 9 : partition::max_threads(token_blocks) / 32 + 1;
      plan.stages = 2;
      plan.ctas = plan.whole_tiles = 1;
    });
  }
  refused("one block per tile", [&](Plan plan) {
    plan.whole_tiles = 1;
    plan.ctas = plan.m_tiles * plan.n_tiles + 1;
  });
  refused("shared memory", [&](Plan plan) {
    plan.token_blocks = 8;
    plan.stages = partition::kMaxStages;
    plan.warps_n = 2;
    plan.warps_k = 4;
  });
  auto tight = device;
  tight.shared_bytes_per_block = good.shared_bytes;
  section.check(plan_fault(params, tight, good) == nullptr, "just enough shared memory");
  --tight.shared_bytes_per_block;
  section.check(plan_fault(params, tight, good) != nullptr, "a byte less");
  refused("workspace", [&](Plan plan) {
    plan.token_blocks = plan.warps_n = 8;
    plan.warps_k = 1;
    plan.stages = 2;
    plan.whole_tiles = 0;
    plan.ctas = 600;
  });
  for (const int warps_n : {1, 2}) {
    refused("half a warpgroup", [&](Plan plan) { plan.warpgroups = 1, plan.warps_n = warps_n; });
  }
  for (const int token_blocks : {1, 2}) {
    refused("few rows by warpgroups", [&](Plan plan) {
      plan.warpgroups = plan.warps_k = 1;
      plan.token_blocks = token_blocks;
    });
  }
  refused("many rows by warps", [&](Plan plan) {
    plan.token_blocks = 16;
    plan.warps_k = 1;
  });
  {
    const auto few = params_of(8, 28672, 8192);
    const ql_cuda_plan fed = choose_plan(few, device, 0);
    section.check(fed.copy_warp == 1 && plan_fault(few, device, fed) == nullptr, "a fed plan");
    const auto refuse_fed = [&](const char* what, auto change) {
      ql_cuda_plan plan = fed;
      change(plan);
      section.check(plan_fault(few, device, plan) != nullptr, "fed: %s", what);
    };
    for (const int wrong : {-1, 0, partition::kMaxCluster + 1, 1 << 20}) {
      refuse_fed("cluster", [&](Plan plan) { plan.cluster = wrong; });
    }
    refuse_fed("part of a cluster", [&](Plan plan) {
      plan.cluster = 2;
      plan.ctas = 131;
    });
    for (const int wrong : {-1, 0, 4 * fed.warps_n + 1, 1 << 20}) {
      refuse_fed("tile_blocks", [&](Plan plan) { plan.tile_blocks = wrong; });
    }
    refuse_fed("split tiles", [&](Plan plan) { plan.whole_tiles = 0; });
    refuse_fed("three warps", [&](Plan plan) {
      plan.warps_n = plan.tile_blocks = 3;
      plan.warps_k = 1;
    });
    auto fine = few;
    fine.group_size = 32;
    refuse_fed("128 rows of fine groups", [&](Plan plan) {
      plan.warpgroups = 1;
      plan.token_blocks = 16;
    });
    ql_cuda_plan most = choose_plan(params_of(100, 28672, 8192), device, 0);
    most.token_blocks = 16;
    section.check(plan_fault(fine, device, most) != nullptr, "no kernel of 128 rows, fine groups");
  }
  for (const int major : {8, 10, 12}) {
    auto other = device;
    other.major = major;
    const auto many = params_of(64, 28672, 8192);
    ql_cuda_plan grouped = choose_plan(many, device, 0);
    section.check(grouped.warpgroups == 1 && plan_fault(many, device, grouped) == nullptr,
                  "warpgroups on 9.0");
    grouped.copy_warp = 0;
    section.check(plan_fault(many, other, grouped) != nullptr, "warpgroups on %d.0", major);
  }
  {
    auto other = device;
    other.major = 8;
    const auto few = params_of(8, 57344, 8192);
    const ql_cuda_plan fed = choose_plan(few, device, 0);
    section.check(fed.copy_warp == 1 && plan_fault(few, device, fed) == nullptr, "fed on 9.0");
    section.check(plan_fault(few, other, fed) != nullptr, "fed on 8.0");
    auto odd = few;
    odd.x_row_stride += 1;
    section.check(plan_fault(odd, device, fed) != nullptr, "fed with rows not 16-byte aligned");
    section.check(choose_plan(odd, device, 0).copy_warp == 0, "rows not aligned are not fed");
  }
  {
    // 64 rows by 16-bit values of k = 1536 in 99 KiB: tiles of 64 rows would leave most idle.
    const ql_cuda_plan plan = choose_plan(params_of(64, 384, 1536), device_of(72, kKinds[0]), 0);
    section.check(plan.ctas >= 12 && plan.warps_n * plan.warps_k >= 4,
                  "an A10 at work on a small layer: %d of 72", plan.ctas);
  }
  auto wide = params_of(1, (int64_t{1} << 30) - 1, 128);
  ql_cuda_plan split = choose_plan(wide, device, 0);
  section.check(split.whole_tiles == 1, "so many tiles stay whole");
  split.whole_tiles = 0;
  section.check(plan_fault(wide, device, split) != nullptr, "more tiles than counters");
}

void check_refused_problems() {
  Section section("refused_problems");
  const auto status_after = [](auto change) {
    ql_linear_params params = params_of(4, 64, 128);
    change(params);
    return check_problem(params);
  };
  using Params = ql_linear_params&;
  const auto expect = [&](int status, auto change) {
    const int given = status_after(change);
    section.check(given == status, "status %d, expected %d", given, status);
  };
  expect(QL_OK, [](Params) {});
  expect(QL_OK, [](Params p) { p.m = 0; });
  expect(QL_OK, [](Params p) { p.m = 1, p.x_row_stride = p.y_row_stride = 0; });
  expect(QL_BAD_SHAPE, [](Params p) { p.m = -1; });
  expect(QL_BAD_SHAPE, [](Params p) { p.n = -1; });
  expect(QL_BAD_SHAPE, [](Params p) { p.k = -1; });
  expect(QL_BAD_SHAPE, [](Params p) { p.k = 0; });
  expect(QL_BAD_SHAPE, [](Params p) { p.m = int64_t{1} << 31; });
  expect(QL_BAD_SHAPE, [](Params p) { p.n = p.y_row_stride = int64_t{1} << 30; });
  expect(QL_BAD_SHAPE, [](Params p) { p.k = p.x_row_stride = int64_t{1} << 30; });
  expect(QL_BAD_SHAPE, [](Params p) { p.x_row_stride = p.k - 1; });
  expect(QL_BAD_SHAPE, [](Params p) { p.y_row_stride = p.n - 1; });
  for (const int bits : {0, 2, 3, 5, 16}) expect(QL_BAD_BITS, [=](Params p) { p.bits = bits; });
  for (const int group_size : {0, 16, 96, 256}) {
    expect(QL_BAD_GROUP_SIZE, [=](Params p) { p.group_size = group_size; });
  }
  for (const int dtype : {0, 4, -1}) {
    expect(QL_BAD_DTYPE, [=](Params p) { p.x_dtype = dtype; });
    expect(QL_BAD_DTYPE, [=](Params p) { p.scale_dtype = dtype; });
    expect(QL_BAD_DTYPE, [=](Params p) { p.bias_dtype = dtype; });
    expect(QL_BAD_DTYPE, [=](Params p) { p.y_dtype = dtype; });
    expect(QL_BAD_DTYPE, [=](Params p) { p.x_dtype = QL_F32, p.compute_dtype = dtype; });
    expect(QL_OK, [=](Params p) { p.compute_dtype = dtype; });  // read beside fp32 x alone
  }
  expect(QL_BAD_DTYPE, [](Params p) { p.x_dtype = p.compute_dtype = QL_F32; });
  for (const int dtype : kDtypes) expect(QL_OK, [=](Params p) { p.x_dtype = dtype; });
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
  check_refused_plans();
  check_refused_problems();
  return 0;
}
