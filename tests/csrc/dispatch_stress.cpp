// The dispatcher under a producer that hands in, takes back and lets expire at random, over a
// device that fails now and then. Built with a sanitizer by tests/kernels/test_dispatch_stress.py.
//
// Every item must get exactly one last word, what is done must have its own result, and memory that
// was given back must not be touched: the producer writes over it at once.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "linear_dispatch.h"
#include "stress_bench.h"

namespace {

using namespace stress_device;

int64_t going_on = 0;  // batches of which another layer followed, in all runs

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

// A batch on the host.
struct Hosted {
  uint64_t number;
  bool has_failed;
  std::vector<uint64_t> sequences;
};

class FrontEnd {
 public:
  FrontEnd(ql_dispatch* dispatch, std::vector<uint64_t>& slab, uint32_t seed)
      : dispatch_(dispatch), slab_(slab), random_(seed) {
    device.front_end = std::this_thread::get_id();
    device.dispatch = dispatch;
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
  }

  void work(int64_t calls) {
    while (sent_ < calls) {
      const uint32_t what = below(100);
      if (what < 60 && held_.size() < kMostHeld) {
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
    require((failed_ > 0) == device.has_faults, "faults happened where there were to be some");
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
    const bool is_free = ql_dispatch_cancel(dispatch_, sequence) != 0;
    ++device.asked;
    if (!is_free) return;
    require(!had_begun || held.parts_on_host == 0, "nothing of it runs");
    ++taken_back_;
    last_word(sequence);
  }

  void look() {
    ql_completion ended[32];
    const int64_t count = ql_dispatch_drain(dispatch_, ended, 32);
    for (int64_t i = 0; i < count; ++i) take(ended[i]);
    if (count == 0) std::this_thread::yield();  // there may be fewer cores than threads that spin
    if (!open_.empty() && below(2) == 0) end_hosted();
  }

  void take(const ql_completion& ended) {
    if (ended.kind >= QL_BATCH_DONE && ended.kind <= QL_BATCH_GONE) {
      require(left_ == 0, "batches are told one after the other");
      left_ = ended.start;
      head_ = ended.kind;
      follow(ended);
      const bool has_failed = ended.kind == QL_BATCH_FAILED || ended.kind == QL_BATCH_GONE;
      failed_ += has_failed;
      device.hosted += ended.kind != QL_BATCH_DONE;
      device.being_mended += has_failed;
      if (ended.kind != QL_BATCH_DONE) open_.push_back({ended.batch, has_failed, {}});
      return;
    }
    require(!goes_on_ || ended.kind == QL_ITEM_PART, "nothing comes in between");
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
      open_.back().sequences.push_back(ended.sequence);
      const size_t place = batch_.size();
      require(leaders_.empty() || ended.sequence == leaders_[place] + 1, "the next layer follows");
      batch_.push_back(ended.sequence);
      const uint64_t x = ended.sequence * 1000 + static_cast<uint64_t>(ended.start);
      const uint64_t row = rows_of(held.slot)[ended.start];
      require(row == x || (head_ == QL_BATCH_GONE && row == ~x), "activations are still there");
    } else {
      dropped_ += ended.kind == QL_ITEM_LATE || ended.kind == QL_ITEM_OLD;
    }
    if (ended.is_last) last_word(ended.sequence);
  }

  // Whoever says that another layer of the same calls follows is right.
  void follow(const ql_completion& head) {
    leaders_.clear();
    if (goes_on_) leaders_ = batch_;
    require(!goes_on_ || head.kind == QL_BATCH_HOST, "both are the host's");
    require(!goes_on_ || static_cast<size_t>(head.start) == batch_.size(), "of the same calls");
    batch_.clear();
    goes_on_ = head.kind == QL_BATCH_HOST && !head.is_last;
    going_on += goes_on_;
  }

  void end_hosted() {
    const Hosted hosted = open_.front();
    if (open_.size() == 1 && left_ > 0) return;
    open_.erase(open_.begin());
    for (const uint64_t sequence : hosted.sequences) --held_.at(sequence).parts_on_host;
    if (hosted.has_failed) device.start_over();
    --device.hosted;
    device.being_mended -= hosted.has_failed;
    ql_dispatch_host_done(dispatch_, hosted.number);
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
  std::vector<Hosted> open_;
  int32_t left_ = 0, head_ = 0;
  bool goes_on_ = false;                   // the batch that was told last
  std::vector<uint64_t> batch_, leaders_;  // its items, and those that they follow
  int64_t sent_ = 0, rows_in_ = 0, done_ = 0, hosted_ = 0, dropped_ = 0, failed_ = 0,
          taken_back_ = 0;
};

void stress(int spins, bool faults, int64_t calls) {
  device.has_faults = faults;
  Bench bench(spins, true);
  FrontEnd(bench.dispatch, bench.slab, 7).work(calls);
  require(ql_dispatch_oldest(bench.dispatch) == 0, "nothing runs");
  require(ql_dispatch_stop(bench.dispatch, 10) == 1, "it ends");
}

ql_descriptor one_row(uint32_t number) {
  ql_descriptor item = {};
  item.sequence = number + 1;
  item.enqueued_at = now();
  item.deadline = INFINITY;
  item.slot = number;
  item.rows = 1;
  item.x_dtype = item.y_dtype = QL_F16;
  item.flags = QL_RESULT_FITS;
  return item;
}

// One call at a time, when all threads have gone to sleep: nothing comes behind it that would wake
// anybody.
void lone_calls(int spins, bool starts_lone) {
  device.has_faults = false;
  Bench bench(spins, starts_lone);
  for (uint32_t i = 0; i < 20; ++i) {
    const ql_descriptor item = one_row(i);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ql_dispatch_submit(bench.dispatch, &item, 1);
    ql_completion ended[2];
    int64_t count = 0;
    const double begun = now();
    while (count < 2 && now() - begun < 20) {
      count += ql_dispatch_drain(bench.dispatch, ended + count, 2 - count);
    }
    require(count == 2 && ended[1].kind == QL_ITEM_DONE, "a lone call ends");
  }
  require(ql_dispatch_stop(bench.dispatch, 10) == 1, "it ends");
}

// More ends than the ring of completions holds before anybody looks, and more while somebody does:
// nothing is lost, and all is told in order.
void unread(int spins) {
  constexpr uint32_t kMany = 70'000, kUnread = 68'000;
  Bench bench(spins, true);
  uint64_t told = 0, batches = 0;
  const auto look = [&](int64_t most) {
    ql_completion ended[100];
    const int64_t count = ql_dispatch_drain(bench.dispatch, ended, most);
    for (int64_t i = 0; i < count; ++i) {
      if (ended[i].kind == QL_BATCH_DONE) require(ended[i].batch == ++batches, "batch by batch");
      if (ended[i].kind == QL_ITEM_DONE) require(ended[i].sequence == ++told, "item by item");
    }
    return count > 0;
  };
  const int64_t* left = ql_dispatch_rows_left(bench.dispatch);
  const auto wait_for = [&](int64_t rows) {
    while (__atomic_load_n(&left[kLayers], __ATOMIC_ACQUIRE) < rows) std::this_thread::yield();
  };
  for (uint32_t i = 0; i < kMany; ++i) {
    ql_descriptor item = one_row(i);
    item.enqueued_at += 1000;  // it does not grow too old
    item.slot = 0;
    ql_dispatch_submit(bench.dispatch, &item, 1);
    if (i + 1 == kUnread) wait_for(kUnread);
    if (i >= kUnread) look(10);
  }
  wait_for(kMany);
  require(ql_dispatch_stop(bench.dispatch, 10) == 1, "it ends");
  while (look(100)) continue;
  require(told == kMany, "all are told of");
}

// Stops while batches are being sent: what was sent is ended, told of and nothing else; while the
// device does not take a batch, nothing ends.
void stop_early(int spins, int times) {
  for (int i = 0; i < times; ++i) {
    Bench bench(spins, false);
    device.dispatch = bench.dispatch;
    device.hangs = i % 4 == 0;
    for (uint32_t j = 0; j < 8; ++j) {
      const ql_descriptor item = one_row(j);
      ql_dispatch_submit(bench.dispatch, &item, 1);
      if (i % 3 == 0) std::this_thread::yield();
    }
    const double begun = now();
    while (device.hangs && !device.is_hanging && now() - begun < 2e-4) continue;
    if (device.is_hanging) {
      require(ql_dispatch_stop(bench.dispatch, 1e-4) == 0, "it does not end while a batch is sent");
      require(ql_dispatch_oldest(bench.dispatch) > 0, "which the watchdog sees");
    }
    device.hangs = false;
    require(ql_dispatch_stop(bench.dispatch, 10) == 1, "it ends");
    require(device.is_empty() && ql_dispatch_oldest(bench.dispatch) == 0, "nothing runs");
    ql_completion ended[32];
    int64_t told = 0;
    for (int64_t j = ql_dispatch_drain(bench.dispatch, ended, 32); j > 0; --j) {
      told += ended[j - 1].kind == QL_ITEM_DONE || ended[j - 1].kind == QL_ITEM_OLD;
    }
    const int64_t* left = ql_dispatch_rows_left(bench.dispatch);
    require(told == left[kLayers], "what was taken was told of, and nothing else");
  }
}

}  // namespace

int main(int, char** words) {
  const int64_t calls = std::atoll(words[1]);
  for (int spins = 0; spins < 3; ++spins) {
    for (int faults = 0; faults < 2; ++faults) stress(spins, faults != 0, calls);
    lone_calls(spins, true);
    lone_calls(spins, false);
    unread(spins);
    stop_early(spins, 60);
  }
  std::fprintf(stderr,
               "%d asked and %d failed while a batch was sent, %lld products beside others\n",
               device.asked_meanwhile.load(), device.failed_meanwhile.load(),
               static_cast<long long>(device.beside()));
  require(device.asked_meanwhile > 0, "nobody waits for a batch to be sent");
  require(device.failed_meanwhile > 0, "batches fail while another is sent");
  require(device.beside() > 100, "products run beside each other");
  require(going_on > 0, "layers of the same calls are told so");
  return 0;
}
