// The dispatcher: what waits for which layer, which of it is computed together, and what sends
// batches to a device and tells how they ended. Plain C; the mirror stands in
// dispatch/abi.py. One producer hands in descriptors, one consumer takes completions; times are
// seconds of the monotonic clock.
#pragma once

#include <stdint.h>

#include "linear_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  QL_CALL_GOES_ON = 1,  // the next sequence number is of the same call: another layer on the same x
  QL_RESULT_FITS = 2,   // the slot holds the result, too, and nobody else reads its activations
};

// One layer's work for one call, 64 bytes: what a front end puts into its ring.
typedef struct ql_descriptor {
  uint64_t sequence;    // unique; smaller is older
  uint64_t generation;  // of the slot: who owns it
  uint64_t client;      // whose call it is, for sharing evenly
  double enqueued_at;
  double deadline;  // not to be computed at or after this; infinity: none
  uint32_t slot;    // where its activations begin in the slab, in units of the smallest slot
  uint32_t layer;
  int32_t rows;  // 1 or more
  uint32_t bytes;
  int32_t priority;  // larger goes first
  uint8_t x_dtype, y_dtype;
  uint16_t flags;  // QL_...
} ql_descriptor;

// Rows `start` to `start + rows` of one item.
typedef struct ql_item_part {
  uint64_t sequence;
  int32_t start, rows;
} ql_item_part;

// What batches of a layer cost: scheduling.Pace.
typedef struct ql_pace {
  int32_t sweet_rows, chunk_rows, most_rows, sizes_count;
  double row_seconds;
  const int32_t* sizes;        // [sizes_count], ascending
  const double* size_seconds;  // [sizes_count]
  const double* seconds;       // [max_batch_rows + 1], by rows
} ql_pace;

typedef struct ql_queue_limits {
  int64_t max_batch_rows;
  double max_age_seconds;
  double max_wait_seconds;
  int32_t paces_count, layers_count;
  const ql_pace* paces;          // copied
  const int32_t* pace_of_layer;  // [layers_count]
} ql_queue_limits;

// ---- The queue alone, with every time handed in: what tests compare with batching.WorkQueue ----

typedef struct ql_queue ql_queue;
ql_queue* ql_queue_new(const ql_queue_limits* limits);
void ql_queue_free(ql_queue* queue);
double ql_queue_admit(ql_queue* queue, const ql_descriptor* items, int64_t count);
void ql_queue_cancel(ql_queue* queue, uint64_t sequence);
int ql_queue_has_begun(const ql_queue* queue, uint64_t sequence);
int64_t ql_queue_rows(const ql_queue* queue);
double ql_queue_next_expiry(ql_queue* queue);  // infinity: never
// Sequences of what was dropped, past its deadline if `late`; at most `capacity` at a time.
int64_t ql_queue_expire(ql_queue* queue, double now, int64_t capacity, uint64_t* dropped,
                        uint8_t* late);
double ql_queue_wait_end(const ql_queue* queue, double now);
// The parts of the next batch; 0: nothing waits.
int64_t ql_queue_take(ql_queue* queue, double now, int64_t capacity, ql_item_part* parts);
int64_t ql_queue_take_together(ql_queue* queue, const uint64_t* sequences, int64_t count,
                               ql_item_part* parts);

// ---- The dispatcher ----

typedef struct ql_dispatch ql_dispatch;

// What the dispatcher must know of a layer to send its batches to the device itself.
typedef struct ql_dispatch_layer {
  ql_linear_params product;    // without activations
  const int32_t* permutation;  // on the device, or null
  int32_t form;                // layers of one form have the same plans
  int32_t is_direct;           // 0: all its batches are the host's
} ql_dispatch_layer;

// The buffers of one batch in flight.
typedef struct ql_dispatch_stage {
  void *x, *y;  // on the device
  int64_t x_bytes, y_bytes;
  uint64_t* table;  // pinned, [2][table_rows]
  void *in_start, *in_stop, *kernel_start, *kernel_stop, *out_start, *out_stop;
  void *in_done, *kernel_done, *out_done;  // made without timing: of batches that are not timed
} ql_dispatch_stage;

