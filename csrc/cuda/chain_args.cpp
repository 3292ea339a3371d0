// From a chain of products to what its kernel is handed.
#include <algorithm>

#include "cuda/chain_kernels.h"
#include "cuda/fed_args.h"
#include "cuda/plan.h"
#include "cuda/tensor_map.h"

namespace qlinear::cuda {
namespace {

using partition::kStepK;

constexpr int kPieceK = partition::kHalfRowBytes / 2;

int blocks_of(const ql_linear_params& params) {
  return static_cast<int>(padded_n(params) / layout::kTileN);
}

bool one_group(const ql_linear_params& params) { return params.group_size == -1; }

// Whether the kernel can compute this product at all.
bool fits(const ql_linear_params& params) {
  return check_problem(params) == QL_OK && is_multiple(params.qweight, layout::kAlignBytes) &&
         is_multiple(params.scales, layout::kVectorBytes) && params.m >= 1 &&
         params.m <= partition::kChainMostRows && params.n > 0 && params.k > 0 &&
         params.k % kPieceK == 0 && params.bits == 4 &&
         (one_group(params) || params.group_size == kStepK) && params.zeros == nullptr &&
         params.scale_dtype == compute_dtype(params) && x_can_be_copied(params) &&
         params.qweight != nullptr && params.x != nullptr && params.y != nullptr &&
         params.scales != nullptr;
}

struct Bytes {
  uintptr_t begin, end;
};
bool overlap(const Bytes& one, const Bytes& other) {
  return one.begin < other.end && other.begin < one.end;
}
Bytes rows_of(const void* data, int64_t m, int64_t stride, int64_t columns, int dtype) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>(((m - 1) * stride + columns) * item_bytes(dtype))};
}
Bytes read_by(const ql_linear_params& p) {
  return rows_of(p.x, p.m, p.x_row_stride, p.k, p.x_dtype);
}
Bytes written_by(const ql_linear_params& p) {
  return rows_of(p.y, p.m, p.y_row_stride, p.n, p.y_dtype);
}

// Whether a product reads what one before it writes, or writes what one of them reads or writes.
bool must_wait(const ql_linear_params* params, int place) {
  const Bytes read = read_by(params[place]), written = written_by(params[place]);
  return std::any_of(params, params + place, [&](const ql_linear_params& before) {
    return overlap(read, written_by(before)) || overlap(written, written_by(before)) ||
           overlap(written, read_by(before));
  });
}

bool describe_weights(const ql_linear_params& params, int blocks, const ChainLayer& layer,
                      TensorMap& codes, TensorMap& scales) {
  if (blocks == 0) return true;
  const int64_t k_padded = layout::round_up(params.k, layout::kPadK);
  constexpr int kStepBytes = partition::code_bytes(layout::kTileN, 4), kWord = 8;
  const auto n_blocks = static_cast<cuuint64_t>(layer.n_blocks);
  const auto box = static_cast<cuuint32_t>(blocks);
  const auto steps = static_cast<cuuint32_t>(layer.slot.steps);
  const Array of_codes = {
      CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
      params.qweight,
      3,
      {kStepBytes / kWord, n_blocks, static_cast<cuuint64_t>(k_padded / kStepK)},
      {static_cast<cuuint64_t>(layout::kTileN * k_padded / 2), kStepBytes},
      {kStepBytes / kWord, box, steps},
      CU_TENSOR_MAP_SWIZZLE_NONE};
  const int item = item_bytes(params.scale_dtype);
  const auto groups = static_cast<cuuint64_t>(layout::group_count(k_padded, params.group_size));
  const auto group_bytes = static_cast<cuuint64_t>(layout::kTileN * item);
  const Array of_scales = {
      item == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      params.scales,
      3,
      {layout::kTileN, n_blocks, groups},
      {groups * group_bytes, group_bytes},
      {layout::kTileN, box, one_group(params) ? 1 : steps},
      CU_TENSOR_MAP_SWIZZLE_NONE};
  return describe(of_codes, codes) && describe(of_scales, scales);
}

