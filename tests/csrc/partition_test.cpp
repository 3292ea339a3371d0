// Proves partition.h with g++ alone: shared memory free of bank conflicts, every step of every tile
// in exactly one stripe, no two shares in one slot. Prints what test_partition.py reads.
#include "partition.h"

#include <algorithm>
#include <set>
#include <vector>

#include "checks.h"
#include "shapes.h"

namespace layout = qlinear::layout;
namespace partition = qlinear::partition;
using partition::Stripes;

namespace {

constexpr int kGroupSizes[] = {-1, 32, 64, 128};
constexpr int kAddressBase = 3 * 1024;  // where dynamic shared memory may begin

// How often the busiest of the 32 banks is needed for one access of so many bytes per lane: the
// hardware serves 128 bytes at a time, so 32 lanes of 4 bytes or 8 lanes of 16.
int bank_passes(const std::vector<int>& addresses, int bytes) {
  std::set<int> words[32];
  for (const int address : addresses) {
    for (int at = address; at < address + bytes; at += 4) words[at / 4 % 32].insert(at / 4);
  }
  size_t most = 0;
  for (const auto& bank : words) most = std::max(most, bank.size());
  return static_cast<int>(most);
}

constexpr int kTokenBlocks[] = {1, 2, 4, 8, 16, 24};

void check_swizzle() {
  Section permutation("swizzle_permutation"), reads("ldmatrix_banks"), writes("copy_banks");
  for (const int token_blocks : kTokenBlocks) {
    const int rows = token_blocks * partition::kTokens;
    std::set<int> places;
    for (int row = 0; row < rows; ++row) {
      for (int chunk = 0; chunk < partition::kRowChunks; ++chunk) {
        const int offset = partition::activation_offset(row, chunk, rows);
        permutation.check(
            offset % 16 == 0 && offset >= 0 && offset < rows * 256 && places.insert(offset).second,
            "rows %d: row %d chunk %d lies at %d", rows, row, chunk, offset);
      }
      // Eight lanes that follow each other copy eight chunks that do.
      for (int first = 0; first < partition::kRowChunks; first += 8) {
        std::vector<int> addresses;
        for (int i = 0; i < 8; ++i) {
          addresses.push_back(partition::activation_offset(row, first + i, rows));
        }
        writes.check(bank_passes(addresses, 16) == 1, "row %d from chunk %d", row, first);
      }
    }
    for (int row = 0; row < rows; row += 8) {
      for (int chunk = 0; chunk < partition::kRowChunks; ++chunk) {
        std::vector<int> addresses;
        for (int i = 0; i < 8; ++i) {
          addresses.push_back(partition::activation_offset(row + i, chunk, rows));
        }
        reads.check(bank_passes(addresses, 16) == 1, "rows from %d, chunk %d", row, chunk);
      }
    }
  }
}

// multiply_by_warp() in cuda/linear.cuh finds all places from one address by exclusive ors and
// whole halves: matrix l / 8 of a load holds k 0-7 and 8-15 of two blocks of rows, or of two
// sixteenths of k where there is but one block.
void check_matrix_addresses() {
  Section section("matrix_addresses");
  for (const int token_blocks : kTokenBlocks) {
    const int rows = token_blocks * partition::kTokens;
    for (int stage = 0; stage < partition::kMaxStages * partition::kMaxWarpsK; ++stage) {
      const int base = kAddressBase + stage * rows * 256;
      for (int lane = 0; lane < 32; ++lane) {
        const bool one = token_blocks == 1;
        const int row = one ? lane % 8 : lane % 8 + lane / 16 * 8;
        const int x = base + partition::activation_offset(row, one ? lane / 8 : lane / 8 % 2, rows);
        for (int k16 = 0; k16 < partition::kStepK / 16; k16 += one ? 2 : 1) {
          for (int token = 0; token < token_blocks; token += 2) {
            const int half = x + k16 / 4 * rows * partition::kHalfRowBytes;
            const int ours = one ? half ^ (k16 / 2 % 2 * 64)
                                 : (half + token * partition::kTokens * partition::kHalfRowBytes) ^
                                       (k16 % 4 * 32);
            const int chunk = 2 * k16 + (one ? lane / 8 : lane / 8 % 2);
            const int expected = base + partition::activation_offset(8 * token + row, chunk, rows);
            section.check(ours == expected, "rows %d lane %d token block %d k16 %d", rows, lane,
                          token, k16);
          }
        }
      }
    }
  }
}

// activation_row() in cuda/producer.cuh: rows that a thread copies after its first one.
void check_copy_addresses() {
  Section section("copy_addresses");
  for (const int token_blocks : kTokenBlocks) {
    const int rows = token_blocks * partition::kTokens;
    for (const int warps_n : {1, 2, 4, 8}) {
      const int row_step = warps_n * 32 / partition::kRowChunks;
      for (int thread = 0; thread < warps_n * 32; ++thread) {
        const int first = thread / partition::kRowChunks, chunk = thread % partition::kRowChunks;
        const int to = kAddressBase + partition::activation_offset(first, chunk, rows);
        for (int ahead = 0; first + ahead < rows; ahead += row_step) {
          const int ours = (to ^ (ahead % 8 * 16)) + ahead * partition::kHalfRowBytes;
          const int expected =
              kAddressBase + partition::activation_offset(first + ahead, chunk, rows);
          section.check(ours == expected, "rows %d warps_n %d thread %d row %d", rows, warps_n,
                        thread, first + ahead);
        }
      }
    }
  }
}

// What wgmma reads for (row, k) from the descriptor of activation_descriptor() in cuda/wgmma.cuh:
// by the PTX ISA rows of 128 bytes, 1024 from eight to the next eight, and bits 4 to 6 of each
// address combined with bits 7 to 9; the pattern begins at multiples of 1024.
void check_descriptor() {
  Section section("descriptor");
  for (const int token_blocks : kTokenBlocks) {
    const int rows = token_blocks * partition::kTokens;
    for (int stage = 0; stage < partition::kMaxStages; ++stage) {
      const int base = kAddressBase + stage * rows * 256;
      for (int k16 = 0; k16 < partition::kStepK / 16; ++k16) {
        const int half = base + k16 / 4 * rows * partition::kHalfRowBytes;
        section.check(half % 1024 == 0, "rows %d: a pattern begins at %d", rows, half);
        for (int row = 0; row < rows; ++row) {
          for (int chunk = 0; chunk < 2; ++chunk) {
            const int linear = half + k16 % 4 * 32 + row / 8 * 1024 + row % 8 * 128 + chunk * 16;
            const int read = linear ^ (linear >> 7 & 7) << 4;
            const int expected = base + partition::activation_offset(row, 2 * k16 + chunk, rows);
            section.check(read == expected, "rows %d row %d k16 %d chunk %d", rows, row, k16,
                          chunk);
          }
        }
      }
    }
  }
}

template <typename See>
void for_each_memory(See see) {
  for (const int token_blocks : kTokenBlocks) {
    for (const int warps_n : {1, 2, 4, 8}) {
      for (const int warps_k : {1, 2, 3, 4, 8, 15, 16}) {
        for (int stages = 2; stages <= partition::kMaxStages; ++stages) {
          for (const int bits : {4, 8}) {
            for (const int group_size : kGroupSizes) {
              for (const int scale_item_bytes : {2, 4}) {
                for (const bool has_zeros : {false, true}) {
                  const partition::Geometry geometry{token_blocks, warps_n, warps_k, stages};
                  see(geometry, bits, group_size, scale_item_bytes, has_zeros);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Parts lie one after the other, large enough for what the kernel puts there, where 16-byte copies
// can go.
void check_memory() {
  Section section("memory");
  for_each_memory([&](partition::Geometry g, int bits, int group_size, int item, bool has_zeros) {
    const auto memory = partition::shared_memory(g, bits, group_size, item, has_zeros);
    const int groups = group_size == -1 ? 1 : partition::kStepK / group_size;
    const int warp_columns = g.token_blocks >= 16 ? 16 : 32;
    const int columns = warp_columns * g.warps_n, tokens = 8 * g.token_blocks;
    const int warps = g.warps_n * g.warps_k;
    const int codes = warp_columns * 128 * bits / 8, scales = warp_columns * groups * item;
    const int zeros = has_zeros ? warp_columns * groups : 0;
    const bool parts =
        memory.activation_stage == tokens * 256 && memory.warp_stage == codes + scales + zeros &&
        memory.weights == g.warps_k * g.stages * memory.activation_stage &&
        memory.partials == memory.weights + warps * g.stages * memory.warp_stage &&
        memory.barriers == memory.partials + g.warps_k * tokens * memory.partial_row * 4 &&
        memory.flag == memory.barriers + 2 * g.warps_k * g.stages * 8 &&
        memory.total >= memory.flag + 4;
    const bool aligned =
        memory.activation_stage % 1024 == 0 && codes % 16 == 0 && scales % 16 == 0 &&
        memory.warp_stage % 16 == 0 && memory.weights % 1024 == 0 && memory.partials % 16 == 0 &&
        memory.barriers % 8 == 0 && memory.partial_row % 4 == 0 && memory.flag % 4 == 0;
    section.check(parts && aligned && memory.partial_row >= columns,
                  "token_blocks %d warps_n %d warps_k %d stages %d bits %d group_size %d",
                  g.token_blocks, g.warps_n, g.warps_k, g.stages, bits, group_size);
  });
}

// The loops of store_totals() and add_groups() in cuda/linear.cuh.
void check_partials() {
  Section stores("partial_stores"), loads("partial_loads");
  for (const int token_blocks : kTokenBlocks) {
    const int blocks = partition::blocks_per_warp(token_blocks), warp_columns = 16 * blocks;
    for (const int warps_n : {1, 2, 4, 8}) {
      if (blocks == 1 && warps_n < partition::kWarpgroupWarps) continue;  // no such plan
      const auto memory = partition::shared_memory({token_blocks, warps_n, 2, 2}, 4, 128, 2, true);
      const int base = kAddressBase + memory.partials;
      for (int warp = 0; warp < warps_n; ++warp) {
        for (int place = 0; place < token_blocks * blocks * 4; ++place) {
          const int i = place % 4, block = place / 4 % blocks, token = place / 4 / blocks;
          std::vector<int> addresses;
          for (int lane = 0; lane < 32; ++lane) {
            const int x_row = token * 8 + lane % 4 * 2 + i % 2;
            const int column = warp * warp_columns + block * 16 + i / 2 * 8 + lane / 4;
            addresses.push_back(base + 4 * (x_row * memory.partial_row + column));
          }
          stores.check(bank_passes(addresses, 4) == 1, "warps_n %d place %d", warps_n, place);
        }
      }
      const int columns = warps_n * warp_columns, rows = token_blocks * 8;
      for (int first = 0; first < rows * columns / 4; first += 8) {
        std::vector<int> addresses;
        for (int i = first; i < first + 8; ++i) {
          const int row = i / (columns / 4), column = i % (columns / 4) * 4;
          addresses.push_back(base + 4 * (row * memory.partial_row + column));
        }
        loads.check(bank_passes(addresses, 16) == 1 && addresses[0] % 16 == 0,
                    "warps_n %d from thread %d", warps_n, first);
      }
    }
  }
}

// Begins, ends and owners. owner() rises with the step, so both ends of each stripe decide.
void check_stripes(Section& section, const Stripes& stripes) {
  const int64_t steps = stripes.granules * stripes.granule_steps;
  const int64_t least = stripes.granules / stripes.ctas * stripes.granule_steps;
  bool holds = stripes.begin(0) == 0 && stripes.begin(stripes.ctas) == steps;
  for (int cta = 0; cta < stripes.ctas; ++cta) {
    const int64_t begin = stripes.begin(cta), end = stripes.begin(cta + 1), length = end - begin;
    holds = holds && length > 0 && begin % stripes.granule_steps == 0 &&
            (length == least || length == least + stripes.granule_steps) &&
            stripes.owner(begin) == cta && stripes.owner(end - 1) == cta;
  }
  section.check(holds, "granules %lld of %d steps on %d", static_cast<long long>(stripes.granules),
                stripes.granule_steps, stripes.ctas);
}

void check_every_step() {
  Section section("every_step");
  for (int granules = 1; granules <= 300; ++granules) {
    for (int ctas = 1; ctas <= granules; ++ctas) {
      for (const int granule_steps : {1, 3}) {
        const Stripes stripes{granules, granule_steps, ctas};
        int64_t step = 0;
        bool holds = true;
        for (int cta = 0; cta < ctas; ++cta) {
          for (; step < stripes.begin(cta + 1); ++step) holds = holds && stripes.owner(step) == cta;
        }
        section.check(holds && step == int64_t{granules} * granule_steps, "granules %d on %d",
                      granules, ctas);
      }
    }
  }
}

// A thread block's share of a tile, as struct Stripe and finish_tile() in cuda/linear.cuh see it.
struct Share {
  int64_t tile;
  bool began, whole;
};

// Only the first and the last tile of a stripe can be shared with other thread blocks.
std::vector<Share> shares_at_the_ends(const Stripes& stripes, int cta, int tile_steps) {
  const int64_t begin = stripes.begin(cta), end = stripes.begin(cta + 1);
  const int64_t first = begin / tile_steps, last = (end - 1) / tile_steps;
  std::vector<Share> shares;
  for (int64_t tile = first; tile <= last; tile = tile == last ? last + 1 : last) {
    const int64_t from = tile == first ? begin % tile_steps : 0;
    const int64_t to = tile == last ? (end - 1) % tile_steps + 1 : tile_steps;
    shares.push_back({tile, from == 0, from == 0 && to == tile_steps});
  }
  return shares;
}

// Every share has a slot of its own, and whoever adds a tile up reads exactly its shares' slots.
void check_slots(Section& section, const Stripes& stripes, int tile_steps) {
  std::vector<int64_t> tile_in(2 * static_cast<size_t>(stripes.ctas), -1);
  bool holds = true;
  for (int cta = 0; cta < stripes.ctas; ++cta) {
    for (const Share& share : shares_at_the_ends(stripes, cta, tile_steps)) {
      if (share.whole) continue;
      const int64_t slot = partition::partial_slot(cta, share.began);
      holds = holds && slot >= 0 && slot < 2 * int64_t{stripes.ctas} &&
              tile_in[static_cast<size_t>(slot)] == -1;
      if (holds) tile_in[static_cast<size_t>(slot)] = share.tile;
    }
  }
  for (int cta = 0; holds && cta < stripes.ctas; ++cta) {
    for (const Share& share : shares_at_the_ends(stripes, cta, tile_steps)) {
      if (share.whole) continue;
      const int64_t begin = share.tile * tile_steps;
      const int from = stripes.owner(begin), to = stripes.owner(begin + tile_steps - 1);
      holds = holds && from <= cta && cta <= to && from < to;
      for (int other = from; other <= to; ++other) {
        const int64_t slot = partition::partial_slot(other, other == from);
        holds = holds && tile_in[static_cast<size_t>(slot)] == share.tile;
      }
    }
  }
  section.check(holds, "%lld granules of %d steps, tiles of %d steps, on %d",
                static_cast<long long>(stripes.granules), stripes.granule_steps, tile_steps,
                stripes.ctas);
}

void check_shapes() {
  Section stripes_section("stripes"), slots_section("slots");
  shapes::for_each([&](int64_t k, int64_t n) {
    const int steps = static_cast<int>(layout::round_up(k, layout::kPadK) / partition::kStepK);
    const int64_t n_padded = layout::round_up(n, layout::kPadN);
    std::set<int64_t> tile_counts;
    for (const int64_t m : shapes::kRows) {
      for (const int rows : {8, 64, 128}) {
        for (const int columns : {32, 64, 128, 256}) {
          tile_counts.insert((m + rows - 1) / rows * ((n_padded + columns - 1) / columns));
        }
      }
    }
    for (const int64_t tiles : tile_counts) {
      for (const int multiprocessors : shapes::kMultiprocessors) {
        const int64_t ctas = multiprocessors;
        const Stripes split{tiles * steps, 1, static_cast<int>(std::min(ctas, tiles * steps))};
        const Stripes whole{tiles, steps, static_cast<int>(std::min(ctas, tiles))};
        check_stripes(stripes_section, split);
        check_stripes(stripes_section, whole);
        check_slots(slots_section, split, steps);
        check_slots(slots_section, whole, steps);
      }
    }
  });
}

}  // namespace

int main() {
  check_swizzle();
  check_matrix_addresses();
  check_copy_addresses();
  check_descriptor();
  check_memory();
  check_partials();
  check_every_step();
  check_shapes();
  return 0;
}
