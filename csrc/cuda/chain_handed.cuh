// Rows of x that one layer of a chain hands over to the next (chain_partition.h): two warps look at
// the words until they are there, and put them into the slots, each its part of every slot.
#pragma once

#include "cuda/chain_copier.cuh"
#include "cuda/values.cuh"

namespace qlinear::cuda {

struct HandedRows {
  static constexpr int kAtOnce = partition::kHandedAtOnce;
  static constexpr int kStepWords = partition::kStepK / partition::kHandedResults;
  static_assert(kStepWords == 32, "a lane has one of a step's words of 16 bytes");

  const ChainCopier& copier;
  const int lane, which;  // of the warps
  const uint32_t launch;  // its number

  __device__ __forceinline__ void run_layer(const ChainLayer& layer, RingPlace& place) const {
    // Of a slot with one word for each lane the first warp has it.
    const int of_slot = layer.slot.steps * copier.args.m;
    const int mine = which == 0 ? (of_slot + 1) / 2 : of_slot / 2;
    const int skipped = which == 0 ? 0 : of_slot - mine;
    const int together = mine == 0 ? layer.slots : kAtOnce / mine;  // slots
    for_each_tile(layer, [&] {
#pragma unroll 1
      for (int first = 0; first < layer.slots; first += together) {
        const int end = min(layer.slots, first + together);
        if (mine == 0) {
          pass(end - first, place);
          continue;
        }
        uint4 words[kAtOnce];
        look(layer, Walk(first, skipped, mine, copier.args.m), end, words);
        put(layer, Walk(first, skipped, mine, copier.args.m), end, words, place);
      }
    });
  }

  // Of a layer whose rows come in another way: the second warp has nothing to bring.
  __device__ __forceinline__ void pass_layer(const ChainLayer& layer, RingPlace& place) const {
    for_each_tile(layer, [&] { pass(layer.slots, place); });
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void for_each_tile(const ChainLayer& layer, Visit visit) const {
    const partition::Share share =
        partition::share_of(layer.n_blocks, static_cast<int>(gridDim.x), blockIdx.x);
    for (int t = 0; t < layer.tiles.tiles; ++t) {
      if (partition::share_of(share.count, layer.tiles.tiles, t).count > 0) visit();
    }
  }

  // Both warps arrive at every slot, so that neither falls behind a barrier by two turns, or gets
  // ahead of it: either would look like this turn.
  __device__ __forceinline__ void arrive(RingPlace& place) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(copier.barriers.others + place.slot * 8);
    place.advance(1, copier.args.memory.slots);
  }
  __device__ __forceinline__ void wait(const RingPlace& place) const {
    barrier_wait(copier.barriers.free + place.slot * 8, place.phase);
  }
  __device__ __forceinline__ void pass(int slots, RingPlace& place) const {
    for (; slots > 0; --slots) {
      wait(place);
      arrive(place);
    }
  }

  // Word after word of this warp's part of each slot: the rows of a step, the steps of a slot.
  struct Walk {
    int slot, step, row;
    const int m, first_step, first_row, mine;
    int done = 0;
    __device__ __forceinline__ Walk(int first, int skipped, int mine_, int m_)
        : slot(first),
          step(skipped / m_),
          row(skipped % m_),
          m(m_),
          first_step(step),
          first_row(row),
          mine(mine_) {}
    __device__ __forceinline__ bool begins_slot() const { return done == 0; }
    __device__ __forceinline__ void next() {
      if (++row == m) {
        row = 0;
        ++step;
      }
      if (++done < mine) return;
      done = 0;
      step = first_step;
      row = first_row;
      ++slot;
    }
  };

  __device__ __forceinline__ bool is_there(const uint4& word) const {
    return word.y == launch && word.w == launch;
  }

  __device__ __forceinline__ void look(const ChainLayer& layer, const Walk& begin, int end,
                                       uint4 (&words)[kAtOnce]) const {
    const int steps = layer.slot.steps, k = layer.k, fours = layer.handed_fours;
    const uint4* const from = layer.handed + lane;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) words[i] = make_uint4(0, launch - 1, 0, launch);
    bool missing;
    do {
      missing = false;
      Walk at = begin;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int word = (at.slot * steps + at.step) * kStepWords;
        const bool exists = at.slot < end && (word + lane) * partition::kHandedResults < k;
        if (!exists) words[i].y = launch;  // zeros
        if (!is_there(words[i])) words[i] = load_words(from + at.row * fours + word);
        at.next();
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) missing |= !is_there(words[i]);
    } while (missing);
  }

  __device__ __forceinline__ void put(const ChainLayer& layer, Walk at, int end,
                                      const uint4 (&words)[kAtOnce], RingPlace& place) const {
    const int half = lane / 16, chunk = lane % 16 / 2;
    const uint32_t to = copier.shared_base + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_slot = at.slot < end;
      if (is_slot) {
        if (at.begins_slot()) wait(place);
        const int line = (2 * at.step + half) * at.m + at.row;
        store_shared_8(to + place.slot * copier.args.memory.slot_bytes +
                           line * partition::kHalfRowBytes +
                           (chunk ^ line % 8) * layout::kVectorBytes,
                       words[i].x, words[i].z);
      }
      at.next();
      if (is_slot && at.begins_slot()) arrive(place);
    }
  }
};

}  // namespace qlinear::cuda
