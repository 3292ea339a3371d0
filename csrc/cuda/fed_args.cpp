// What the fed forms are handed: sizes of a step's pieces, and maps for the copy engine.
#include "cuda/fed_args.h"

#include "cuda/plan.h"
#include "cuda/tensor_map.h"

namespace qlinear::cuda {
namespace {

// Something per n-block in its own row: codes, scales or zero points.
bool describe_rows(CUtensorMapDataType type, int item_bytes, const void* data, int64_t columns,
                   int64_t n_blocks, int box_columns, int tile_blocks, TensorMap& map) {
  return describe({type,
                   data,
                   2,
                   {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(n_blocks)},
                   {static_cast<cuuint64_t>(columns * item_bytes)},
                   {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(tile_blocks)},
                   CU_TENSOR_MAP_SWIZZLE_NONE},
                  map);
}

// x in the 128-byte swizzle: the 64-wide pieces of a step in one box, or, where k is no multiple of
// 64, one by one, so that what lies beyond k is zero and not the next row.
bool describe_x(const ql_linear_params& params, int rows, int box_k, TensorMap& map) {
  constexpr cuuint64_t kPiece = partition::kHalfRowBytes / 2;
  // The stride of a single row means nothing, and may be anything.
  const int64_t stride =
      params.m > 1 ? params.x_row_stride : layout::round_up(params.k, layout::kPadK);
  const auto k = static_cast<cuuint64_t>(params.k), m = static_cast<cuuint64_t>(params.m);
  const auto box_rows = static_cast<cuuint32_t>(rows);
  const auto pieces = static_cast<cuuint32_t>(box_k / static_cast<int>(kPiece));
  Array x = {CU_TENSOR_MAP_DATA_TYPE_UINT16,
             params.x,
             3,
             {kPiece, m, k / kPiece},
             {static_cast<cuuint64_t>(stride) * 2, kPiece * 2},
             {kPiece, box_rows, pieces},
             CU_TENSOR_MAP_SWIZZLE_128B};
  if (pieces == 1) {
    x.sizes[0] = k;
    x.sizes[2] = 1;
  }
  return describe(x, map);
}

}  // namespace

Output output_of(const ql_linear_params& params) {
  Output output{};
  output.y = static_cast<unsigned char*>(params.y);
  output.bias = static_cast<const unsigned char*>(params.bias);
  output.y_row_stride = params.y_row_stride;
  output.n = static_cast<int>(params.n);
  output.y_dtype = params.y_dtype;
  output.bias_dtype = params.bias_dtype;
  output.y_vector = is_multiple(params.y, 4 * int64_t{item_bytes(params.y_dtype)}) &&
                    params.y_row_stride % 4 == 0;
  return output;
}

StepArgs step_args(const ql_linear_params& params) {
  StepArgs step{};
  step.groups_per_step = partition::groups_per_step(params.group_size);
  step.group_shift = params.group_size == 32 ? 1 : params.group_size == 64 ? 2 : 3;
  step.scale_dtype = params.scale_dtype;
  step.symmetric_zero = 1 << (params.bits - 1);
  step.has_zeros = params.zeros != nullptr;
  return step;
}

bool fed_args(const ql_linear_params& params, const ql_cuda_plan& plan, FedArgs& args) {
  constexpr int kWord = 8;  // bytes of what the engine takes for an element of the codes
  const int64_t k_padded = layout::round_up(params.k, layout::kPadK);
  const int64_t n_blocks = layout::round_up(params.n, layout::kPadN) / layout::kTileN;
  const int64_t group_columns = layout::group_count(k_padded, params.group_size) * layout::kTileN;
  constexpr int kStep = partition::kStepK;
  const int scale_bytes = item_bytes(params.scale_dtype);
  const bool has_zeros = params.zeros != nullptr;
  args = FedArgs{};
  args.memory = partition::fed_memory(fed_geometry(plan), params.bits, params.group_size,
                                      scale_bytes, has_zeros);
  args.warps_n = plan.warps_n;
  args.warps_k = plan.warps_k;
  args.stages = plan.stages;
  args.cluster = plan.cluster;
  args.tiles = plan.m_tiles * plan.n_tiles;
  args.m_tiles = plan.m_tiles;
  args.tile_blocks = plan.tile_blocks;
  args.tile_steps = static_cast<int>((k_padded + kStep - 1) / kStep);
  args.code_columns = layout::kTileN * kStep * params.bits / 8 / kWord;
  args.step = step_args(params);
  const int box_columns = args.step.groups_per_step * layout::kTileN;
  args.group_columns = params.group_size == -1 ? 0 : box_columns;
  args.scale_box_bytes = plan.tile_blocks * box_columns * scale_bytes;
  args.zero_box_bytes = has_zeros ? plan.tile_blocks * box_columns : 0;
  args.x_boxes =
      params.k % (partition::kHalfRowBytes / 2) == 0 ? 1 : kStep / (partition::kHalfRowBytes / 2);
  args.m = static_cast<int>(params.m);
  // n / by for n * by below 2^32, by at least 2.
  const auto divider = [](int by) {
    return by < 2 ? 0u : static_cast<uint32_t>(0xffffffffu / static_cast<uint32_t>(by) + 1);
  };
  args.by_fours = divider(plan.tile_blocks * (layout::kTileN / 4));
  args.by_part_fours = divider(args.memory.received_fours);
  args.output = output_of(params);
  args.direct =
      plan.warpgroups != 0 && plan.cluster == 1 && plan.warps_k == 1 && args.output.y_vector;
  return describe_x(params, plan.token_blocks * partition::kTokens, kStep / args.x_boxes,
                    args.x_map) &&
         describe_rows(CU_TENSOR_MAP_DATA_TYPE_FLOAT64, kWord, params.qweight,
                       layout::kTileN * k_padded * params.bits / 8 / kWord, n_blocks,
                       args.code_columns, plan.tile_blocks, args.code_map) &&
         describe_rows(
             scale_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
             scale_bytes, params.scales, group_columns, n_blocks, box_columns, plan.tile_blocks,
             args.scale_map) &&
         (!has_zeros || describe_rows(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, params.zeros, group_columns,
                                      n_blocks, box_columns, plan.tile_blocks, args.zero_map));
}

}  // namespace qlinear::cuda
