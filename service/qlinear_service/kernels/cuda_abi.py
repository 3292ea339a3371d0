"""Python mirror of csrc/linear_cuda.h: its structs, flags and functions, the same names and order.

Loads nothing and allocates nothing. The loader compares sizes with the library's own; a test
compares every offset with what a compiler makes of the header.
"""

import ctypes
from enum import IntEnum, IntFlag

from qlinear_service.kernels import layout
from qlinear_service.kernels.abi import GatherParams, LinearParams

__all__ = [
    "FUNCTIONS",
    "PLANNER_FUNCTIONS",
    "WORKSPACE_ALIGN_BYTES",
    "CudaBatch",
    "CudaDevice",
    "CudaFlag",
    "CudaLaunch",
    "CudaPart",
    "CudaPlan",
    "CudaRows",
    "Status",
    "declare",
    "expected_sizes",
    "sizes",
]

WORKSPACE_ALIGN_BYTES = 256


class Status(IntEnum):
    """What every function that can fail returns: ql_status in csrc/linear_params.h."""

    OK = 0
    BAD_SHAPE = 1
    BAD_BITS = 2
    BAD_GROUP_SIZE = 3
    BAD_DTYPE = 4
    NULL_POINTER = 5
    OUT_OF_MEMORY = 6
    BAD_BODY = 7
    MISALIGNED = 8
    NO_DEVICE = 9
    BAD_DEVICE = 10
    BAD_PLAN = 11
    WORKSPACE = 12
    CUDA_ERROR = 13
    BAD_DESCRIPTION = 14
    PART_WRITTEN = 15


class CudaFlag(IntFlag):
    """Flags of plans and launches: QL_CUDA_... in csrc/linear_cuda.h."""

    NONE = 0
    BATCH_INVARIANT = 1
    DEPENDENT = 2


class CudaDevice(ctypes.Structure):
    """Mirror of ql_cuda_device."""

    _fields_ = [
        ("name", ctypes.c_char * 256),
        *((name, ctypes.c_int32) for name in ("major", "minor", "sm_count")),
        *((name, ctypes.c_int32) for name in ("shared_bytes_per_block", "shared_bytes_per_sm")),
        *((name, ctypes.c_int32) for name in ("l2_bytes", "driver_version", "runtime_version")),
        *((name, ctypes.c_int32) for name in ("supported", "reserved")),
        ("memory_bytes", ctypes.c_int64),
    ]


class CudaPlan(ctypes.Structure):
    """Mirror of ql_cuda_plan."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("token_blocks", "warpgroups", "warps_n", "warps_k")),
        *((name, ctypes.c_int32) for name in ("stages", "ctas", "whole_tiles", "m_tiles")),
        *((name, ctypes.c_int32) for name in ("n_tiles", "shared_bytes", "kernel", "copy_warp")),
        *((name, ctypes.c_int32) for name in ("tile_blocks", "cluster")),
        ("workspace_bytes", ctypes.c_int64),
    ]


class CudaLaunch(ctypes.Structure):
    """Mirror of ql_cuda_launch."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("device", "flags")),
        *((name, ctypes.c_void_p) for name in ("stream", "workspace")),
        ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("start_event", "stop_event")),
        ("plan", ctypes.POINTER(CudaPlan)),
    ]


class CudaPart(ctypes.Structure):
    """Mirror of ql_cuda_part."""

    _fields_ = [("rows", ctypes.c_void_p), ("count", ctypes.c_int64)]


