// What layers of a chain have to do with each other: tie_of() and reads_results() against every
// byte that two layers read and write, over x and y that lie in each other in all ways.
#include <random>
#include <set>
#include <vector>

#include "checks.h"
#include "cuda/plan_chain.h"

namespace {

// Bytes from the first to the last that lie at `data`.
std::set<int64_t> bytes_at(const void* data, int64_t m, int64_t stride, int64_t columns, int item) {
  std::set<int64_t> bytes;
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  for (int64_t i = 0; i < ((m - 1) * stride + columns) * item; ++i) bytes.insert(first + i);
  return bytes;
}
std::set<int64_t> read_by(const ql_linear_params& p) {
  return bytes_at(p.x, p.m, p.x_row_stride, p.k, 2);
}
std::set<int64_t> written_by(const ql_linear_params& p) {
  return bytes_at(p.y, p.m, p.y_row_stride, p.n, p.y_dtype == QL_F32 ? 4 : 2);
}
bool meet(const std::set<int64_t>& one, const std::set<int64_t>& other) {
  for (const int64_t byte : other) {
    if (one.count(byte) != 0) return true;
  }
  return false;
}

// Whether element (row, i) that `to` reads is element (row, i) that `from` writes, for all of them.
bool same_elements(const ql_linear_params& from, const ql_linear_params& to) {
  if (from.y_dtype != to.x_dtype || to.k > from.n) return false;
  for (int64_t row = 0; row < to.m; ++row) {
    const auto x =
        reinterpret_cast<uintptr_t>(to.x) + 2 * static_cast<uintptr_t>(row * to.x_row_stride);
    const auto y =
        reinterpret_cast<uintptr_t>(from.y) + 2 * static_cast<uintptr_t>(row * from.y_row_stride);
    if (x != y) return false;
  }
  return true;
}

class Drawer {
 public:
  int64_t below(int end) { return static_cast<int64_t>(draw_() % static_cast<unsigned>(end)); }

  // Layers of m rows, of which some read what one before wrote.
  std::vector<ql_linear_params> layers() {
    std::vector<ql_linear_params> found(2 + static_cast<size_t>(below(4)));
    const int64_t m = 1 + below(3);
    for (size_t place = 0; place < found.size(); ++place) {
      ql_linear_params& each = found[place];
      each = {};
      each.m = m;
      each.k = 4 + below(8);
      each.n = 4 + below(8);
      each.x_row_stride = each.k + below(3);
      each.y_row_stride = each.n + below(3);
      each.x_dtype = QL_BF16;
      each.y_dtype = below(4) == 0 ? QL_F32 : QL_BF16;
      each.x = reinterpret_cast<const void*>(static_cast<uintptr_t>(64 + 2 * below(200)));
      each.y = reinterpret_cast<void*>(static_cast<uintptr_t>(64 + 4 * below(100)));
      if (place > 0 && below(2) == 0) {
        const ql_linear_params& before = found[static_cast<size_t>(below(static_cast<int>(place)))];
        each.x = before.y;
        if (below(4) != 0) each.x_row_stride = before.y_row_stride;
      }
    }
    return found;
  }

 private:
  std::mt19937 draw_{0};
};

}  // namespace

void check_ties() {
  Section ties("ties"), results("read_results");
  Drawer draw;
  int givers = 0, as_they_are = 0;
  for (int turn = 0; turn < 1500; ++turn) {
    const std::vector<ql_linear_params> layers = draw.layers();
    for (int place = 0; place < static_cast<int>(layers.size()); ++place) {
      const ql_linear_params& layer = layers[static_cast<size_t>(place)];
      const std::set<int64_t> x = read_by(layer), y = written_by(layer);
      bool writes = false;
      std::vector<int> read;
      for (int before = 0; before < place; ++before) {
        const ql_linear_params& other = layers[static_cast<size_t>(before)];
        if (meet(x, written_by(other))) read.push_back(before);
        writes = writes || meet(y, written_by(other)) || meet(y, read_by(other));
        const bool expected = same_elements(other, layer);
        as_they_are += expected ? 1 : 0;
        results.check(qlinear::cuda::reads_results(other, layer) == expected,
                      "layer %d reads %s of layer %d", place,
                      expected ? "results" : "other than that", before);
      }
      const int giver = read.size() == 1 ? read[0] : -1;
      givers += giver >= 0 ? 1 : 0;
      const qlinear::cuda::Tie tie = qlinear::cuda::tie_of(layers.data(), place);
      ties.check(tie.writes == writes && tie.reads == !read.empty() && tie.giver == giver,
                 "layer %d of %zu: %s writes, %zu read, giver %d, not %d", place, layers.size(),
                 writes ? "it" : "nothing", read.size(), giver, tie.giver);
    }
  }
  ties.check(givers > 500, "only %d givers", givers);
  results.check(as_they_are > 300, "only %d results are read as they are", as_they_are);
}
