// What the planner must refuse: plans, problems and devices that there cannot be.
#include <cstring>
#include <string>

#include "checks.h"
#include "cuda/linear_kernels.h"
#include "cuda/plan.h"
#include "plan_problems.h"

namespace layout = qlinear::layout;
namespace partition = qlinear::partition;
using qlinear::cuda::check_problem;
using qlinear::cuda::choose_plan;
using qlinear::cuda::plan_fault;
using namespace problems;

namespace {

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
  for (const int wrong : {-1, 0, 3, 5, 6, 7, 9, 16, 24}) {
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
    for (const int wrong : {-1, 0, 1 << 30}) {
      refuse_fed("warps_n", [&](Plan plan) { plan.warps_n = wrong; });
      refuse_fed("warps_k", [&](Plan plan) { plan.warps_k = wrong; });
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

// The rows of a kind's tiles, as a sentence lists them.
std::string listed(qlinear::cuda::Form kind) {
  std::string text;
  int last = 0;
  for (const auto& form : qlinear::cuda::kForms) {
    if (form.form != kind) continue;
    if (last != 0) text += (text.empty() ? "" : ", ") + std::to_string(last);
    last = form.token_blocks;
  }
  return text + " or " + std::to_string(last);
}

// What is wrong with a plan's rows names those that there are.
void check_fault_texts() {
  Section section("fault_texts");
  using qlinear::cuda::Form;
  auto params = params_of(192, 28672, 8192);
  params.weights_fit = 1;
  const auto device = device_of(132, {227, 9});
  ql_cuda_plan plan = choose_plan(params, device, 0);
  const auto expect = [&](const std::string& text) {
    const char* fault = plan_fault(params, device, plan);
    section.check(fault != nullptr && text == fault, "'%s', expected '%s'",
                  fault == nullptr ? "" : fault, text.c_str());
  };
  section.check(plan.token_blocks == 24, "192 rows are cut into tiles of %d", plan.token_blocks);
  plan.token_blocks = 25;
  expect("token_blocks must be " + listed(Form::kAlone) + "; with copy_warp " + listed(Form::kFed) +
         "; with that and warpgroups " + listed(Form::kFedWarpgroups));
  plan.token_blocks = 24;
  params.bits = 8;
  expect("token_blocks must be 16 at most with 8 bits");
  plan = choose_plan(params, device, QL_CUDA_BATCH_INVARIANT);
  plan.token_blocks = 8;
  expect("token_blocks must be 4 at most with 8 bits or groups of 32 or 64, where copy_warp is 0");
  plan = choose_plan(params_of(INT32_MAX, (1 << 30) - 1, 128), device, 0);
  expect("token_blocks is 0, as where no plan can run: too little shared memory or too many tiles");
}

// Descriptions that are no GPU's are refused by each entry, at once; any that could be is taken.
void check_refused_descriptions() {
  Section section("refused_descriptions");
  const auto params = params_of(8, 4096, 4096);
  const ql_cuda_device good = device_of(132, {227, 9});
  const auto expect = [&](int status, auto change) {
    ql_cuda_device device = good;
    change(device);
    int64_t count = -1;
    ql_cuda_plan plan = choose_plan(params, good, 0);
    const char* fault = nullptr;
    const int candidates =
        ql_cuda_plan_candidates(&params, &device, 0, 0, nullptr, nullptr, &count);
    const int completed = ql_cuda_complete_plan(&params, &device, &plan, &fault);
    const int asked = qlinear::cuda::check_question(&params, &device, &plan);
    section.check(candidates == status, "candidates: status %d, expected %d", candidates, status);
    section.check(asked == status, "question: status %d, expected %d", asked, status);
    if (status != QL_OK) {
      section.check(completed == status, "complete: %d, expected %d", completed, status);
      section.check(count == -1, "%d candidates were written", static_cast<int>(count));
    }
  };
  using Device = ql_cuda_device&;
  expect(QL_OK, [](Device) {});
  expect(QL_BAD_DESCRIPTION, [](Device device) { device = {}; });
  for (const int count : {0, -1, -132, INT32_MIN, INT32_MAX, (1 << 16) + 1}) {
    expect(QL_BAD_DESCRIPTION, [=](Device device) { device.sm_count = count; });
    expect(QL_BAD_DESCRIPTION, [=](Device device) { device.sm_count = count, device.major = 8; });
  }
  for (const int count : {1, 7, 8, 1 << 16}) {
    expect(QL_OK, [=](Device device) { device.sm_count = count; });
  }
  for (const int nbytes : {0, -1, INT32_MIN}) {
    expect(QL_BAD_DESCRIPTION, [=](Device device) { device.shared_bytes_per_block = nbytes; });
    expect(QL_BAD_DESCRIPTION, [=](Device device) { device.shared_bytes_per_sm = nbytes; });
    expect(QL_BAD_DESCRIPTION, [=](Device device) {
      device.shared_bytes_per_block = device.shared_bytes_per_sm = nbytes;
    });
  }
  expect(QL_BAD_DESCRIPTION,
         [](Device device) { device.shared_bytes_per_sm = device.shared_bytes_per_block - 1; });
  for (const int wrong : {0, -1, INT32_MIN}) {
    expect(QL_BAD_DESCRIPTION, [=](Device device) { device.major = wrong; });
  }
  // A GPU that there could be, with too little memory for any plan: none is found.
  expect(QL_OK, [](Device device) { device.shared_bytes_per_block = 1; });
}

}  // namespace

void check_refusals() {
  check_fault_texts();
  check_refused_descriptions();
  check_refused_plans();
  check_refused_problems();
}
