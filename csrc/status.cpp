// Status texts, the layout version and the sizes that callers check; part of both libraries.
#include "layout.h"
#include "linear_params.h"

extern "C" const char* ql_status_text(int status) {
  switch (status) {
    case QL_OK:
      return "ok";
    case QL_BAD_SHAPE:
      return "a size is negative, too large or, for a plan, 0; or a row stride is shorter than "
             "a row";
    case QL_BAD_BITS:
      return "bits is neither 4 nor 8";
    case QL_BAD_GROUP_SIZE:
      return "group_size is none of -1, 32, 64, 128";
    case QL_BAD_DTYPE:
      return "a dtype or element size is not supported";
    case QL_NULL_POINTER:
      return "a required pointer is null";
    case QL_OUT_OF_MEMORY:
      return "a scratch buffer could not be allocated";
    case QL_BAD_BODY:
      return "this processor cannot run that body, or not for these bits";
    case QL_MISALIGNED:
      return "qweight does not start at a multiple of 64 bytes";
    case QL_NO_DEVICE:
      return "there is no such CUDA device, or no driver that this library can use";
    case QL_BAD_DEVICE:
      return "this library holds no kernels for that GPU's architecture";
    case QL_BAD_PLAN:
      return "no kernel can run this plan for this problem on this device";
    case QL_WORKSPACE:
      return "the workspace is null, misaligned or smaller than the plan needs";
    case QL_CUDA_ERROR:
      return "a CUDA call failed";
    case QL_PART_WRITTEN:
      return "a CUDA call failed when some results may have been written";
    case QL_BAD_DESCRIPTION:
      return "no GPU is as described: compute capability, multiprocessors (65536 at most) and "
             "shared memory must be above 0, a thread block's no more than a multiprocessor's";
    default:
      return "unknown status";
  }
}

extern "C" int ql_layout_version(void) { return qlinear::layout::kVersion; }
extern "C" int ql_linear_params_bytes(void) { return sizeof(ql_linear_params); }
extern "C" int ql_gather_params_bytes(void) { return sizeof(ql_gather_params); }
