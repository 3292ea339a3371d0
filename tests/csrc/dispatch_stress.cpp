// The dispatcher under a producer that hands in, takes back and lets expire at random, over a
// device that fails now and then. Built with a sanitizer by tests/kernels/test_dispatch_stress.py.
//
// Every item must get exactly one last word, what is done must have its own result, and memory that
// was given back must not be touched: the producer writes over it at once.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <unordered_map>
#include <vector>

#include "linear_dispatch.h"

namespace {

constexpr int kLayers = 3;  // the last one is the host's
constexpr int kMostRows = 64;
constexpr int64_t kUnit = 1024;
constexpr uint32_t kSlots = 600;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

// ---- A device: the result of a row's eight bytes is their complement ----

std::atomic<uint32_t> launches{0}, waits{0};
bool has_faults = false;

int run(const ql_cuda_batch* batch) {
  const uint32_t number = ++launches;
  if (has_faults && number % 97 == 0) return QL_CUDA_ERROR;
  if (has_faults && number % 31 == 0 && batch->launch.plan != nullptr) return QL_BAD_PLAN;
  for (int64_t i = 0; i < batch->x.parts_count; ++i) {
    auto* rows = static_cast<uint64_t*>(batch->x.parts[i].rows);
    for (int64_t row = 0; row < batch->x.parts[i].count; ++row) rows[row] = ~rows[row];
  }
  return QL_OK;
}

int wait(const ql_cuda_batch*, int64_t nanoseconds, int32_t* done, int64_t* took) {
  const uint32_t number = ++waits;
  *done = nanoseconds < 0 || number % 3 == 0;
  took[0] = took[1] = took[2] = 1000;
  return has_faults && *done && number % 89 == 0 ? QL_CUDA_ERROR : QL_OK;
}

const char* error_text() { return "a fault"; }

// ---- A front end ----

struct Held {
  uint32_t slot;
  int32_t rows;
  bool is_left_alone;  // its caller has gone
  bool has_ended;      // it has its answer, of whatever kind
  int parts_on_host;
  bool has_last_word;
  bool fits;  // its result may lie in its slot
};

class FrontEnd {
 public:
  FrontEnd(ql_dispatch* dispatch, std::vector<uint64_t>& slab, uint32_t seed)
      : dispatch_(dispatch), slab_(slab), random_(seed) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
  }

  void work(int64_t calls) {
    while (sent_ < calls) {
      const uint32_t what = below(100);
      if (what < 60) {
        hand_in();
      } else if (what < 70 && !held_.empty()) {
        take_back();
      } else {
        look();
      }
    }
    while (!held_.empty()) look();
    const int64_t* left = ql_dispatch_rows_left(dispatch_);
    require(__atomic_load_n(&left[kLayers], __ATOMIC_ACQUIRE) == rows_in_, "all rows have left");
    std::fprintf(stderr,
                 "%lld done, %lld on the host, %lld dropped, %lld failed, %lld taken back\n",
                 static_cast<long long>(done_), static_cast<long long>(hosted_),
                 static_cast<long long>(dropped_), static_cast<long long>(failed_),
                 static_cast<long long>(taken_back_));
    require(done_ > 0 && hosted_ > 0 && dropped_ > 0 && taken_back_ > 0, "everything happened");
    require((failed_ > 0) == has_faults, "faults happened where there were to be some");
  }

 private:
  uint32_t below(uint32_t limit) { return static_cast<uint32_t>(random_() % limit); }
  uint64_t* rows_of(uint32_t slot) { return &slab_[slot * kUnit / sizeof(uint64_t)]; }

  void hand_in() {
    if (free_.size() < 3) return look();
    const uint32_t count = 1 + (below(100) == 0) + (below(100) == 0);
    const int32_t rows = below(200) == 0 ? 100 : static_cast<int32_t>(1 + below(4));
    std::vector<ql_descriptor> items(count);
    for (uint32_t i = 0; i < count; ++i) {
      ql_descriptor& item = items[i];
      item = {};
      item.sequence = ++sent_;
      item.client = below(5);
      item.enqueued_at = now();
      item.deadline = below(10) == 0 ? item.enqueued_at + 1e-5 * below(30) : INFINITY;
      item.slot = free_.back();
      free_.pop_back();
      item.layer = (below(3) == 0) + (below(40) == 0);
      item.rows = rows;
      item.priority = static_cast<int32_t>(below(2));
      item.x_dtype = item.y_dtype = QL_F16;
      item.flags = static_cast<uint16_t>((i + 1 < count ? QL_CALL_GOES_ON : 0) |
                                         (count == 1 ? QL_RESULT_FITS : 0));
      for (int32_t row = 0; row < rows; ++row) {
        rows_of(item.slot)[row] = item.sequence * 1000 + static_cast<uint64_t>(row);
      }
      held_[item.sequence] = {item.slot, rows, false, false, 0, false, count == 1};
      rows_in_ += rows;
    }
    ql_dispatch_submit(dispatch_, items.data(), count);
  }

  void take_back() {
    auto found = held_.begin();
    std::advance(found, below(static_cast<uint32_t>(held_.size())) % 50);
    const uint64_t sequence = found->first;
    Held& held = found->second;
    if (held.has_last_word) return;
    held.is_left_alone = true;
    const bool had_begun = ql_dispatch_has_begun(dispatch_, sequence) != 0;
    if (ql_dispatch_cancel(dispatch_, sequence) == 0) return;
    require(!had_begun || held.parts_on_host == 0, "nothing of it runs");
    ++taken_back_;
    last_word(sequence);
  }

