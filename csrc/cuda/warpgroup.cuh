// How four warps multiply together on Hopper, a step after the other of one tile: products (wgmma)
// run on while their warps make the next operands, which have two places.
//
// An instruction of another warp and a product of this multiprocessor's quarter exclude each other
// for some 8 + columns / 4 clocks of a product's columns / 2 (H200), so beside few rows of x
// instructions decide, and from 128 rows on the tensor cores.
//
// Exact: fp32 sums of each scale group are scaled and added up, as in step.cuh. Rounded: weights
// are rounded to 16 bits, scale and all, and multiplied at once; sums run through all of k.
#pragma once

#include "cuda/step.cuh"
#include "cuda/wgmma.cuh"

namespace qlinear::cuda {

// Products of `operands`, one after the other, with x from this place on.
template <typename Step, typename Dtype, int kTokenBlocks, int kBatch>
__device__ __forceinline__ void start_products(float (&sums)[kTokenBlocks][4],
                                               const uint32_t (&operands)[kBatch][4], uint32_t x,
                                               int first_k16, bool begin) {
  warpgroup_fence();
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int k16 = first_k16 + i;
    WarpgroupProduct<Dtype, kTokenBlocks>::run(
        sums, operands[i], x + (k16 / 4 * Step::kHalfBytes + k16 % 4 * 32) / 16, !begin || i > 0);
  }
  warpgroup_commit();
}

template <int kTokenBlocks>
__device__ __forceinline__ void finish_products(float (&sums)[kTokenBlocks][4]) {
  warpgroup_wait<0>();
  hold_block(sums);
}

// The most common layers: scales of x's own dtype, no zero points. They have a loop of their own,
// in which nothing is asked about that.
template <typename Dtype>
__device__ __forceinline__ bool is_plain(const StepArgs& args) {
  return !args.has_zeros && args.scale_dtype == Dtype::kDtype;
}

// Both runs take `steps` steps of one tile, one at least. `take` gives the slot of the next one
// when its bytes are there, `give_back` takes it when nothing is read there any more.
template <typename Dtype, int kBits, int kTokenBlocks, bool kPlain>
struct ExactRun {
  using Step = cuda::Step<Dtype, kBits, kTokenBlocks, 1, false, false>;
  using Format = typename Step::Format;
  using BlockSums = typename Step::BlockSums;
  using Place = typename Step::Place;
  static constexpr int kBatch = kTokenBlocks <= 4 ? 4 : 2;  // products committed together
  static constexpr int kBatches = Step::kStepK16 / kBatch;
  using Operands = uint32_t[kBatch][4];

  const Step& step;
  typename Step::Words words;
  typename Format::Zeros zeros;

  __device__ __forceinline__ explicit ExactRun(const Step& s) : step(s), zeros(s.symmetric) {
    keep(zeros.low);
    keep(zeros.high);
  }

  __device__ __forceinline__ float2 load_scales(const Place& at) const {
    if constexpr (kPlain) return scales_of(load_shared_4(at.scales), 0, Dtype::kDtype);
    typename Step::Scales scales;
    step.load_scales(scales, at, 0);
    return scales[0];
  }

  // The operands of a batch of the step at `at`.
  __device__ __forceinline__ void prepare(Operands& operands, const Place& at, int batch) {
    const int first = batch * kBatch;
    if (first % Step::kTileK16 == 0) step.load_words(words, at, 0, first / Step::kTileK16);
    if (!kPlain && batch == 0) zeros = step.exact_zeros(at, 0, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Format::operand(operands[i], &words[(first + i) % Step::kTileK16 * Format::kWords], zeros);
    }
  }

  template <typename Take, typename GiveBack>
  __device__ __forceinline__ void run(BlockSums& totals, int steps, Take take, GiveBack give_back) {
    BlockSums sums;
    Operands a[2];
    auto slot = take();
    float2 scale = load_scales(slot.at);
    prepare(a[0], slot.at, 0);
    while (true) {
      const uint32_t x = activation_descriptor(slot.at.x);
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        start_products<Step, Dtype>(sums, a[batch % 2], x, batch * kBatch, batch == 0);
        if (batch + 1 < kBatches) {
          if (batch > 0) warpgroup_wait<1>();  // for the place of the next operands
          prepare(a[(batch + 1) % 2], slot.at, batch + 1);
        }
      }
      const auto done = slot;
      float2 next_scale = {};
      const bool last = --steps == 0;
      if (!last) {
        slot = take();
        next_scale = load_scales(slot.at);
        warpgroup_wait<1>();
        prepare(a[0], slot.at, 0);
      }
      finish_products(sums);
      give_back(done);
      step.apply_scales(totals, sums, {}, scale, done.at, 0, 0);
      if (last) return;
      scale = next_scale;
    }
  }
};

// Whether weights that are rounded have a loop of their own for the most common layers.
constexpr bool has_plain_loop(int bits, int token_blocks) {
  return bits == 4 && token_blocks >= 16;
}

// Takes scales wherever their group begins, so one kernel serves groups of all sizes; but for plain
// layers of coarse groups.
template <typename Dtype, int kBits, int kTokenBlocks, bool kPlain>
struct RoundedRun {
  using Step = cuda::Step<Dtype, kBits, kTokenBlocks, 1, true, false>;
  using Format = typename Step::Format;
  using BlockSums = typename Step::BlockSums;
  using Place = typename Step::Place;
  // Products committed together; beside another loop of the same kernel there are few registers.
  static constexpr int kBatch = kPlain || !has_plain_loop(kBits, kTokenBlocks) ? 2 : 1;
  static constexpr int kBatches = Step::kStepK16 / kBatch;
  using Operands = uint32_t[kBatch][4];

  const Step& step;
  typename Step::Words words;
  typename Format::Zeros zeros;
  typename Step::Pair scales{};

  __device__ __forceinline__ explicit RoundedRun(const Step& s) : step(s), zeros(s.symmetric) {}

  __device__ __forceinline__ void prepare(Operands& operands, const Place& at, int batch) {
    const int first = batch * kBatch;
    if (first % Step::kTileK16 == 0) step.load_words(words, at, 0, first / Step::kTileK16);
    if (first == 0 || (!kPlain && first % Step::kGroupK16 == 0 && step.args.groups_per_step > 1)) {
      scales = step.load_pair(at, 0, first);
      if (!kPlain && step.args.has_zeros) zeros = step.exact_zeros(at, 0, first);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Format::operand(operands[i], &words[(first + i) % Step::kTileK16 * Format::kWords], zeros);
      scale_operand<Dtype>(operands[i], scales.low, scales.high);
    }
  }

  // A slot is given back in the step after its own, when no product reads it any more. The first
  // step stands alone: a branch around that would have the compiler make products wait.
  template <typename Take, typename GiveBack>
  __device__ __forceinline__ void run(BlockSums& totals, int steps, Take take, GiveBack give_back) {
    Operands a[2];
    auto slot = take();
    const auto run_batch = [&](int batch) {
      prepare(a[batch % 2], slot.at, batch);
      start_products<Step, Dtype>(totals, a[batch % 2], activation_descriptor(slot.at.x),
                                  batch * kBatch, false);
      warpgroup_wait<1>();
    };
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) run_batch(batch);
    while (--steps > 0) {
      const auto done = slot;
      slot = take();
      run_batch(0);
      give_back(done);
#pragma unroll
      for (int batch = 1; batch < kBatches; ++batch) run_batch(batch);
    }
    finish_products(totals);
    give_back(slot);
  }
};

}  // namespace qlinear::cuda
