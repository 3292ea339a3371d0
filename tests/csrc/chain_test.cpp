// Proves chain_partition.h, and what cuda/chain_kernel.cuh makes of it, with g++ alone: every
// n-block in one tile of one thread block, every sum and every result by one warp or thread, slots
// and memory that hold what they must, rows of x where lanes look for them. Prints what
// test_partition.py reads.
#include <algorithm>
#include <initializer_list>
#include <set>
#include <vector>

#include "chain_cut.h"
#include "checks.h"

namespace layout = qlinear::layout;
namespace partition = qlinear::partition;
using partition::Share;
using partition::share_of;

void check_ring();   // chain_ring_test.cpp
void check_waits();  // chain_waits_test.cpp

namespace {

constexpr int kMostRows = partition::kChainMostRows, kMostBlocks = partition::kChainTileBlocks;

void check_shares() {
  Section section("shares");
  for (int count = 0; count <= 400; ++count) {
    for (int parts = 1; parts <= 200; ++parts) {
      int next = 0, longest = 0, before = count;
      bool holds = true;
      for (int part = 0; part < parts; ++part) {
        const Share share = share_of(count, parts, part);
        holds = holds && share.first == next && share.count >= 0 && share.count <= before;
        next += share.count;
        before = share.count;
        longest = std::max(longest, share.count);
      }
      section.check(holds && next == count && longest - before <= 1, "%d in %d parts", count,
                    parts);
    }
  }
}

// As ChainKernel::multiply and ChainCopier::run go through a layer.
void check_tiles() {
  Section section("tiles");
  std::vector<int> sizes;
  for (int n_blocks = 1; n_blocks <= 500; ++n_blocks) sizes.push_back(n_blocks);
  for (const int n_blocks : {1792, 1793, 3584, 3585, 6656, 9496}) sizes.push_back(n_blocks);
  for (const int n_blocks : sizes) {
    for (int ctas = 1; ctas <= 200; ++ctas) {
      const partition::ChainTiles tiles = partition::chain_tiles(n_blocks, ctas);
      bool holds = tiles.tiles >= 1 && tiles.tile_blocks >= 1 && tiles.tile_blocks <= kMostBlocks;
      int next = 0;
      for (int cta = 0; holds && cta < ctas; ++cta) {
        const Share share = share_of(n_blocks, ctas, cta);
        // Whoever waits for a layer counts on so many thread blocks (wait_for_layers).
        holds = (share.count > 0) == (cta < std::min(n_blocks, ctas));
        if (share.count == 0) continue;
        for (int t = 0; holds && t < tiles.tiles; ++t) {
          const Share tile = share_of(share.count, tiles.tiles, t);
          holds = share.first + tile.first == next && tile.count >= 1 &&
                  (tile.count == tiles.tile_blocks || tile.count == tiles.tile_blocks - 1);
          next += tile.count;
        }
      }
      section.check(holds && next == n_blocks, "%d n-blocks on %d", n_blocks, ctas);
    }
  }
}

// multiply_tile and store_totals: which n-blocks a warp multiplies, and which of them it stores.
void check_warps() {
  Section section("warps");
  for (int most = 1; most <= kMostBlocks; ++most) {
    const int warps_n = partition::chain_tiles(most, 1).warps_n;
    for (int blocks = std::max(1, most - 1); blocks <= most; ++blocks) {
      const int of_warp = (blocks + warps_n - 1) / warps_n;
      section.check(of_warp >= 1 && of_warp <= partition::kChainWarpBlocks,
                    "%d of %d n-blocks: %d for a warp", blocks, most, of_warp);
      std::vector<int> stored(static_cast<size_t>(blocks));
      for (int warp_n = 0; warp_n < warps_n; ++warp_n) {
        const int first = std::min(warp_n * of_warp, blocks - of_warp);
        section.check(first >= 0, "%d of %d n-blocks: warp %d begins at %d", blocks, most, warp_n,
                      first);
        for (int j = 0; j < of_warp; ++j) {
          if (first + j >= warp_n * of_warp) ++stored[static_cast<size_t>(first + j)];
        }
      }
      for (int block = 0; block < blocks; ++block) {
        section.check(stored[static_cast<size_t>(block)] == 1, "%d of %d n-blocks: %d stored %d x",
                      blocks, most, block, stored[static_cast<size_t>(block)]);
      }
    }
  }
}

// Shows every layer whose tiles have up to `largest` n-blocks in a chain with such a one.
template <typename See>
void for_each_layer(See see) {
  for (int m = 1; m <= kMostRows; ++m) {
    for (int largest = 1; largest <= kMostBlocks; ++largest) {
      for (int blocks = 1; blocks <= largest; ++blocks) {
        for (const bool one_group : {false, true}) {
          const chain_cut::Chain chain =
              chain_cut::cut(m, {{blocks, 8, one_group}, {largest, 8, false}}, 1);
          see(chain, chain.layers[0], blocks, one_group);
        }
      }
    }
  }
}

void check_groups() {
  Section section("groups");
  for_each_layer(
      [&](const chain_cut::Chain& chain, const chain_cut::Layer& layer, int blocks, bool) {
        const int warps = partition::chain_warps(chain.m), ring = chain.memory.slots;
        section.check(layer.slot.steps >= 1 && warps % layer.group == 0 && layer.groups >= 2,
                      "m %d, %d n-blocks: groups of %d warps", chain.m, blocks, layer.group);
        // A group looks at the ring from its own place on, and copiers stay within one turn.
        section.check(ring >= layer.groups && layer.in_flight >= 2 && layer.in_flight <= ring,
                      "m %d, %d n-blocks: a ring of %d for %d groups and %d in flight", chain.m,
                      blocks, ring, layer.groups, layer.in_flight);
      });
}

void check_slots() {
  Section section("slots");
  for_each_layer([&](const chain_cut::Chain& chain, const chain_cut::Layer& layer, int blocks,
                     bool one_group) {
    const partition::ChainSlot& slot = layer.slot;
    const int groups = one_group ? 1 : slot.steps;
    const int x = slot.steps * chain.m * partition::kStepK * 2;
    const int codes = slot.steps * blocks * layout::kTileN * partition::kStepK / 2;
    const int scales = groups * blocks * layout::kTileN * chain_cut::kScaleBytes;
    section.check(slot.x_bytes == x && slot.code_bytes == codes && slot.scale_bytes == scales,
                  "m %d, %d n-blocks, %d steps: sizes", chain.m, blocks, slot.steps);
    section.check(slot.codes >= x && slot.scales >= slot.codes + codes &&
                      slot.total >= slot.scales + scales && slot.total <= chain.memory.slot_bytes,
                  "m %d, %d n-blocks, %d steps: parts overlap", chain.m, blocks, slot.steps);
    section.check(slot.codes % 128 == 0 && slot.scales % 128 == 0 && slot.total % 1024 == 0 &&
                      chain.memory.slot_bytes % 1024 == 0,
                  "m %d, %d n-blocks, %d steps: alignment", chain.m, blocks, slot.steps);
    // ChainCopier::boxes_of finds the bytes of a tile of one n-block less by division; boxes have
    // no side above 256.
    section.check(slot.code_bytes % blocks == 0 && slot.scale_bytes % blocks == 0 &&
                      2 * slot.steps <= 256 && blocks <= 256,
                  "m %d, %d n-blocks, %d steps: boxes", chain.m, blocks, slot.steps);
  });
}

void check_memory() {
  Section memory_section("memory"), partials("partial_sums");
  for_each_layer(
      [&](const chain_cut::Chain& chain, const chain_cut::Layer& layer, int blocks, bool) {
        const partition::ChainMemory& memory = chain.memory;
        const int barriers = memory.slots * partition::kChainBarriers * 8;
        memory_section.check(
            memory.total <= chain_cut::kSharedBytes && memory.slots >= 2 &&
                memory.partials == memory.slots * memory.slot_bytes && memory.partials % 16 == 0 &&
                memory.barriers >= memory.partials + partition::chain_partial_bytes(chain.m) &&
                memory.barriers % 8 == 0 && memory.total >= memory.barriers + barriers,
            "m %d, %d n-blocks: %d slots of %d, %d bytes", chain.m, blocks, memory.slots,
            memory.slot_bytes, memory.total);
        const int row = partition::chain_partial_row(blocks);
        const int copies = partition::chain_copies_at_once(chain.m, blocks);
        partials.check(copies >= 1 && row >= blocks * layout::kTileN && row % 4 == 0 &&
                           copies * chain.m * row * 4 <= partition::chain_partial_bytes(chain.m),
                       "m %d, %d n-blocks: %d copies of rows of %d", chain.m, blocks, copies, row);
        // Each copy is of one step of one group, in the order of their numbers.
        std::set<int> numbers;
        for (int warp = 0; warp < partition::chain_warps(chain.m); ++warp) {
          const int step = warp % layer.group / layer.tiles.warps_n;
          numbers.insert(warp / layer.group * layer.slot.steps + step);
        }
        partials.check(*numbers.begin() == 0 &&
                           *numbers.rbegin() + 1 == layer.groups * layer.slot.steps &&
                           static_cast<int>(numbers.size()) == layer.groups * layer.slot.steps,
                       "m %d, %d n-blocks: numbers of copies", chain.m, blocks);
      });
  for (int blocks = 1; blocks <= kMostBlocks;
       ++blocks) {  // store_totals: lanes in banks of their own
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) {
      banks.insert((lane % 4 * 2 * partition::chain_partial_row(blocks) + lane / 4) % 32);
    }
    partials.check(banks.size() == 32, "%d n-blocks: stores meet in banks", blocks);
  }
}

