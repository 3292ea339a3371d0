// The kernel on Hopper: four warps copy (feed.cuh), the others multiply, each for itself
// (mma.sync, up to 16 rows of x) or four together as a warpgroup (wgmma, 32 rows and more).
//
// A thread block's warps stand in warps_k groups of warps_n: a group takes every warps_k-th step of
// a tile. Thread blocks of a cluster share a tile's k; what each has summed meets through
// distributed shared memory, added in order of the groups and then of the blocks. The thread blocks
// of a cluster run at the same time by definition: nobody waits for one that may not be resident.
#pragma once

#include "cuda/feed.cuh"
#include "cuda/step.cuh"
#include "cuda/wgmma.cuh"

namespace qlinear::cuda {

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
struct FedKernel {
  static constexpr bool kWarpgroups = kForm == Form::kFedWarpgroups;
  static constexpr int kBlocks = partition::fed_blocks_per_warp(kTokenBlocks);
  // Beside many rows of x the sums of x cost more than they save.
  static constexpr bool kRaw = kTokenBlocks <= 2;
  using Step = cuda::Step<Dtype, kBits, kTokenBlocks, kBlocks, kFineGroups, kRaw>;
  using Format = typename Step::Format;
  using BlockSums = typename Step::BlockSums;
  using Place = typename Step::Place;
  static constexpr int kTileRows = Step::kTileRows;

  const FedArgs& args;
  unsigned char* const shared;
  const uint32_t shared_base;
  const int lane, warp_n, group;  // warp's place along n, and its group along k
  const FedWork work;
  const FedBarriers barriers;
  const int first_block;  // of the warp in the tile
  Step step;
  const Place ring;  // where this group's steps begin, as this lane reads them
  int stage = 0;     // to be read next
  int phase = 0, shared_tiles = 0;
  typename Step::Totals totals;

  __device__ __forceinline__ FedKernel(const FedArgs& a, unsigned char* dynamic_shared)
      : args(a),
        shared(dynamic_shared),
        shared_base(shared_address(dynamic_shared)),
        lane(threadIdx.x % 32),
        warp_n(uniform_warp() % a.warps_n),
        group(uniform_warp() / a.warps_n),
        work(a),
        barriers(a, shared_base),
        first_block(min(warp_n * kBlocks, a.tile_blocks - kBlocks)),
        step(a.step, threadIdx.x % 32),
        ring(ring_places()) {}

  __device__ __forceinline__ int threads() const { return args.warps_n * args.warps_k * 32; }

  __device__ __forceinline__ Place ring_places() const {
    const partition::FedMemory& memory = args.memory;
    const int slot = group * args.stages;
    Place at = step.lane_offsets(first_block);
    at.x = shared_base + slot * memory.x_slot;
    at.codes += shared_base + memory.codes + slot * memory.code_slot;
    at.scales += shared_base + memory.scales + slot * memory.scale_slot;
    at.zeros += shared_base + memory.zeros + slot * memory.zero_slot;
    // Registers, and not worked out again for each step.
    asm volatile("" : "+r"(at.codes), "+r"(at.scales), "+r"(at.zeros));
    return at;
  }

  // Where the bytes of this step lie.
  __device__ __forceinline__ Place place() const {
    const partition::FedMemory& memory = args.memory;
    return {ring.x + stage * memory.x_slot, ring.codes + stage * memory.code_slot,
            ring.scales + stage * memory.scale_slot, ring.zeros + stage * memory.zero_slot};
  }

  // Four warps together, an n-block each. Products run on while their warps make the next operands,
  // which have two places; more warpgroups fill the time in which one waits and scales.
  static constexpr int kBatch = kFineGroups || kTokenBlocks == 8 ? 2 : 4;  // committed together

