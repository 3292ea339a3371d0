// Reads the packed layout with wgmma (sm_90a) and compares with float64 on the CPU, which finds
// every code through layout::code_place. No torch, no library of ours.
//
//   wgmma_layout                        random problems, both placements of x: one line for each
//   wgmma_layout --descriptor-variants  one problem under every descriptor; says which are right
//   wgmma_layout DIR                    the problem in DIR, as a packer wrote it:
//       meta.txt     "name value" each: m n k bits group_size, zeros exact (0 or 1),
//                    x scales (f16, bf16, f32), y (f32, f64)
//       x.bin [m, k]   qweight.bin   scales.bin   zeros.bin   y.bin [m, n], what is expected
//       out.bin is written: y [m, n] as float32
//
// Exit status: 0 all right, 1 something is not, 2 no fitting GPU or file.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "wgmma_layout.cuh"

namespace {

using qlinear::layout::code_place;
using qlinear::layout::round_up;
using qlinear::layout::scale_index;
using wgmma::Item;
using wgmma::Placement;
using Bytes = std::vector<unsigned char>;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(2);
}

void check(cudaError_t error, const char* operation) {
  if (error != cudaSuccess) stop(std::string(operation) + ": " + cudaGetErrorString(error));
}

struct Case {
  int m, n, k, bits, group_size;
  bool has_zeros;
  Item x_item, scale_item;
  bool is_exact;  // float32 holds every sum that there can be
  Bytes x, qweight, scales, zeros;
  std::vector<double> expected;  // from a file; may be empty

  int n_padded() const { return static_cast<int>(round_up(n, qlinear::layout::kPadN)); }
  int k_padded() const { return static_cast<int>(round_up(k, qlinear::layout::kPadK)); }
  int groups() const { return group_size == -1 ? 1 : k_padded() / group_size; }
};

size_t item_bytes(Item item) { return item == Item::kF32 ? 4 : 2; }

