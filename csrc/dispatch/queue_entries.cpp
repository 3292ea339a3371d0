// The queue through its C interface, for the tests that compare it with its specification.
#include "dispatch/queue.h"

struct ql_queue {
  explicit ql_queue(const ql_queue_limits& limits) : queue(limits) {}
  qlinear::dispatch::Queue queue;
  qlinear::dispatch::Batch batch;
};

namespace {

// The queue decides before it is known how many parts a caller has room for: those of one batch
// never exceed the items that wait. Here nothing runs: what does not wait is forgotten.
int64_t copy_parts(ql_queue& queue, int64_t capacity, ql_item_part* parts) {
  int64_t count = 0;
  for (const auto& part : queue.batch.parts) {
    if (count < capacity) parts[count++] = {part.item().sequence, part.start, part.rows};
    if (part.entry->is_gone) queue.queue.release(part.entry);
  }
  return count;
}

}  // namespace

extern "C" {

ql_queue* ql_queue_new(const ql_queue_limits* limits) { return new ql_queue(*limits); }
void ql_queue_free(ql_queue* queue) { delete queue; }

double ql_queue_admit(ql_queue* queue, const ql_descriptor* items, int64_t count) {
  return queue->queue.admit(items, count);
}

void ql_queue_cancel(ql_queue* queue, uint64_t sequence) {
  if (queue->queue.cancel(sequence)) queue->queue.release(queue->queue.find(sequence));
}

int ql_queue_has_begun(const ql_queue* queue, uint64_t sequence) {
  return queue->queue.has_begun(sequence);
}

int64_t ql_queue_rows(const ql_queue* queue) { return queue->queue.rows(); }
double ql_queue_next_expiry(ql_queue* queue) { return queue->queue.next_expiry(); }

int64_t ql_queue_expire(ql_queue* queue, double now, int64_t capacity, uint64_t* dropped,
                        uint8_t* late) {
  std::vector<qlinear::dispatch::Dropped> found;
  queue->queue.expire(now, static_cast<size_t>(capacity), found);
  for (size_t i = 0; i < found.size(); ++i) {
    dropped[i] = found[i].entry->item.sequence;
    late[i] = found[i].is_late;
    queue->queue.release(found[i].entry);
  }
  return static_cast<int64_t>(found.size());
}

double ql_queue_wait_end(const ql_queue* queue, double now) { return queue->queue.wait_end(now); }

int64_t ql_queue_take(ql_queue* queue, double now, int64_t capacity, ql_item_part* parts) {
  queue->queue.take(now, queue->batch);
  return copy_parts(*queue, capacity, parts);
}

int64_t ql_queue_take_together(ql_queue* queue, const uint64_t* sequences, int64_t count,
                               ql_item_part* parts) {
  std::vector<qlinear::dispatch::Entry*> entries;
  for (int64_t i = 0; i < count; ++i) entries.push_back(queue->queue.find(sequences[i]));
  queue->queue.take_together(entries, queue->batch);
  return copy_parts(*queue, count, parts);
}

}  // extern "C"