  __device__ __forceinline__ void run_by_warpgroup(const Place& at) {
    static_assert(!kWarpgroups || (kBlocks == 1 && !Format::kOffset), "see Step::run");
    const uint32_t x = activation_descriptor(at.x);
    BlockSums sums;
    uint32_t a[2][kBatch][4];
    typename Step::Words words;
    typename Step::Scales scales;
#pragma unroll
    for (int first = 0; first < Step::kStepK16; first += Step::kGroupK16) {
      step.load_scales(scales, at, first);
      const auto zeros = step.exact_zeros(at, 0, first);
#pragma unroll
      for (int batch = first; batch < first + Step::kGroupK16; batch += kBatch) {
        if (batch % Step::kTileK16 == 0) step.load_words(words, at, 0, batch / Step::kTileK16);
        if (batch >= first + 2 * kBatch) warpgroup_wait<1>();  // that of the operands' last use
        uint32_t (&operands)[kBatch][4] = a[batch / kBatch % 2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          Format::operand(operands[i], &words[(batch + i) % Step::kTileK16 * Format::kWords],
                          zeros);
        }
        warpgroup_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int k16 = batch + i;
          WarpgroupProduct<Dtype, kTokenBlocks>::run(
              sums, operands[i], x + (k16 / 4 * Step::kHalfBytes + k16 % 4 * 32) / 16,
              k16 != first);
        }
        warpgroup_commit();
      }
      warpgroup_wait<0>();
      hold_block(sums);
      step.apply_scales(totals[0], sums, {}, scales[0], at, 0, first);
    }
  }