// finish_tile: every result of a tile is added up and stored by one thread.
void check_results() {
  Section section("results");
  for (int m = 1; m <= kMostRows; ++m) {
    const int token_rows = m <= partition::kTokens ? partition::kTokens : 2 * partition::kTokens;
    const int threads = partition::chain_warps(m) * 32;
    const int items = (token_rows * kMostBlocks * 4 + threads - 1) / threads;
    for (int most = 1; most <= kMostBlocks; ++most) {
      int fours_log2 = 2;
      while (1 << fours_log2 < most * 4) ++fours_log2;
      for (int blocks = std::max(1, most - 1); blocks <= most; ++blocks) {
        std::vector<int> stored(static_cast<size_t>(m * blocks * 4));
        for (int thread = 0; thread < threads; ++thread) {
          const int four = thread & ((1 << fours_log2) - 1);
          for (int item = 0; item < items; ++item) {
            const int row = (thread >> fours_log2) + item * (threads >> fours_log2);
            if (four >= blocks * 4 || row >= m) break;
            ++stored[static_cast<size_t>(row * blocks * 4 + four)];
          }
        }
        section.check(std::all_of(stored.begin(), stored.end(), [](int n) { return n == 1; }),
                      "m %d, %d of %d n-blocks", m, blocks, most);
      }
    }
  }
}

