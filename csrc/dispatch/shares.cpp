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
  const auto found = tracked_.find(client);
  Share* share = found != tracked_.end() ? found->second.get() : track(client);
  if (share->waiting == 0) {
    if (share->is_idle) idle_.erase(share->idle);
    share->is_idle = false;
    share->round = std::max(share->round, round_);
  }
  ++share->waiting;
  return share;
}

void Shares::leave(Share* share) {
  if (--share->waiting > 0 || share->id == 0) return;
  share->idle = idle_.insert(idle_.end(), share->client);
  share->is_idle = true;
}

void Shares::serve(const Share* share) { round_ = std::max(round_, share->round); }

Share* Shares::track(uint64_t client) {
  if (tracked_.size() >= kMostClients) {
    if (idle_.empty()) return &others_;
    tracked_.erase(idle_.front());
    idle_.pop_front();
  }
  auto& share = tracked_[client];
  share = std::make_unique<Share>();
  share->id = next_id_++;
  share->client = client;
  return share.get();
}

}  // namespace qlinear::dispatch