  // Writes this warp's totals where the thread block adds them up.
  __device__ __forceinline__ void store_totals() {
    const int partial_row = args.memory.partial_row;
    float* to = partials() + group * kTileRows * partial_row + lane / 4;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int block = first_block + j;
      if (block < warp_n * kBlocks) continue;  // the warp before has it, too
#pragma unroll
      for (int token = 0; token < kTokenBlocks; ++token) {
#pragma unroll
        for (int i = 0; i < 4;
             ++i) {  // sums of a lane: rows g, g, g + 8, g + 8 of W; x rows 2t + i
          const int x_row = token * kTokens + lane % 4 * 2 + i % 2;
          to[x_row * partial_row + block * layout::kTileN + i / 2 * 8] =
              totals[j][token][i] * Step::unit(i);
        }
      }
    }
  }

  __device__ __forceinline__ float* partials() const {
    return reinterpret_cast<float*>(shared + args.memory.partials);
  }

  // The groups' totals of four columns, added in order.
  __device__ __forceinline__ float4 add_groups(int row, int four) const {
    const float* from = partials() + row * args.memory.partial_row + four * 4;
    float4 sum = *reinterpret_cast<const float4*>(from);
    const int stride = kTileRows * args.memory.partial_row;
#pragma unroll 4
    for (int other = 1; other < args.warps_k; ++other) {
      add(sum, *reinterpret_cast<const float4*>(from + other * stride));
    }
    return sum;
  }
  __device__ __forceinline__ void block_barrier() const { named_barrier(0, threads()); }

  // Calls visit(row, four) for every four columns of the tile's rows, a warp's lanes side by side.
  template <typename Visit>
  __device__ __forceinline__ void for_each_four(int rows, int fours, Visit visit) const {
    if (fours <= 0) return;
    const int warps = args.warps_n * args.warps_k;
    int row = 0, first = (warp_n + group * args.warps_n) * 32;
    while (true) {
      for (; first >= fours; first -= (fours + 31) / 32 * 32) ++row;
      if (row >= rows) return;
      if (first + lane < fours) visit(row, first + lane);
      first += warps * 32;
    }
  }

  __device__ __forceinline__ void finish_tile(int tile) {
    int n_tile = tile, m_tile = 0;
    if (args.m_tiles > 1) {
      n_tile = tile / args.m_tiles;
      m_tile = tile - n_tile * args.m_tiles;
    }
    const int row0 = m_tile * kTileRows, rows = min(args.m - row0, kTileRows);
    const int n0 = n_tile * args.tile_blocks * layout::kTileN;
    const int fours = args.tile_blocks * (layout::kTileN / 4);
    store_totals();
    block_barrier();
    if (args.cluster == 1) {
      for_each_four(rows, fours, [&](int row, int four) {
        store_results(args.output, row0 + row, n0 + four * 4, add_groups(row, four));
      });
    } else {
      share_sums(row0, rows, n0, fours);
    }
    block_barrier();  // the partials' memory is free for the next tile
  }

  // Each thread block of the cluster adds up some of the columns: the others send theirs there.
  // Nobody can be two tiles ahead of another, as each waits for all: two places for what arrives
  // are enough.
  __device__ __forceinline__ void share_sums(int row0, int rows, int n0, int fours) {
    const partition::FedMemory& memory = args.memory;
    const int parity = shared_tiles % 2, part_fours = memory.received_fours;  // one tile: place 0
    const int part_bytes = kTileRows * part_fours * 16;
    const uint32_t barrier = barriers.summed + parity * 8;
    const uint32_t place = shared_base + memory.received + parity * args.cluster * part_bytes;
    const int mine = max(0, min(part_fours, fours - work.rank * part_fours));
    if (threadIdx.x == 0) barrier_expect(barrier, args.cluster * rows * mine * 16);
    for_each_four(rows, fours, [&](int row, int four) {
      int owner = 0, at = four;
      for (; at >= part_fours; at -= part_fours) ++owner;
      const uint32_t to = place + work.rank * part_bytes + (row * part_fours + at) * 16;
      send_cluster_16(cluster_address(to, owner), add_groups(row, four),
                      cluster_address(barrier, owner));
    });
    // Where several tiles follow each other, also those wait for all that have no columns to add.
    const int other = static_cast<int>(threadIdx.x);
    if (memory.places > 1 && other < args.cluster && other != work.rank) {
      cluster_arrive(cluster_address(barrier, other));
    }
    barrier_wait(barrier, shared_tiles / 2 % 2);
    for_each_four(rows, mine, [&](int row, int four) {
      const uint32_t from = place + (row * part_fours + four) * 16;
      float4 sum = load_float4(from);
#pragma unroll 4
      for (int rank = 1; rank < args.cluster; ++rank) {
        add(sum, load_float4(from + rank * part_bytes));
      }
      store_results(args.output, row0 + row, n0 + (work.rank * part_fours + four) * 4, sum);
    });
    ++shared_tiles;
  }

  __device__ __forceinline__ void multiply() {
    int ahead = group;  // steps are dealt to the groups in turn, through tiles
    for (int tile = work.first_tile; tile < args.tiles; tile += work.tile_stride) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) Step::clear(totals[j]);
      int next = work.first_step + ahead;
      for (; next < work.end_step; next += args.warps_k) {
        const int slot = group * args.stages + stage;
        barrier_wait(barriers.full + slot * 8, phase);
        if constexpr (kWarpgroups) {
          run_by_warpgroup(place());
        } else {
          step.run(totals, place());
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.free + slot * 8);
        if (++stage == args.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
      ahead = next - work.end_step;
      finish_tile(tile);
    }
  }

  // What the end of a tile will ask of the arguments, so that it does not wait for them then.
  __device__ __forceinline__ void fetch_constants() const {
    asm volatile("" ::"l"(args.output.y), "l"(args.output.bias), "r"(args.m),
                 "r"(args.output.y_dtype), "r"(args.memory.received));
  }

  // The copying warps set up what they need and begin; the others meet them before they look at a
  // barrier.
  __device__ __forceinline__ void run() {
    enum { kStart = 1, kCopyStart };
    if (threadIdx.x >= threads()) {
      give_registers<partition::kCopyRegisters>();
      const int copy_warp = uniform_warp() - threads() / 32;
      if (lane == 0) {
        prefetch_map(copy_warp == 0   ? &args.code_map
                     : copy_warp == 1 ? &args.scale_map
                                      : &args.x_map);
        barriers.init(args, copy_warp);
      }
      __syncwarp();
      named_barrier(kCopyStart, partition::kCopyThreads);
      named_barrier_arrive(kStart, threads() + partition::kCopyThreads);
      if (args.cluster > 1) cluster_started();
      release_next_kernel();
      if (lane == 0 && copy_warp < partition::kFeeders) {
        CopyWarp<kTokenBlocks>(args, barriers, shared_base, copy_warp).run();
      }
    } else {
      take_registers<partition::fed_registers(kTokenBlocks)>();
      named_barrier(kStart, threads() + partition::kCopyThreads);
      if (args.cluster > 1) cluster_started();
      release_next_kernel();
      fetch_constants();
      if (args.cluster > 1) cluster_all_started();
      if (args.dependent) wait_for_previous_kernel();  // before anything is written
      multiply();
    }
  }
};

template <typename Dtype, int kBits, int kTokenBlocks, bool kFineGroups, Form kForm>
__global__ void __launch_bounds__(partition::fed_bound(kTokenBlocks), 1)
    linear_fed(const __grid_constant__ FedArgs args) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // the planner knows which devices can run it
#else
  extern __shared__ __align__(1024) unsigned char fed_shared[];
  FedKernel<Dtype, kBits, kTokenBlocks, kFineGroups, kForm>(args, fed_shared).run();
#endif
}

}  // namespace qlinear::cuda
