// Sizes that tests of partition and plans run over: layers of known models, and those that are
// awkward to cut. Only numbers; what is done with them stands in the tests.
#pragma once

#include <cstdint>

namespace shapes {

struct Shape {
  int64_t k, n;
};

inline constexpr Shape kLayers[] = {
    // Llama 2 and 3, Mistral, Qwen3-8B
    {4096, 12288},
    {4096, 4096},
    {4096, 22016},
    {11008, 4096},
    {4096, 6144},
    {4096, 28672},
    {14336, 4096},
    {4096, 24576},
    {12288, 4096},
    {4096, 21504},
    {10752, 4096},
    // 13B and 14B, Qwen2.5-32B, Qwen3-32B
    {5120, 15360},
    {5120, 5120},
    {5120, 27648},
    {13824, 5120},
    {5120, 27136},
    {13568, 5120},
    {5120, 7168},
    {5120, 55296},
    {27648, 5120},
    {5120, 34816},
    {17408, 5120},
    {5120, 10240},
    {8192, 5120},
    {5120, 51200},
    {25600, 5120},
    // 33B, 65B, 70B, 72B, 405B, Mistral Large, Command-A
    {6656, 19968},
    {6656, 6656},
    {6656, 35328},
    {17664, 6656},
    {8192, 24576},
    {8192, 43520},
    {21760, 8192},
    {8192, 10240},
    {8192, 8192},
    {8192, 57344},
    {28672, 8192},
    {8192, 59136},
    {29568, 8192},
    {16384, 18432},
    {16384, 16384},
    {16384, 106496},
    {53248, 16384},
    {12288, 14336},
    {12288, 12288},
    {12288, 57344},
    {28672, 12288},
    {12288, 73728},
    {36864, 12288},
    // Falcon, Mixtral, Qwen2.5-7B
    {14848, 75264},
    {74240, 14848},
    {8192, 9216},
    {8192, 32768},
    {32768, 8192},
    {3584, 4608},
    {3584, 3584},
    {3584, 37888},
    {18944, 3584},
    // mixtures of experts, DeepSeek
    {2048, 1536},
    {768, 2048},
    {2048, 3072},
    {2048, 4096},
    {2048, 2048},
    {2048, 576},
    {2048, 21888},
    {10944, 2048},
    {2048, 2816},
    {1408, 2048},
    {7168, 2112},
    {1536, 24576},
    {512, 32768},
    {16384, 7168},
    {7168, 36864},
    {18432, 7168},
    {7168, 4096},
    {2048, 7168},
    // a thousand steps and many columns for each multiprocessor of an A10 and of an H200
    {73728, 18432},
    {135168, 33792},
    // small and odd ones
    {1, 1},
    {128, 64},
    {129, 65},
    {384, 384},
    {384, 1536},
    {1536, 384},
};

// Each of these stands for k beside n = 4096 and n = 65, and for n likewise.
inline constexpr int64_t kAwkward[] = {10944, 7392, 14784, 18944, 3696, 1408, 576,    2112,   464,
                                       232,   1856, 2688,  10304, 3712, 32,   151936, 1000003};

inline constexpr int64_t kRows[] = {1,  2,  7,  8,  9,   16,  17,   32,  33,
                                    63, 64, 65, 96, 130, 250, 1024, 4096};

inline constexpr int kMultiprocessors[] = {1,   16,  58,  72,  84,  108, 116,
                                           128, 132, 144, 168, 216, 264};

// Calls see(k, n) for every shape.
template <typename See>
void for_each(See see) {
  for (const Shape& shape : kLayers) see(shape.k, shape.n);
  for (const int64_t awkward : kAwkward) {
    for (const int64_t other : {int64_t{65}, int64_t{4096}}) {
      see(awkward, other);
      see(other, awkward);
    }
    see(awkward, awkward);
  }
}

}  // namespace shapes
