// The dispatcher through its C interface.
#include <new>
#include <system_error>

#include "dispatch/core.h"

struct ql_dispatch {
  explicit ql_dispatch(const ql_dispatch_options& options) : core(options) {}
  qlinear::dispatch::Core core;
};

extern "C" {

ql_dispatch* ql_dispatch_new(const ql_dispatch_options* options) {
  std::unique_ptr<ql_dispatch> made;
  try {
    made = std::make_unique<ql_dispatch>(*options);
    made->core.start();
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
  return made.release();
}

int ql_dispatch_stop(ql_dispatch* dispatch, double seconds) { return dispatch->core.stop(seconds); }
void ql_dispatch_free(ql_dispatch* dispatch) { delete dispatch; }

void ql_dispatch_plan(ql_dispatch* dispatch, int32_t form, int x_dtype, int y_dtype, int64_t rows,
                      const ql_cuda_plan* plan) {
  dispatch->core.add_plan(form, x_dtype, y_dtype, rows, *plan);
}

void ql_dispatch_submit(ql_dispatch* dispatch, const ql_descriptor* items, int64_t count) {
  dispatch->core.submit(items, count);
}

int64_t ql_dispatch_drain(ql_dispatch* dispatch, ql_completion* out, int64_t capacity) {
  return dispatch->core.drain(out, capacity);
}

int ql_dispatch_cancel(ql_dispatch* dispatch, uint64_t sequence) {
  return dispatch->core.cancel(sequence);
}

int ql_dispatch_has_begun(ql_dispatch* dispatch, uint64_t sequence) {
  return dispatch->core.has_begun(sequence);
}

void ql_dispatch_host_joins(ql_dispatch* dispatch, uint64_t batch) {
  dispatch->core.host_joins(batch);
}

void ql_dispatch_host_done(ql_dispatch* dispatch, uint64_t batch) {
  dispatch->core.host_done(batch);
}

const int64_t* ql_dispatch_rows_left(const ql_dispatch* dispatch) {
  return dispatch->core.rows_left();
}

double ql_dispatch_oldest(const ql_dispatch* dispatch) { return dispatch->core.oldest(); }
const char* ql_dispatch_error_text(ql_dispatch* dispatch) { return dispatch->core.error_text(); }

int ql_descriptor_bytes(void) { return sizeof(ql_descriptor); }
int ql_completion_bytes(void) { return sizeof(ql_completion); }
int ql_dispatch_options_bytes(void) { return sizeof(ql_dispatch_options); }

}  // extern "C"
