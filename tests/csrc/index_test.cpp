// The table of entries by sequence, beside a map: sequences that share places, that wrap around its
// end, that come and go. Exits with 1 at the first difference.
#include "dispatch/index.h"

#include <cstdio>
#include <random>
#include <unordered_map>
#include <vector>

namespace qlinear::dispatch {
struct Entry {};
}  // namespace qlinear::dispatch

using qlinear::dispatch::Entry;
using qlinear::dispatch::Index;

int main() {
  std::mt19937_64 random(1);
  std::vector<Entry> entries(4096);
  // Of the multiples of 2^44 all have one place, of those of 2^36 each sixteenth.
  for (const int shift : {0, 20, 36, 44}) {
    Index index;
    std::unordered_map<uint64_t, Entry*> map;
    for (int i = 0; i < 200'000; ++i) {
      const uint64_t sequence = (1 + random() % (shift == 44 ? 100 : 3000)) << shift;
      Entry* entry = &entries[random() % entries.size()];
      if (map.count(sequence) == 0) {
        index.add(sequence, entry);
        map[sequence] = entry;
      } else if (random() % 3 > 0) {
        index.remove(sequence);
        map.erase(sequence);
      }
      const uint64_t other = (1 + random() % 3000) << shift;
      for (const uint64_t asked : {sequence, other}) {
        const auto found = map.find(asked);
        if (index.find(asked) == (found == map.end() ? nullptr : found->second)) continue;
        std::fprintf(stderr, "shift %d, step %d: another entry\n", shift, i);
        return 1;
      }
    }
    if (index.size() != map.size()) return 1;
  }
  return 0;
}
