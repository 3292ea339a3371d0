// Runs the ring of a chain as its threads do, in many orders: copiers, the copy engine and warps
// step by step over barriers as the hardware counts them (ChainCopier::run in chain_copier.cuh,
// multiply_tile in chain_kernel.cuh). Nobody may wait for ever, and what a warp reads must be what
// belongs there for as long as it reads.
#include <algorithm>
#include <random>
#include <vector>

#include "chain_cut.h"
#include "checks.h"

namespace partition = qlinear::partition;

namespace {

struct Barrier {
  int arrivals = 0, pending = 0, copies = 0, phase = 0;

  explicit Barrier(int count) : arrivals(count), pending(count) {}
  void settle() {
    if (pending > 0 || copies > 0) return;
    ++phase;
    pending = arrivals;
  }
  void arrive(int times) {
    pending -= times;
    settle();
  }
  void expect() {
    ++copies;
    arrive(1);
  }
  void landed() {
    --copies;
    settle();
  }
  bool passes(int parity) const { return (phase & 1) != parity; }
};

struct Place {
  int slot = 0, phase = 0;
  void advance(int by, int slots) {
    slot += by;
    while (slot >= slots) {
      slot -= slots;
      phase ^= 1;
    }
  }
};

enum Part { kCodes, kScales, kRows, kParts };

struct Copy {
  int part, slot, number;  // number: of the slot among all of the chain
};

struct Copier {
  explicit Copier(int which) : part(which) {}
  int part, tile = 0, at = 0, number = 0, ahead = 0;
  bool counted = false;
  Place place{0, 1}, awaited;
};

struct Warp {
  explicit Warp(int which) : number(which) {}
  int number, tile = 0, base = 0, at = -1;  // base: number of the tile's first slot
  bool reading = false, waiting = false;
  Place place, mine;
};

class Simulation {
 public:
  Simulation(const chain_cut::Chain& chain, unsigned seed) : chain_(chain), draw_(seed) {
    for (const chain_cut::Layer& layer : chain.layers) {
      tiles_.insert(tiles_.end(), static_cast<size_t>(layer.tiles.tiles), layer);
    }
    const auto ring = static_cast<size_t>(chain.memory.slots);
    const int warps = partition::chain_warps(chain.m);
    codes_.assign(ring, Barrier(1));
    others_.assign(ring, Barrier(2));
    free_.assign(ring, Barrier(warps));
    for (auto& part : held_) part.assign(ring, -1);
    for (int part = 0; part < kParts; ++part) copiers_.emplace_back(part);
    for (int warp = 0; warp < warps; ++warp) warps_.emplace_back(warp);
  }

  // Null, or what went wrong. `engine`: how willing it is, of 100, beside everybody else.
  const char* run(int engine) {
    const int everybody = kParts + static_cast<int>(warps_.size());
    for (;;) {
      if (static_cast<int>(draw_() % 100) < engine && land()) continue;
      const int first = static_cast<int>(draw_()) & 0xffff;
      bool moved = false;
      for (int i = 0; i < everybody && !moved; ++i) {
        const int who = (first + i) % everybody;
        moved = who < kParts ? copy(copiers_[static_cast<size_t>(who)])
                             : multiply(warps_[static_cast<size_t>(who - kParts)]);
      }
      if (fault_ != nullptr) return fault_;
      if (moved || land()) continue;
      const bool ended = std::all_of(warps_.begin(), warps_.end(), [&](const Warp& warp) {
        return warp.tile == static_cast<int>(tiles_.size());
      });
      return ended ? nullptr : "all wait for each other";
    }
  }

 private:
  Barrier& there(int part, int slot) {
    return (part == kCodes ? codes_ : others_)[static_cast<size_t>(slot)];
  }

  bool land() {
    if (copies_.empty()) return false;
    std::swap(copies_[draw_() % copies_.size()], copies_.back());
    const Copy copy = copies_.back();
    copies_.pop_back();
    held_[copy.part][static_cast<size_t>(copy.slot)] = copy.number;
    there(copy.part, copy.slot).landed();
    return true;
  }