  void look() {
    ql_completion ended[32];
    const int64_t count = ql_dispatch_drain(dispatch_, ended, 32);
    for (int64_t i = 0; i < count; ++i) take(ended[i]);
    if (!open_.empty() && below(2) == 0) end_hosted();
  }

  void take(const ql_completion& ended) {
    if (ended.kind >= QL_BATCH_DONE && ended.kind <= QL_BATCH_GONE) {
      require(left_ == 0, "batches are told one after the other");
      left_ = ended.start;
      head_ = ended.kind;
      failed_ += ended.kind == QL_BATCH_FAILED || ended.kind == QL_BATCH_GONE;
      if (ended.kind != QL_BATCH_DONE) open_.push_back({ended.batch, {}});
      return;
    }
    const auto found = held_.find(ended.sequence);
    require(found != held_.end(), "nothing is told of what has left");
    Held& held = found->second;
    if (ended.kind == QL_ITEM_DONE) {
      --left_;
      ++done_;
      require(held.fits, "no result lies where others still read");
      for (int32_t row = 0; row < held.rows; ++row) {
        const uint64_t x = ended.sequence * 1000 + static_cast<uint64_t>(row);
        require(rows_of(held.slot)[row] == ~x, "each has its own result");
      }
    } else if (ended.kind == QL_ITEM_PART) {
      --left_;
      ++hosted_;
      ++held.parts_on_host;
      open_.back().second.push_back(ended.sequence);
      const uint64_t x = ended.sequence * 1000 + static_cast<uint64_t>(ended.start);
      const uint64_t row = rows_of(held.slot)[ended.start];
      require(row == x || (head_ == QL_BATCH_GONE && row == ~x), "activations are still there");
    } else {
      dropped_ += ended.kind == QL_ITEM_LATE || ended.kind == QL_ITEM_OLD;
    }
    if (ended.is_last) last_word(ended.sequence);
  }

  void end_hosted() {
    const auto [number, sequences] = open_.front();
    if (open_.size() == 1 && left_ > 0) return;
    open_.erase(open_.begin());
    for (const uint64_t sequence : sequences) --held_.at(sequence).parts_on_host;
    ql_dispatch_host_done(dispatch_, number);
  }

  void last_word(uint64_t sequence) {
    const auto found = held_.find(sequence);
    require(found->second.parts_on_host == 0, "the host is done with it");
    std::memset(rows_of(found->second.slot), 0xEE, kUnit);  // whoever has it next writes at once
    free_.push_back(found->second.slot);
    held_.erase(found);
  }

  ql_dispatch* dispatch_;
  std::vector<uint64_t>& slab_;
  std::mt19937_64 random_;
  std::vector<uint32_t> free_;
  std::unordered_map<uint64_t, Held> held_;
  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> open_;  // batches on the host
  int32_t left_ = 0, head_ = 0;
  int64_t sent_ = 0, rows_in_ = 0, done_ = 0, hosted_ = 0, dropped_ = 0, failed_ = 0,
          taken_back_ = 0;
};

void stress(bool spins, bool faults, int64_t calls) {
  has_faults = faults;
  std::vector<double> seconds(kMostRows + 1, 1e-5);
  const int32_t sizes[] = {8, kMostRows};
  const double costs[] = {1e-5, 3e-5};
  const ql_pace pace = {8, 32, kMostRows, 2, 1e-6, sizes, costs, seconds.data()};
  const int32_t paces[kLayers] = {};
  ql_dispatch_layer layers[kLayers] = {};
  for (int i = 0; i < kLayers; ++i) {
    layers[i].product.n = layers[i].product.k = 4;
    layers[i].is_direct = i + 1 < kLayers;
  }
  std::vector<uint64_t> slab(kSlots * kUnit / sizeof(uint64_t)), tables(6 * kMostRows), buffer(1);
  ql_dispatch_stage stages[3] = {};
  for (int i = 0; i < 3; ++i) {
    stages[i].x = stages[i].y = buffer.data();
    stages[i].x_bytes = stages[i].y_bytes = 1 << 20;
    stages[i].table = &tables[static_cast<size_t>(2 * kMostRows * i)];
  }
  ql_dispatch_options options = {};
  options.queue = {kMostRows, 0.05, 0, 1, kLayers, &pace, paces};
  options.layers = layers;
  options.stages = stages;
  options.stages_count = options.most_running = 3;
  options.most_chained = 2;
  options.table_rows = kMostRows;
  options.spins = spins;
  options.starts_lone = 1;
  options.done_fd = -1;
  options.idle_spin_seconds = 2e-5;
  options.slab = reinterpret_cast<char*>(slab.data());
  options.slot_unit_bytes = kUnit;
  options.run = run;
  options.wait = wait;
  options.error_text = error_text;
  ql_dispatch* dispatch = ql_dispatch_new(&options);
  require(dispatch != nullptr, "it can be made");
  const ql_cuda_plan plan = {};
  for (int64_t rows = 1; rows <= kMostRows; ++rows) {
    ql_dispatch_plan(dispatch, 0, QL_F16, QL_F16, rows, &plan);
  }
  FrontEnd(dispatch, slab, 7).work(calls);
  require(ql_dispatch_oldest(dispatch) == 0, "nothing runs");
  require(ql_dispatch_stop(dispatch, 10) == 1, "it ends");
  ql_dispatch_free(dispatch);
}

}  // namespace

int main(int, char** words) {
  const int64_t calls = std::atoll(words[1]);
  for (int spins = 0; spins < 2; ++spins) {
    for (int faults = 0; faults < 2; ++faults) stress(spins != 0, faults != 0, calls);
  }
  return 0;
}
