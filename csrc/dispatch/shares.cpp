// See fairness.py, which says why.
#include "dispatch/shares.h"

#include <algorithm>

namespace qlinear::dispatch {
namespace {

constexpr size_t kMostClients = 256;
constexpr double kQuantumSeconds = 1e-3;

}  // namespace

void Share::charge(double seconds) {
  used += seconds;
  if (used < kQuantumSeconds) return;
  const auto quanta = static_cast<int64_t>(used / kQuantumSeconds);
  used -= static_cast<double>(quanta) * kQuantumSeconds;
  round += quanta;
}

Share* Shares::enter(uint64_t client) {
  Share* share = last_;
  if (share == nullptr || share->client != client) {
    const auto found = tracked_.find(client);
    share = found != tracked_.end() ? found->second : track(client);
    if (share != &others_) last_ = share;
  }
  if (share->waiting == 0) {
    if (share != &others_) busy_.splice(busy_.end(), idle_, share->place);
    share->round = std::max(share->round, round_);
  }
  ++share->waiting;
  return share;
}

void Shares::leave(Share* share) {
  if (--share->waiting > 0 || share == &others_) return;
  idle_.splice(idle_.end(), busy_, share->place);
}

void Shares::serve(const Share* share) { round_ = std::max(round_, share->round); }

// The share of a client that has none; idle, if it gets one of its own.
Share* Shares::track(uint64_t client) {
  if (tracked_.size() >= kMostClients) {
    if (idle_.empty()) return &others_;
    tracked_.erase(idle_.front().client);
    idle_.pop_front();
    last_ = nullptr;
  }
  Share& share = idle_.emplace_back();
  share.place = std::prev(idle_.end());
  share.id = next_id_++;
  share.client = client;
  tracked_[client] = &share;
  return &share;
}

}  // namespace qlinear::dispatch