// Where the copy engine puts 16 bytes of a box of rows: its 128-byte swizzle, by addresses alone.
int swizzled(int address) { return address ^ (address >> 7 & 7) << 4; }

// rows_of in chain_kernel.cuh and load_rows in step.cuh: what each lane gives to ldmatrix.
void check_rows() {
  Section places("rows_of_x"), banks("rows_of_x_banks");
  for (int m = 1; m <= kMostRows; ++m) {
    const bool one = m <= partition::kTokens;
    for (int step = 0; step < 8; ++step) {
      for (int k16 = 0; k16 < partition::kStepK / 16; k16 += one ? 2 : 1) {
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::set<int> words[32];
          for (int lane = matrix * 8; lane < matrix * 8 + 8; ++lane) {
            const int row = std::min(one ? lane % 8 : lane % 8 + lane / 16 * 8, m - 1);
            const int chunk = one ? lane / 8 : lane / 8 % 2, half = k16 / 4;
            const int line = (2 * step + half) * m + row;
            const int place = line * 128 + (chunk ^ line % 8) * 16;
            const int ours = place ^ (one ? k16 / 2 % 2 * 64 : k16 % 4 * 32);
            // Matrix l / 8: k 0-7 and 8-15 of rows 0-7 and of rows 8-15, or of two sixteenths.
            const int k8 = one ? 2 * (k16 % 4) + matrix : 2 * (k16 % 4) + matrix % 2;
            const int x_row = std::min(lane % 8 + (one ? 0 : matrix / 2 * 8), m - 1);
            const int expected = swizzled(((2 * step + half) * m + x_row) * 128 + k8 * 16);
            places.check(ours == expected, "m %d step %d k16 %d lane %d: %d, not %d", m, step, k16,
                         lane, ours, expected);
            for (int at = ours; at < ours + 16; at += 4) words[at / 4 % 32].insert(at / 4);
          }
          size_t most = 0;
          for (const auto& bank : words) most = std::max(most, bank.size());
          banks.check(most == 1, "m %d step %d k16 %d matrix %d", m, step, k16, matrix);
        }
      }
    }
  }
}

// What setmaxnreg moves: all that is asked for must be there, else the last to ask waits for ever.
void check_registers() {
  Section section("registers");
  for (int m = 1; m <= kMostRows; ++m) {
    const int warps = partition::chain_warps(m), threads = partition::chain_threads(warps);
    const int at_launch = 65536 / threads / 8 * 8, taken = partition::chain_registers(warps);
    const int moved = taken * warps * 32 + partition::kCopyRegisters * partition::kCopyThreads;
    section.check(moved <= at_launch * threads && threads <= 1024 && warps % 4 == 0,
                  "m %d: %d of %d registers", m, moved, at_launch * threads);
    section.check(taken % 8 == 0 && taken >= at_launch && taken <= 256 &&
                      partition::kCopyRegisters <= at_launch,
                  "m %d: from %d to %d", m, at_launch, taken);
  }
}

}  // namespace

int main() {
  check_shares();
  check_tiles();
  check_warps();
  check_groups();
  check_slots();
  check_memory();
  check_results();
  check_rows();
  check_registers();
  check_ring();
  check_waits();
  return 0;
}