typedef struct ql_dispatch_options {
  ql_queue_limits queue;
  const ql_dispatch_layer* layers;  // [queue.layers_count]
  const ql_dispatch_stage* stages;  // at least most_running
  int32_t stages_count;
  int32_t most_running;      // batches with the device at a time
  int32_t most_chained;      // beyond that, for more layers of the same calls
  int32_t table_rows;        // most rows of a batch that goes to the device itself
  int32_t spins;             // threads that keep a core busy while batches run: 1 sends them and
                             // sees how they end, or 2 share that; 0: two that sleep meanwhile
  int32_t starts_lone;       // 1: whoever hands in a call while nothing runs starts it
  int32_t done_fd;           // an eventfd that is written to when completions wait; -1: none
  int32_t row_blocks;        // of the kernels that move rows, both together, of a batch that is not
                             // alone; 0: as many as they take
  int32_t timed_each;        // of so many batches of a layer that are not alone one is timed, of
                             // those that are every one; 0 and 1: all are
  int32_t copied_row_bytes;  // rows of results that are so long or longer go out by the copy
                             // engine, unless a batch is alone; 0: none do
  double idle_spin_seconds;  // with `spins`: how long they look for more before they sleep
  char* slab;
  int64_t slot_unit_bytes;
  void *in_stream, *out_stream;
  ql_cuda_launch launch;  // of products
  ql_cuda_launch second;  // another stream of the same device with a workspace of its own: of those
                          // that may run beside others every other one; a null stream: none
  int (*run)(const ql_cuda_batch*);
  int (*wait)(const ql_cuda_batch*, int64_t, int32_t*, int64_t*);
  const char* (*error_text)(void);
} ql_dispatch_options;

enum {
  QL_ITEM_DONE = 1,     // its results lie in its slot
  QL_ITEM_LATE = 2,     // its deadline passed before it ran
  QL_ITEM_OLD = 3,      // it waited longer than may be
  QL_ITEM_LEFT = 4,     // nothing of it waits or runs any more
  QL_BATCH_DONE = 5,    // followed by the QL_ITEM_DONE of its `count` items
  QL_BATCH_HOST = 6,    // a batch for the host to compute, followed by its `count` QL_ITEM_PART
  QL_BATCH_FAILED = 7,  // the same for one that failed before results were written anywhere
  QL_BATCH_GONE = 8,    // the same for one that failed when results may lie over activations
  QL_ITEM_PART = 9,
};

// What the consumer is told, 64 bytes.
typedef struct ql_completion {
  uint64_t sequence;  // of an item, or the number of a batch
  uint64_t batch;
  // Of a batch that was not timed the first is what the layer's last one took that was, and the
  // others are -1.
  int64_t kernel_nanoseconds, in_nanoseconds, out_nanoseconds;
  double seconds;  // of an item: waited before it first ran; of a batch: when it began
  int32_t rows;    // of the batch, or of the part
  int32_t start;   // of a part; of a batch: how many items follow
  int32_t layer;
  uint8_t kind;     // QL_ITEM_... or QL_BATCH_...
  uint8_t is_last;  // of an item: neither queue nor device will touch its slot again; of a
                    // QL_BATCH_HOST: 0 if the batch that is told of next, a QL_BATCH_HOST, too, is
                    // of another layer of the same calls, so that both may be computed together
  uint16_t status;  // ql_status of a batch that failed
} ql_completion;

// Null if a thread cannot be made. What the options point to must outlive it, but for the queue's
// part and the stages themselves.
ql_dispatch* ql_dispatch_new(const ql_dispatch_options* options);

// Ends the threads after what runs, at most so many seconds later; 0: it does not end, and nothing
// may be freed.
int ql_dispatch_stop(ql_dispatch* dispatch, double seconds);
void ql_dispatch_free(ql_dispatch* dispatch);  // after a stop

// How products of so many rows of layers of a form are cut.
void ql_dispatch_plan(ql_dispatch* dispatch, int32_t form, int x_dtype, int y_dtype, int64_t rows,
                      const ql_cuda_plan* plan);

// Hands in the items of whole calls. The producer alone.
void ql_dispatch_submit(ql_dispatch* dispatch, const ql_descriptor* items, int64_t count);

// Takes what has ended, at most `capacity`. The consumer alone.
int64_t ql_dispatch_drain(ql_dispatch* dispatch, ql_completion* out, int64_t capacity);

// Takes an item back, or what of it has not begun to run. 1: its slot is free; 0: its last
// completion is still to come, or has come.
int ql_dispatch_cancel(ql_dispatch* dispatch, uint64_t sequence);
int ql_dispatch_has_begun(ql_dispatch* dispatch, uint64_t sequence);

// Says that the host computes a batch in one with another one, so that it takes no place among
// those that may run.
void ql_dispatch_host_joins(ql_dispatch* dispatch, uint64_t batch);

// Ends a batch that the host has computed, or given up.
void ql_dispatch_host_done(ql_dispatch* dispatch, uint64_t batch);

// Rows that have left the queue since the start, by layer, and at [layers_count] of all; read them
// as atomics.
const int64_t* ql_dispatch_rows_left(const ql_dispatch* dispatch);

// When the oldest batch that runs on the device began; 0: none does.
double ql_dispatch_oldest(const ql_dispatch* dispatch);

// Of the last batch that failed; valid until the next call.
const char* ql_dispatch_error_text(ql_dispatch* dispatch);

int ql_descriptor_bytes(void);
int ql_completion_bytes(void);
int ql_dispatch_options_bytes(void);

#ifdef __cplusplus
}
#endif
