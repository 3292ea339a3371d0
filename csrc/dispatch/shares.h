// Who has had how much: fairness.py in C++.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>

namespace qlinear::dispatch {

struct Share {
  uint64_t id = 0;  // never used twice; 0: of all that are not tracked
  uint64_t client = 0;
  int64_t round = 0, waiting = 0;
  double used = 0;
  std::list<uint64_t>::iterator idle;  // where `is_idle`
  bool is_idle = false;

  void charge(double seconds);
};

class Shares {
 public:
  Share* enter(uint64_t client);
  void leave(Share* share);
  void serve(const Share* share);

 private:
  Share* track(uint64_t client);

  std::unordered_map<uint64_t, std::unique_ptr<Share>> tracked_;
  std::list<uint64_t> idle_;  // clients with nothing waiting, oldest first
  Share others_;
  uint64_t next_id_ = 1;
  int64_t round_ = 0;
};

}  // namespace qlinear::dispatch