double value_at(const Bytes& bytes, Item item, int64_t index) {
  const unsigned char* at = bytes.data() + static_cast<size_t>(index) * item_bytes(item);
  if (item == Item::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (item == Item::kF16) {
    __half value;
    std::memcpy(&value, at, 2);
    return __half2float(value);
  }
  __nv_bfloat16 value;
  std::memcpy(&value, at, 2);
  return __bfloat162float(value);
}

void put_value(Bytes& bytes, Item item, int64_t index, float value) {
  unsigned char* at = bytes.data() + static_cast<size_t>(index) * item_bytes(item);
  if (item == Item::kF32) {
    std::memcpy(at, &value, 4);
  } else if (item == Item::kF16) {
    const __half half = __float2half_rn(value);
    std::memcpy(at, &half, 2);
  } else {
    const __nv_bfloat16 half = __float2bfloat16_rn(value);
    std::memcpy(at, &half, 2);
  }
}

// Everything random, padding too: no row or column of it may reach a result. Exact problems hold
// small integers and powers of two, so a single wrong code shows however long the sum.
Case random_case(int m, int n, int k, int bits, int group_size, bool has_zeros, Item x_item,
                 Item scale_item, bool is_exact, unsigned seed) {
  Case c{m, n, k, bits, group_size, has_zeros, x_item, scale_item, is_exact, {}, {}, {}, {}, {}};
  std::mt19937 draw(seed);
  std::normal_distribution<float> normal;
  const auto x_value = [&] { return is_exact ? static_cast<float>(draw() % 5) - 2 : normal(draw); };
  const auto scale_value = [&] {
    const float sign = draw() % 2 == 0 ? 1.0f : -1.0f;
    return is_exact ? std::ldexp(sign, -static_cast<int>(draw() % 4))
                    : std::ldexp(normal(draw), -bits);
  };
  const size_t columns = static_cast<size_t>(c.groups()) * static_cast<size_t>(c.n_padded());
  c.x.resize(static_cast<size_t>(m) * static_cast<size_t>(k) * item_bytes(x_item));
  for (int64_t i = 0; i < int64_t{m} * k; ++i) put_value(c.x, x_item, i, x_value());
  c.qweight.resize(
      static_cast<size_t>(qlinear::layout::qweight_bytes(c.n_padded(), c.k_padded(), bits)));
  for (auto& byte : c.qweight) byte = static_cast<unsigned char>(draw());
  c.scales.resize(columns * item_bytes(scale_item));
  for (size_t i = 0; i < columns; ++i) {
    put_value(c.scales, scale_item, static_cast<int64_t>(i), scale_value());
  }
  if (has_zeros) c.zeros.resize(columns);
  for (auto& zero : c.zeros) zero = static_cast<unsigned char>(draw() % (1u << bits));
  return c;
}

// y [m, n] and the sums of magnitudes that bound what rounding may do, in float64.
struct Reference {
  std::vector<double> y, magnitude;
};

Reference reference(const Case& c) {
  std::vector<double> w(static_cast<size_t>(c.n) * static_cast<size_t>(c.k));
  for (int n = 0; n < c.n; ++n) {
    for (int k = 0; k < c.k; ++k) {
      const auto place = code_place(n, k, c.k_padded(), c.bits);
      const int code =
          c.qweight[static_cast<size_t>(place.byte)] >> place.shift & ((1 << c.bits) - 1);
      const int64_t column = scale_index(qlinear::layout::group_of(k, c.group_size), n, c.groups());
      const int zero = c.has_zeros ? c.zeros[static_cast<size_t>(column)] : 1 << (c.bits - 1);
      w[static_cast<size_t>(n) * static_cast<size_t>(c.k) + static_cast<size_t>(k)] =
          (code - zero) * value_at(c.scales, c.scale_item, column);
    }
  }
  Reference result;
  for (int m = 0; m < c.m; ++m) {
    std::vector<double> x(static_cast<size_t>(c.k));
    for (int k = 0; k < c.k; ++k) {
      x[static_cast<size_t>(k)] = value_at(c.x, c.x_item, int64_t{m} * c.k + k);
    }
    for (int n = 0; n < c.n; ++n) {
      const double* row = w.data() + static_cast<size_t>(n) * x.size();
      double sum = 0, magnitude = 0;
      for (size_t k = 0; k < x.size(); ++k) {
        sum += x[k] * row[k];
        magnitude += std::abs(x[k] * row[k]);
      }
      result.y.push_back(sum);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) {
    if (bytes > 0) check(cudaMalloc(&pointer_, bytes), "cudaMalloc");
  }
  explicit DeviceBytes(const Bytes& from) : DeviceBytes(from.size()) {
    if (from.empty()) return;
    check(cudaMemcpy(pointer_, from.data(), from.size(), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceBytes() { cudaFree(pointer_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  unsigned char* get() const { return static_cast<unsigned char*>(pointer_); }

 private:
  void* pointer_ = nullptr;
};

template <typename T, int kTokens>
void launch(const wgmma::Problem& problem, int n_padded, const Placement& placement) {
  const dim3 grid(static_cast<unsigned>(n_padded / 64),
                  static_cast<unsigned>((problem.m + kTokens - 1) / kTokens));
  wgmma::linear<T, kTokens><<<grid, 128>>>(problem, placement);
}

template <typename T>
void launch_for_rows(const wgmma::Problem& problem, int n_padded, const Placement& placement) {
  if (problem.m <= 8) {
    launch<T, 8>(problem, n_padded, placement);
  } else if (problem.m <= 16) {
    launch<T, 16>(problem, n_padded, placement);
  } else {
    launch<T, 64>(problem, n_padded, placement);
  }
}

std::vector<float> on_gpu(const Case& c, const Placement& placement) {
  const DeviceBytes x(c.x), qweight(c.qweight), scales(c.scales), zeros(c.zeros);
  std::vector<float> y(static_cast<size_t>(c.m) * static_cast<size_t>(c.n));
  const DeviceBytes device_y(y.size() * sizeof(float));
  check(cudaMemset(device_y.get(), 0xff, y.size() * sizeof(float)), "memset");  // NaN
  const wgmma::Problem problem{x.get(),
                               qweight.get(),
                               scales.get(),
                               zeros.get(),
                               reinterpret_cast<float*>(device_y.get()),
                               c.m,
                               c.n,
                               c.k,
                               c.k_padded(),
                               c.bits,
                               c.group_size,
                               c.scale_item};
  if (c.x_item == Item::kF16) {
    launch_for_rows<__half>(problem, c.n_padded(), placement);
  } else {
    launch_for_rows<__nv_bfloat16>(problem, c.n_padded(), placement);
  }
  check(cudaGetLastError(), "launch");
  check(cudaDeviceSynchronize(), "kernel");
  check(cudaMemcpy(y.data(), device_y.get(), y.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "copy");
  return y;
}

// Prints one line; true if every element is right: the same number in exact problems, else as near
// as k sums in float32 can be. Tensor cores cut where float32 rounds, hence 2^-23 and not 2^-24.
bool compare(const Case& c, const Placement& placement, const std::vector<float>& y,
             const std::vector<double>& expected, const std::vector<double>& magnitude) {
  double worst = 0;
  size_t wrong = 0, first_wrong = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double bound =
        c.is_exact ? 0 : (c.k + 2) * std::ldexp(magnitude[i], -23) + std::ldexp(1.0, -40);
    const double error = y[i] == expected[i] ? 0 : std::abs(y[i] - expected[i]) / bound;
    if (!(error <= 1)) {  // NaN too
      if (wrong++ == 0) first_wrong = i;
    }
    if (!(error <= worst)) worst = error;
  }
  static const char* const kNames[] = {"f16", "bf16", "f32"};
  std::printf("%-5s m %3d n %4d k %5d, %d bits, group %3d, zeros %d, x %4s, scales %4s, %s: ",
              wrong == 0 ? "ok" : "WRONG", c.m, c.n, c.k, c.bits, c.group_size, c.has_zeros,
              kNames[static_cast<int>(c.x_item)], kNames[static_cast<int>(c.scale_item)],
              placement.name);
  if (wrong == 0) {
    std::printf(c.is_exact ? "exact\n" : "%.4f of the bound\n", worst);
    return true;
  }
  const size_t n = static_cast<size_t>(c.n);
  std::printf("%zu of %zu, first row %zu feature %zu: %g, expected %g\n", wrong, y.size(),
              first_wrong / n, first_wrong % n, y[first_wrong], expected[first_wrong]);
  return false;
}

std::vector<Case> random_cases() {
  std::vector<Case> cases;
  unsigned seed = 0;
  for (const Item x_item : {Item::kF16, Item::kBF16}) {
    const auto add = [&](int m, int n, int k, int bits, int group_size, bool zeros, Item scales) {
      for (const bool exact : {true, false}) {
        cases.push_back(
            random_case(m, n, k, bits, group_size, zeros, x_item, scales, exact, ++seed));
      }
    };
    add(1, 64, 128, 4, 128, false, Item::kF16);
    add(1, 64, 128, 8, 128, false, Item::kF16);
    add(8, 100, 300, 4, 32, true, Item::kBF16);
    add(3, 1, 1, 4, 64, false, Item::kF32);
    add(16, 192, 512, 4, 64, true, Item::kF16);
    add(13, 65, 129, 4, -1, true, Item::kBF16);
    add(64, 256, 1024, 4, 128, true, Item::kF32);
    add(33, 320, 4096, 4, 128, false, Item::kF16);
    add(65, 40, 200, 8, 32, true, Item::kF16);
    add(130, 128, 384, 8, 128, true, Item::kBF16);
    add(7, 64, 256, 8, 64, false, Item::kF16);
    add(100, 320, 640, 8, -1, true, Item::kF32);
  }
  return cases;
}

bool try_random_cases() {
  bool right = true;
  for (const Case& c : random_cases()) {
    const Reference exact = reference(c);
    for (int i = 0; i < 2; ++i) {  // "plain" and "swizzled"
      const Placement& placement = wgmma::kPlacements[i];
      right &= compare(c, placement, on_gpu(c, placement), exact.y, exact.magnitude);
    }
  }
  return right;
}

bool try_descriptor_variants() {
  bool right = true;
  const Case c = random_case(64, 128, 256, 4, 64, true, Item::kF16, Item::kF16, true, 1);
  const Reference exact = reference(c);
  for (const Placement& placement : wgmma::kPlacements) {
    const bool is_right = compare(c, placement, on_gpu(c, placement), exact.y, exact.magnitude);
    right &= is_right == placement.is_right;
    std::printf("      by the manual it should be %s\n", placement.is_right ? "ok" : "wrong");
  }
  return right;
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) stop("cannot read " + path);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

void expect_size(const char* name, size_t given, size_t expected) {
  if (given == expected) return;
  stop(std::string(name) + " holds " + std::to_string(given) + " bytes, expected " +
       std::to_string(expected));
}

Item item_named(const std::string& name) {
  if (name == "f16") return Item::kF16;
  if (name == "bf16") return Item::kBF16;
  if (name == "f32") return Item::kF32;
  stop("dtype " + name + " is none of f16, bf16, f32");
}

Case case_in(const std::string& folder) {
  std::map<std::string, std::string> meta;
  std::ifstream file(folder + "/meta.txt");
  if (!file) stop("cannot read " + folder + "/meta.txt");
  for (std::string name, value; file >> name >> value;) meta[name] = value;
  const auto number = [&](const char* name) {
    if (meta.count(name) == 0) stop(std::string("meta.txt lacks ") + name);
    return std::stoi(meta[name]);
  };
  Case c{number("m"),
         number("n"),
         number("k"),
         number("bits"),
         number("group_size"),
         number("zeros") != 0,
         item_named(meta["x"]),
         item_named(meta["scales"]),
         number("exact") != 0,
         read_file(folder + "/x.bin"),
         read_file(folder + "/qweight.bin"),
         read_file(folder + "/scales.bin"),
         {},
         {}};
  if (c.x_item == Item::kF32) stop("x must be f16 or bf16");
  if (c.has_zeros) c.zeros = read_file(folder + "/zeros.bin");
  const size_t n_padded = static_cast<size_t>(c.n_padded());
  const size_t columns = static_cast<size_t>(c.groups()) * n_padded;
  const size_t elements = static_cast<size_t>(c.m) * static_cast<size_t>(c.n);
  expect_size("x.bin", c.x.size(), static_cast<size_t>(c.m) * static_cast<size_t>(c.k) * 2);
  expect_size("qweight.bin", c.qweight.size(),
              n_padded * static_cast<size_t>(c.k_padded()) * static_cast<size_t>(c.bits) / 8);
  expect_size("scales.bin", c.scales.size(), columns * item_bytes(c.scale_item));
  expect_size("zeros.bin", c.zeros.size(), c.has_zeros ? columns : 0);
  const Bytes y = read_file(folder + "/y.bin");
  const bool is_double = meta["y"] == "f64";
  expect_size("y.bin", y.size(), elements * (is_double ? 8 : 4));
  for (size_t i = 0; i < elements; ++i) {
    double value;
    if (is_double) {
      std::memcpy(&value, y.data() + 8 * i, 8);
    } else {
      value = value_at(y, Item::kF32, static_cast<int64_t>(i));
    }
    c.expected.push_back(value);
  }
  return c;
}

bool try_folder(const std::string& folder) {
  const Case c = case_in(folder);
  const Reference exact = reference(c);
  bool right = true;
  for (int i = 0; i < 2; ++i) {
    const Placement& placement = wgmma::kPlacements[i];
    const std::vector<float> y = on_gpu(c, placement);
    right &= compare(c, placement, y, exact.y, exact.magnitude);
    right &= compare(c, placement, y, c.expected, exact.magnitude);
    std::ofstream out(folder + "/out.bin", std::ios::binary);
    out.write(reinterpret_cast<const char*>(y.data()),
              static_cast<std::streamsize>(y.size() * sizeof(float)));
    if (!out.flush()) stop("cannot write " + folder + "/out.bin");
  }
  return right;
}

}  // namespace

int main(int count, char** words) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "no CUDA device");
  if (device.major != 9 || device.minor != 0) {
    stop(std::string(device.name) + " has no wgmma: compute capability 9.0 does");
  }
  bool right;
  if (count == 1) {
    right = try_random_cases();
  } else if (std::strcmp(words[1], "--descriptor-variants") == 0) {
    right = try_descriptor_variants();
  } else {
    right = true;
    for (int i = 1; i < count; ++i) right &= try_folder(words[i]);
  }
  std::printf("%s\n", right ? "ok" : "WRONG");
  return right ? 0 : 1;
}
