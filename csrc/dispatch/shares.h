// Who has had how much: fairness.py in C++.
#pragma once

#include <cstdint>
#include <list>
#include <unordered_map>

namespace qlinear::dispatch {

struct Share {
  uint64_t id = 0;  // never used twice; 0: of all that are not tracked
  uint64_t client = 0;
  int64_t round = 0, waiting = 0;
  double used = 0;
  std::list<Share>::iterator place;  // where tracked

  void charge(double seconds);
};

class Shares {
 public:
  Share* enter(uint64_t client);
  void leave(Share* share);
  void serve(const Share* share);

 private:
  Share* track(uint64_t client);

  std::unordered_map<uint64_t, Share*> tracked_;
  std::list<Share> busy_;  // tracked clients with something waiting
  std::list<Share> idle_;  // those with nothing, oldest first
  Share others_;
  Share* last_ = nullptr;  // who entered last, and mostly does again
  uint64_t next_id_ = 1;
  int64_t round_ = 0;
};

}  // namespace qlinear::dispatch