  bool copy(Copier& copier) {
    if (copier.tile == static_cast<int>(tiles_.size())) return false;
    const chain_cut::Layer& layer = tiles_[static_cast<size_t>(copier.tile)];
    const int ring = chain_.memory.slots;
    if (copier.part == kCodes && !copier.counted) ++copier.ahead;
    copier.counted = true;
    if (copier.ahead > layer.in_flight) {
      if (!codes_[static_cast<size_t>(copier.awaited.slot)].passes(copier.awaited.phase)) {
        return false;
      }
      copier.awaited.advance(1, ring);
      --copier.ahead;
      return true;
    }
    const int slot = copier.place.slot;
    if (!free_[static_cast<size_t>(slot)].passes(copier.place.phase)) return false;
    there(copier.part, slot).expect();
    held_[copier.part][static_cast<size_t>(slot)] = -1;
    copies_.push_back({copier.part, slot, copier.number++});
    copier.place.advance(1, ring);
    copier.counted = false;
    if (++copier.at == layer.slots) {
      copier.at = 0;
      ++copier.tile;
    }
    return true;
  }

  bool holds(const Warp& warp) const {
    return std::all_of(held_, held_ + kParts, [&](const std::vector<int>& part) {
      return part[static_cast<size_t>(warp.mine.slot)] == warp.base + warp.at;
    });
  }

  bool multiply(Warp& warp) {
    if (warp.tile == static_cast<int>(tiles_.size())) return false;
    const chain_cut::Layer& layer = tiles_[static_cast<size_t>(warp.tile)];
    const int ring = chain_.memory.slots;
    if (warp.at < 0) {
      warp.at = warp.number / layer.group;
      warp.mine = warp.place;
      warp.mine.advance(warp.at, ring);
    }
    if (warp.at >= layer.slots) return end_tile(warp);
    const auto slot = static_cast<size_t>(warp.mine.slot);
    if (!warp.reading) {
      if (!free_[slot].passes(warp.mine.phase ^ 1) || !codes_[slot].passes(warp.mine.phase) ||
          !others_[slot].passes(warp.mine.phase)) {
        return false;
      }
      warp.reading = true;
      if (!holds(warp)) fault_ = "a warp reads what does not belong there";
      return true;
    }
    if (!holds(warp)) fault_ = "what a warp reads changes meanwhile";
    warp.reading = false;
    free_[slot].arrive(partition::chain_warps(chain_.m) / layer.group);
    warp.at += layer.groups;
    warp.mine.advance(layer.groups, ring);
    return true;
  }

  // The barrier of all warps at the end of a tile.
  bool end_tile(Warp& warp) {
    if (warp.waiting) return false;
    warp.waiting = true;
    for (const Warp& other : warps_) {
      if (!other.waiting) return true;
    }
    for (Warp& each : warps_) {
      const int slots = tiles_[static_cast<size_t>(each.tile)].slots;
      each.place.advance(slots, chain_.memory.slots);
      each.base += slots;
      ++each.tile;
      each.at = -1;
      each.waiting = false;
    }
    return true;
  }

  const chain_cut::Chain& chain_;
  std::mt19937 draw_;
  std::vector<chain_cut::Layer> tiles_;
  std::vector<Barrier> codes_, others_, free_;
  std::vector<int> held_[kParts];
  std::vector<Copier> copiers_;
  std::vector<Warp> warps_;
  std::vector<Copy> copies_;
  const char* fault_ = nullptr;
};

}  // namespace

void check_ring() {
  Section section("ring");
  unsigned seed = 0;
  const auto see = [&](int m, const std::vector<chain_cut::Sizes>& sizes) {
    const chain_cut::Chain chain = chain_cut::cut(m, sizes, 1);
    for (const int engine : {0, 30, 100}) {
      const char* fault = Simulation(chain, ++seed).run(engine);
      section.check(fault == nullptr, "m %d, %zu layers, first %d and %d n-blocks, engine %d: %s",
                    m, sizes.size(), sizes[0].n_blocks, sizes[1].n_blocks, engine, fault);
    }
  };
  std::mt19937 draw(1);
  for (const int m : {1, 4, 5, 8, 9, 16}) {
    for (int first = 1; first <= partition::kChainTileBlocks; ++first) {
      for (const int second : {1, 2, 4, 5, 9, 16}) {
        see(m, {{first, 40, false}, {second, 33, false}});
      }
    }
    for (int i = 0; i < 20; ++i) {
      std::vector<chain_cut::Sizes> sizes;
      for (int layer = 0; layer < partition::kChainLayers; ++layer) {
        sizes.push_back({1 + static_cast<int>(draw() % 40), 1 + static_cast<int>(draw() % 40),
                         draw() % 2 == 0});
      }
      see(m, sizes);
    }
  }
}