class CudaRows(ctypes.Structure):
    """Mirror of ql_cuda_rows; `parts` is the address of an array of CudaPart."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parts", "table", "permutation", "device_rows")),
        *((name, ctypes.c_int64) for name in ("parts_count", "m", "columns", "row_stride")),
        *((name, ctypes.c_int32) for name in ("host_dtype", "device_dtype")),
        *((name, ctypes.c_int32) for name in ("most_blocks", "reserved")),
    ]


class CudaBatch(ctypes.Structure):
    """Mirror of ql_cuda_batch."""

    _fields_ = [
        ("x", CudaRows),
        ("y", CudaRows),
        ("product", ctypes.POINTER(LinearParams)),
        *((name, ctypes.c_void_p) for name in ("x_host", "y_host", "in_stream", "out_stream")),
        *((name, ctypes.c_void_p) for name in ("in_start", "in_stop", "out_start", "out_stop")),
        *(("launch", CudaLaunch), ("after", ctypes.c_void_p)),
        *((name, ctypes.c_int32) for name in ("copies_parts", "products_count")),
        ("plans", ctypes.POINTER(ctypes.POINTER(CudaPlan))),
    ]


_LINEAR = ctypes.POINTER(LinearParams)
_LAUNCH = ctypes.POINTER(CudaLaunch)
_DEVICE = ctypes.POINTER(CudaDevice)
_PLAN = ctypes.POINTER(CudaPlan)
_PLANS = ctypes.POINTER(_PLAN)
_TIMES = ctypes.POINTER(ctypes.c_double)
_COUNT = ctypes.POINTER(ctypes.c_int64)
_ROWS = ctypes.POINTER(CudaRows)
_BATCH = ctypes.POINTER(CudaBatch)

Functions = dict[str, tuple[type | None, tuple[type, ...]]]

PLANNER_FUNCTIONS: Functions = {
    "ql_cuda_plan_candidates": (
        ctypes.c_int,
        (_LINEAR, _DEVICE, ctypes.c_int, ctypes.c_int64, _PLAN, _TIMES, _COUNT),
    ),
    "ql_cuda_complete_plan": (
        ctypes.c_int,
        (_LINEAR, _DEVICE, _PLAN, ctypes.POINTER(ctypes.c_char_p)),
    ),
    "ql_cuda_chain_length": (ctypes.c_int, (_LINEAR, ctypes.c_int, _DEVICE)),
    "ql_status_text": (ctypes.c_char_p, (ctypes.c_int,)),
}
"""What the CPU library holds, too: planning needs no GPU."""

FUNCTIONS: Functions = {
    "ql_cuda_device_count": (ctypes.c_int, ()),
    "ql_cuda_device_info": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(CudaDevice))),
    "ql_cuda_plan_linear": (
        ctypes.c_int,
        (_LINEAR, ctypes.POINTER(CudaDevice), ctypes.c_int, ctypes.POINTER(CudaPlan)),
    ),
    **PLANNER_FUNCTIONS,
    "ql_cuda_workspace_bytes": (ctypes.c_int64, ()),
    "ql_cuda_linear": (ctypes.c_int, (_LINEAR, _LAUNCH)),
    "ql_cuda_linear_chain": (ctypes.c_int, (_LINEAR, _PLANS, ctypes.c_int, _LAUNCH)),
    "ql_cuda_record_chain": (
        ctypes.c_int,
        (_LINEAR, _PLANS, ctypes.c_int, _LAUNCH, ctypes.POINTER(ctypes.c_void_p)),
    ),
    "ql_cuda_launch_chain": (ctypes.c_int, (ctypes.c_void_p, _LAUNCH)),
    "ql_cuda_free_chain": (None, (ctypes.c_void_p,)),
    "ql_cuda_gather": (ctypes.c_int, (ctypes.POINTER(GatherParams), _LAUNCH)),
    "ql_cuda_dequantize": (
        ctypes.c_int,
        (_LINEAR, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, _LAUNCH),
    ),
    "ql_cuda_read_probe": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, _LAUNCH),
    ),
    "ql_cuda_read_variants": (ctypes.c_int, ()),
    "ql_cuda_empty": (ctypes.c_int, (_LAUNCH,)),
    "ql_cuda_gather_rows": (ctypes.c_int, (_ROWS, _LAUNCH)),
    "ql_cuda_scatter_rows": (ctypes.c_int, (_ROWS, _LAUNCH)),
    "ql_cuda_inline_rows": (ctypes.c_int, ()),
    "ql_cuda_register": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)),
    "ql_cuda_unregister": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "ql_cuda_run_batch": (ctypes.c_int, (_BATCH,)),
    "ql_cuda_wait_batch": (
        ctypes.c_int,
        (_BATCH, ctypes.c_int64, ctypes.POINTER(ctypes.c_int32), _COUNT),
    ),
    "ql_cuda_kernel_count": (ctypes.c_int, ()),
    "ql_cuda_kernel_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "ql_cuda_error_text": (ctypes.c_char_p, ()),
    "ql_cuda_architectures": (ctypes.c_char_p, ()),
    "ql_cuda_device_bytes": (ctypes.c_int, ()),
    "ql_cuda_plan_bytes": (ctypes.c_int, ()),
    "ql_cuda_launch_bytes": (ctypes.c_int, ()),
    "ql_cuda_batch_bytes": (ctypes.c_int, ()),
    "ql_cuda_copies_parts": (ctypes.c_int, (ctypes.c_int,)),
    "ql_layout_version": (ctypes.c_int, ()),
    "ql_linear_params_bytes": (ctypes.c_int, ()),
    "ql_gather_params_bytes": (ctypes.c_int, ()),
}
"""Result and arguments of every function of the header."""


def declare(library: ctypes.CDLL, functions: Functions = FUNCTIONS) -> ctypes.CDLL:
    """Tell ctypes the types of `functions`, by default all of the header, and return `library`.

    Raises:
        AttributeError: the library lacks one of them.
    """
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def sizes(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the layout version of a declared library and the sizes of its structs."""
    return (
        library.ql_layout_version(),
        library.ql_linear_params_bytes(),
        library.ql_gather_params_bytes(),
        library.ql_cuda_device_bytes(),
        library.ql_cuda_plan_bytes(),
        library.ql_cuda_launch_bytes(),
        library.ql_cuda_batch_bytes(),
    )


def expected_sizes() -> tuple[int, ...]:
    """Return what `sizes` must return for this mirror."""
    structs = (LinearParams, GatherParams, CudaDevice, CudaPlan, CudaLaunch, CudaBatch)
    return (layout.VERSION, *(ctypes.sizeof(struct) for struct in structs))
