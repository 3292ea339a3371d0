// The GPU half of the host contract: which devices there are, how a product is cut into work (the
// plan), and launches that neither allocate, synchronise nor read anything back. Plain C; the
// structs it shares with the CPU stand in linear_params.h, the mirror in kernels/cuda_abi.py.
//
// A workspace is a piece of device memory of ql_cuda_workspace_bytes() bytes. Set it to zero once;
// every launch leaves its counters at zero. Launches that may run at the same time need one each:
// one per stream. After a failed launch set it to zero again.
#pragma once

#include <stdint.h>

#include "linear_params.h"

#ifdef __cplusplus
extern "C" {
#endif

// What kernels and plans need to know of a device.
typedef struct ql_cuda_device {
  char name[256];
  int32_t major, minor;            // compute capability
  int32_t sm_count;                // streaming multiprocessors
  int32_t shared_bytes_per_block;  // with opt-in
  int32_t shared_bytes_per_sm;
  int32_t l2_bytes;
  int32_t driver_version;   // CUDA version of the driver, 1000 * major + 10 * minor
  int32_t runtime_version;  // CUDA version that this library was built with
  int32_t supported;        // 1: this library holds machine code for the device
  int32_t reserved;
  int64_t memory_bytes;
} ql_cuda_device;

// How y[m, n] is cut. Filled by ql_cuda_plan(); may be changed for tuning and in tests.
typedef struct ql_cuda_plan {
  int32_t token_blocks;  // blocks of 8 rows of x that one tile holds: 1, 2, 4 or 8; with copy_warp
                         // 1 or 2; with that and warpgroups 4, 8, 16 or, for 4 bits, 24
  int32_t warpgroups;    // 1: multiply by warpgroups (Hopper only, and only with copy_warp)
  int32_t warps_n;       // warps of a thread block side by side along n, 32 columns each; with
                         // copy_warp up to 64, with warpgroups 16
  int32_t warps_k;       // groups of such warps that share out the k steps of a tile
  int32_t stages;        // steps that each warp's ring holds, 2 to 4, or with copy_warp 2 to 8
  int32_t ctas;          // thread blocks
  int32_t whole_tiles;   // 1: no tile is split between thread blocks
  int32_t m_tiles, n_tiles;
  int32_t shared_bytes;  // dynamic shared memory of a thread block
  int32_t kernel;        // index of the kernel, see ql_cuda_kernel_name()
  int32_t copy_warp;     // 1: four warps more copy for all, by the copy engine of Hopper;
                         // left out where rows of x are fp32 or not 16-byte aligned
  int32_t tile_blocks;  // with copy_warp: blocks of 16 output features of a tile, 4 to 4 * warps_n;
                        // with warpgroups 1 to warps_n
  int32_t cluster;      // with copy_warp: thread blocks that share a tile's k, 1 to 8
  int64_t workspace_bytes;  // how much of the workspace this plan uses
} ql_cuda_plan;

enum {
  QL_CUDA_BATCH_INVARIANT = 1,  // a row's result depends on neither m nor the other rows
  QL_CUDA_DEPENDENT = 2,        // programmatic dependent launch: the weights are fetched before
                                // the kernel in front of this one has ended (sm_90 and later)
};

typedef struct ql_cuda_launch {
  int32_t device;   // CUDA ordinal; need not be the current device
  int32_t flags;    // QL_CUDA_...
  void* stream;     // cudaStream_t of that device; null is its default stream
  void* workspace;  // see above; 256-byte aligned
  int64_t workspace_bytes;
  void* start_event;         // cudaEvent_t, recorded right before and right after the kernels by
  void* stop_event;          // this very call; null: not recorded
  const ql_cuda_plan* plan;  // null: the one that ql_cuda_plan() gives
} ql_cuda_launch;

// Devices that the driver shows; 0 where there is no driver.
int ql_cuda_device_count(void);
int ql_cuda_device_info(int device, ql_cuda_device* out);

// The plan for this problem (only m, n, k, bits, group_size and dtypes are read; pointers may be
// null) on a device described by `device`: a pure function that needs no GPU. Of the description
// only compute capability, sm_count and shared memory count; QL_BAD_DESCRIPTION if no GPU has such.
int ql_cuda_plan_linear(const ql_linear_params* params, const ql_cuda_device* device, int flags,
                        ql_cuda_plan* out);

// The next three are pure, too, need no GPU, and are in the CPU library as well.

// What ql_cuda_plan_linear() weighs, in its order: it takes the first of the least microseconds, a
// model's that is fitted to an H200. Writes at most `capacity` plans and times, and to `count` how
// many there are.
int ql_cuda_plan_candidates(const ql_linear_params* params, const ql_cuda_device* device, int flags,
                            int64_t capacity, ql_cuda_plan* plans, double* microseconds,
                            int64_t* count);

// Fills what follows from the rest of a plan: tiles, shared memory, kernel, workspace. QL_BAD_PLAN
// and why in `fault`, which may be null, if it cannot run; the plan is then as it was.
int ql_cuda_complete_plan(const ql_linear_params* params, const ql_cuda_device* device,
                          ql_cuda_plan* plan, const char** fault);

// How many of `count` products, from the first on, ql_cuda_linear_chain() computes in one launch on
// such a device: 2 to 8, or 0 for none. If that has no plans, no QL_CUDA_BATCH_INVARIANT and a
// workspace, that is. Of pointers only alignment counts, and which of them are null.
int ql_cuda_chain_length(const ql_linear_params* params, int count, const ql_cuda_device* device);

// Bytes that suffice for every plan of ql_cuda_plan_linear() on any device.
int64_t ql_cuda_workspace_bytes(void);

// y = x * W^T + bias. All pointers of `params` are device memory. m = 0 launches nothing.
int ql_cuda_linear(const ql_linear_params* params, const ql_cuda_launch* launch);

// `count` products (256 at most) one after the other on one stream: on one x, or each on what one
// before it wrote; nothing but x may be a result of the chain. Those of ql_cuda_chain_length() are
// one launch, if the process has all of the device, whose sums have another order
// than those of single calls: the same bits every time, within rounding of theirs. Others give
// every bit of single calls: all but the first are launched as with QL_CUDA_DEPENDENT, so their
// weights are fetched while the one in front still runs. Events of `launch` are recorded before the
// first and after the last; its plan must be null, `plans` holds one for each, null for the
// library's own, or is null. The first that cannot be launched ends the chain. Can be captured.
int ql_cuda_linear_chain(const ql_linear_params* params, const ql_cuda_plan* const* plans,
                         int count, const ql_cuda_launch* launch);

// The same recorded once, to be launched as one graph as often as wanted: with the pointers, plans
// and workspace of then, so one launch of it at a time. Workspaces and streams must outlive it. The
// launch takes device, stream and events.
int ql_cuda_record_chain(const ql_linear_params* params, const ql_cuda_plan* const* plans,
                         int count, const ql_cuda_launch* launch, void** chain);
int ql_cuda_launch_chain(void* chain, const ql_cuda_launch* launch);
void ql_cuda_free_chain(void* chain);

// out[m, i] = x[m, permutation[i]] on the device; takes device, stream and events of `launch`.
int ql_cuda_gather(const ql_gather_params* params, const ql_cuda_launch* launch);

// out[n_count, k] of out_dtype: the weights of features n_begin .. n_begin + n_count - 1 (n_begin a
// multiple of 16), rounded once from their exact product in float32.
int ql_cuda_dequantize(const ql_linear_params* params, int64_t n_begin, int64_t n_count,
                       int out_dtype, void* out, const ql_cuda_launch* launch);

// Reads `bytes` (a multiple of 16) of device memory once, as fast as the device can. Which of the
// read kernels runs is `variant`, 0 to ql_cuda_read_variants() - 1: the fastest depends on the
// size.
int ql_cuda_read_probe(const void* buffer, int64_t bytes, int variant, void* sink,
                       const ql_cuda_launch* launch);
int ql_cuda_read_variants(void);

// An empty kernel: what a pair of events around it measures, measured times contain as well.
int ql_cuda_empty(const ql_cuda_launch* launch);

// ---- Batches whose rows lie in host memory ----

// Rows of one call, one after the other in memory that ql_cuda_register() has registered, or that
// CUDA has pinned itself.
typedef struct ql_cuda_part {
  void* rows;  // host address of the first
  int64_t count;
} ql_cuda_part;

// Rows of a batch on both sides.
typedef struct ql_cuda_rows {
  const ql_cuda_part* parts;   // [parts_count], read before the call returns
  uint64_t* table;             // pinned, [m], left alone until the kernel has ended; null if m is
                               // at most ql_cuda_inline_rows()
  const int32_t* permutation;  // [columns] in device memory, each in 0 .. columns - 1, or null:
                               // column i of `device_rows` is column permutation[i] of the parts
  void* device_rows;           // [m, columns]
  int64_t parts_count;
  int64_t m, columns;    // rows of all parts together
  int64_t row_stride;    // of device_rows, in elements; rows of a part have no gaps
  int32_t host_dtype;    // ql_dtype of the parts
  int32_t device_dtype;  // the same, or for a gather of QL_F32 also QL_F16 or QL_BF16
  int32_t most_blocks;   // thread blocks of the kernel, so that it shares few multiprocessors with
                         // products; 0: as many as it takes
  int32_t reserved;
} ql_cuda_rows;

// device_rows = the rows of all parts: permuted, rounded to nearest. One launch. A permutation
// needs columns * item bytes of shared memory, else QL_BAD_SHAPE.
int ql_cuda_gather_rows(const ql_cuda_rows* rows, const ql_cuda_launch* launch);

// The rows of all parts = device_rows, of one dtype and without a permutation. One launch.
int ql_cuda_scatter_rows(const ql_cuda_rows* rows, const ql_cuda_launch* launch);

// Rows for which addresses travel with the launch and no table is needed.
int ql_cuda_inline_rows(void);

// Lets kernels of `device` read and write host memory that stays where it is until
// ql_cuda_unregister(). QL_BAD_DEVICE where kernels would need other addresses than the host.
// Several devices may register the same memory; it is let go of when all have unregistered it.
int ql_cuda_register(void* memory, int64_t bytes, int device);
int ql_cuda_unregister(void* memory, int device);

// One batch on its way: rows in, product, rows out. The three may be on three streams, or on one,
// where an event may stand for two: in_stop for launch.start_event, launch.stop_event for
// out_start. Without the three events that begin a step nothing is timed, and the others only keep
// the order: on an H200 that takes 4 us of a batch less, if they were made without timing.
//
// Or several products on the rows of one x: a chain (ql_cuda_linear_chain()) whose results go out
// in one copy. Its products have the same x, m and k; the results of each are gapless and lie
// behind those of the one before it. The events around the product are around all of them.
typedef struct ql_cuda_batch {
  ql_cuda_rows x;                   // device_rows is product->x
  ql_cuda_rows y;                   // device_rows is product->y
  const ql_linear_params* product;  // [products_count]
  void* x_host;  // pinned [m, k], gapless, where all rows lie already: copied; null: gathered
  void* y_host;  // pinned [m, n], gapless: the results are copied there; null: to the parts of y.
                 // Of several products all of device memory from the first result to the last
  void *in_stream, *out_stream;
  void *in_start, *in_stop, *out_start, *out_stop;  // events
  ql_cuda_launch launch;                            // of the product, with its events
  void* after;  // an event that the product waits for, too, before its first one; null: none
  int32_t copies_parts;    // 1: results go to the parts of y by the copy engine, one copy for each
                           // (see ql_cuda_copies_parts()); 0: by a kernel
  int32_t products_count;  // 0 and 1: one
  const ql_cuda_plan* const* plans;  // of several products, as ql_cuda_linear_chain() takes them;
                                     // launch.plan is then null
} ql_cuda_batch;

// Whether the copy engine of `device` takes many copies in one call: in a library of CUDA 13.
int ql_cuda_copies_parts(int device);

// Puts a batch on its way without waiting for any of it. After a failure nothing of the steps
// behind it was asked for, so that results were written nowhere; but after QL_PART_WRITTEN, of
// copies_parts alone, some may have been.
int ql_cuda_run_batch(const ql_cuda_batch* batch);

// Waits until the rows are out, for at most `nanoseconds`, or for as long as it takes without
// keeping a core busy if that is negative. `done` says whether they are; then `took` holds the
// nanoseconds of each of the three steps, -1 where nothing was timed.
int ql_cuda_wait_batch(const ql_cuda_batch* batch, int64_t nanoseconds, int32_t* done,
                       int64_t* took);

// Kernels in this library, and the name of each: form, dtype, bits and groups, for logs and tests.
int ql_cuda_kernel_count(void);
const char* ql_cuda_kernel_name(int kernel);

// The last QL_CUDA_ERROR or QL_BAD_PLAN of the calling thread in one sentence, naming operation and
// shape; never null.
const char* ql_cuda_error_text(void);

// Architectures of the machine code inside, e.g. "80 86 89 90a".
const char* ql_cuda_architectures(void);

// Sizes of the structs, for callers in other languages to compare with their own.
int ql_cuda_device_bytes(void);
int ql_cuda_plan_bytes(void);
int ql_cuda_launch_bytes(void);
int ql_cuda_batch_bytes(void);

// As in linear_params.h, so that either library can be loaded alone.
const char* ql_status_text(int status);
int ql_layout_version(void);
int ql_linear_params_bytes(void);
int ql_gather_params_bytes(void);

#ifdef __cplusplus
}
#endif