bool describe_rows(const ql_linear_params& params, int steps, TensorMap& map) {
  // The stride of a single row means nothing, and may be anything.
  const int64_t stride =
      params.m > 1 ? params.x_row_stride : layout::round_up(params.k, layout::kPadK);
  const auto m = static_cast<cuuint64_t>(params.m);
  return describe({CU_TENSOR_MAP_DATA_TYPE_UINT16,
                   params.x,
                   3,
                   {kPieceK, m, static_cast<cuuint64_t>(params.k / kPieceK)},
                   {static_cast<cuuint64_t>(stride) * 2, kPieceK * 2},
                   {kPieceK, static_cast<cuuint32_t>(m), static_cast<cuuint32_t>(2 * steps)},
                   CU_TENSOR_MAP_SWIZZLE_128B},
                  map);
}

// Sizes of a layer; `steps` of a slot.
void cut(const ql_linear_params& params, int ctas, int steps, ChainLayer& layer) {
  const int item = item_bytes(params.scale_dtype), m = static_cast<int>(params.m);
  layer.n_blocks = blocks_of(params);
  layer.tiles = partition::chain_tiles(layer.n_blocks, ctas);
  layer.slot = partition::chain_slot(m, layer.tiles.tile_blocks, steps, one_group(params), item);
  layer.slots = (static_cast<int>(tile_steps(params)) + steps - 1) / steps;
  layer.group = layer.tiles.warps_n * steps;
  layer.in_flight = std::max(2, partition::kChainBytesInFlight / layer.slot.code_bytes);
  layer.fours_log2 = 2;
  while (1 << layer.fours_log2 < layer.tiles.tile_blocks * (layout::kTileN / 4)) ++layer.fours_log2;
  layer.copies_at_once = partition::chain_copies_at_once(m, layer.tiles.tile_blocks);
  layer.scale_bytes = one_group(params) ? 0 : layout::kTileN * item;
  layer.slot_groups = one_group(params) ? 0 : steps;
}

bool fill_layer(const ql_linear_params& params, ChainLayer& layer) {
  layer.output = output_of(params);
  for (int smaller = 0; smaller < 2; ++smaller) {
    if (!describe_weights(params, layer.tiles.tile_blocks - smaller, layer, layer.codes[smaller],
                          layer.scales[smaller])) {
      return false;
    }
  }
  return describe_rows(params, layer.slot.steps, layer.x);
}

}  // namespace

int chain_length(const ql_linear_params* params, int count, const ql_cuda_device& device) {
  // The thread block with the largest share of a layer takes so many times the mean, at most: below
  // that layers are better cut along k, too, one by one.
  constexpr double kMostUneven = 1.12;
  if (device.major != 9) return 0;
  double bytes = 0, largest = 0;
  int length = 0;
  for (; length < std::min(count, partition::kChainLayers); ++length) {
    const ql_linear_params& next = params[length];
    if (!fits(next) || next.m != params[0].m || next.x_dtype != params[0].x_dtype) break;
    const int blocks = blocks_of(next), ctas = device.sm_count;
    bytes += static_cast<double>(blocks) * static_cast<double>(next.k) / ctas;
    largest += (blocks + ctas - 1) / ctas * static_cast<double>(next.k);
  }
  return length >= 2 && largest <= kMostUneven * bytes ? length : 0;
}

bool chain_args(const ql_linear_params* params, int count, const ql_cuda_device& device,
                void* workspace, ChainArgs& args) {
  args = ChainArgs{};
  args.count = count;
  args.m = static_cast<int>(params[0].m);
  // As large as the largest layer's slots of one step; others have as many steps as fit.
  int slot_bytes = partition::kChainLeastSlotBytes;
  for (int i = 0; i < count; ++i) {
    cut(params[i], device.sm_count, 1, args.layers[i]);
    slot_bytes = std::max(slot_bytes, args.layers[i].slot.total);
  }
  args.memory = partition::chain_memory(args.m, slot_bytes, device.shared_bytes_per_block);
  for (int i = 0; i < count; ++i) {
    ChainLayer& layer = args.layers[i];
    const int steps = partition::chain_steps(args.m, layer.tiles, one_group(params[i]),
                                             item_bytes(params[i].scale_dtype), slot_bytes);
    cut(params[i], device.sm_count, steps, layer);
    layer.waits = i > 0 && must_wait(params, i);
    if (!fill_layer(params[i], layer)) return false;
  }
  // Behind the counters of tiles, of which there are not so many.
  args.ended = static_cast<int*>(workspace) + partition::kCounterBytes / sizeof(int) - 1;
  args.finished = args.ended - partition::kChainLayers;
  return true;
}

}  // namespace qlinear::cuda
