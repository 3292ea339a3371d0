// See lanes.py, which says why.
#include "dispatch/waiting.h"

#include <algorithm>
#include <tuple>

namespace qlinear::dispatch {
namespace {

constexpr int64_t kSpareRecords = 64;

}  // namespace

bool Level::later(const Record& one, const Record& other) {
  return std::tie(one.due, one.sequence, one.version) >
         std::tie(other.due, other.sequence, other.version);
}

bool Level::is_behind(const Head& one, const Head& other) {
  if (one.round != other.round) return one.round > other.round;
  return later(one.record, other.record);
}

void Level::push_head(int64_t round, const Record& record, uint64_t share, Lane& lane) {
  lane.head = ++serials_;
  heads_.push_back({round, record, share, lane.head});
  std::push_heap(heads_.begin(), heads_.end(), is_behind);
}

void Level::pop_head() {
  std::pop_heap(heads_.begin(), heads_.end(), is_behind);
  heads_.pop_back();
}

void Level::add(Entry* entry) {
  Lane& lane = lanes_[entry->share->id];
  const Record record = {entry->due, entry->item.sequence, entry->version, entry};
  lane.records.push_back(record);
  std::push_heap(lane.records.begin(), lane.records.end(), later);
  const Record& top = lane.records.front();
  if (top.sequence == record.sequence && top.version == record.version) {
    push_head(entry->share->round, record, entry->share->id, lane);
  }
}

Entry* Level::first() {
  while (!heads_.empty()) {
    const Head head = heads_.front();
    const auto found = lanes_.find(head.share);
    if (found == lanes_.end() || found->second.head != head.serial) {
      pop_head();  // another one has taken its place
      continue;
    }
    Lane& lane = found->second;
    while (!lane.records.empty() && !lane.records.front().is_valid()) {
      std::pop_heap(lane.records.begin(), lane.records.end(), later);
      lane.records.pop_back();
    }
    if (lane.records.empty()) {
      pop_head();
      lanes_.erase(found);
      continue;
    }
    const Record top = lane.records.front();
    const int64_t round = top.entry->share->round;
    if (top.sequence == head.record.sequence && top.version == head.record.version &&
        round == head.round) {
      return top.entry;
    }
    pop_head();
    push_head(round, top, head.share, lane);
  }
  return nullptr;
}

void Waiting::add(Entry* entry) {
  append(entry);
  rows_ += entry->rows_left();
  ++count_;
  note(entry);
}

void Waiting::remove(Entry* entry) {
  unlink(entry);
  rows_ -= entry->rows_left();
  if (--count_ > 0) return;
  levels_.clear();
  is_ranked_ = false;
}

void Waiting::moved(Entry* entry, int64_t rows) {
  rows_ -= rows;
  unlink(entry);
  append(entry);
  note(entry);
}

Entry* Waiting::first() {
  if (!is_ranked_) {
    is_ranked_ = true;
    records_ = 0;
    for (Entry* entry = head_; entry != nullptr; entry = next(entry)) rank(entry);
  }
  while (true) {
    const auto most_urgent = std::prev(levels_.end());
    if (Entry* entry = most_urgent->second.first()) return entry;
    levels_.erase(most_urgent);
  }
}

void Waiting::append(Entry* entry) {
  entry->before[link_] = tail_;
  entry->after[link_] = nullptr;
  (tail_ == nullptr ? head_ : tail_->after[link_]) = entry;
  tail_ = entry;
}

void Waiting::unlink(Entry* entry) {
  Entry *before = entry->before[link_], *after = entry->after[link_];
  (before == nullptr ? head_ : before->after[link_]) = after;
  (after == nullptr ? tail_ : after->before[link_]) = before;
}

void Waiting::note(Entry* entry) {
  if (is_ranked_ && records_ > 2 * count_ + kSpareRecords) {
    levels_.clear();
    is_ranked_ = false;
  }
  if (is_ranked_) rank(entry);
}

void Waiting::rank(Entry* entry) {
  levels_[entry->item.priority].add(entry);
  ++records_;
}

}  // namespace qlinear::dispatch
