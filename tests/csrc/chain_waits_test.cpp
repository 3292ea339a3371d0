// Which layers of a chain wait for those before: chain_waits() against every byte that two layers
// read and write, over x and y that lie in each other in all ways.
#include <random>
#include <set>
#include <vector>

#include "checks.h"
#include "cuda/plan_chain.h"

namespace {

// First and last byte of what lies at `data`.
struct Span {
  int64_t first, last;
};
Span span(const void* data, int64_t m, int64_t stride, int64_t columns, int item) {
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  return {first, first + ((m - 1) * stride + columns) * item - 1};
}
bool meet(const Span& one, const Span& other) {
  std::set<int64_t> bytes;
  for (int64_t at = one.first; at <= one.last; ++at) bytes.insert(at);
  for (int64_t at = other.first; at <= other.last; ++at) {
    if (bytes.count(at) != 0) return true;
  }
  return false;
}

}  // namespace

void check_waits() {
  Section section("waits");
  std::mt19937 draw(0);
  const auto below = [&](int end) {
    return static_cast<int64_t>(draw() % static_cast<unsigned>(end));
  };
  for (int turn = 0; turn < 1500; ++turn) {
    std::vector<ql_linear_params> layers(2 + static_cast<size_t>(below(4)));
    const int64_t m = 1 + below(3);
    for (ql_linear_params& each : layers) {
      each = {};
      each.m = m;
      each.k = 4 + below(8);
      each.n = 4 + below(8);
      each.x_row_stride = each.k + below(3);
      each.y_row_stride = each.n + below(3);
      each.x_dtype = QL_BF16;
      each.y_dtype = below(2) == 0 ? QL_F32 : QL_BF16;
      each.x = reinterpret_cast<const void*>(static_cast<uintptr_t>(64 + 2 * below(200)));
      each.y = reinterpret_cast<void*>(static_cast<uintptr_t>(64 + 4 * below(100)));
    }
    for (int place = 0; place < static_cast<int>(layers.size()); ++place) {
      const auto spans = [&](int of) {
        const ql_linear_params& p = layers[static_cast<size_t>(of)];
        return std::pair{span(p.x, m, p.x_row_stride, p.k, 2),
                         span(p.y, m, p.y_row_stride, p.n, p.y_dtype == QL_F32 ? 4 : 2)};
      };
      bool expected = false;
      const auto [x, y] = spans(place);
      for (int before = 0; before < place; ++before) {
        const auto [other_x, other_y] = spans(before);
        expected = expected || meet(x, other_y) || meet(y, other_y) || meet(y, other_x);
      }
      section.check(qlinear::cuda::chain_waits(layers.data(), place) == expected,
                    "layer %d of %zu %s wait", place, layers.size(),
                    expected ? "must" : "need not");
    }
  }
}
