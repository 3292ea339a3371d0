"""Python mirror of csrc/linear_dispatch.h: the same names and order, and how ctypes calls it."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any

from qlinear_service.errors import BuildError
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaLaunch, CudaPlan, Functions, declare
from qlinear_service.scheduling import Pace, unmeasured

__all__ = [
    "NEVER",
    "Completion",
    "Descriptor",
    "DispatchLayer",
    "DispatchOptions",
    "DispatchStage",
    "Flag",
    "ItemPart",
    "Kind",
    "PaceStruct",
    "QueueLimits",
    "declared",
    "dispatching",
    "limits_of",
]


NEVER = math.inf
"""The deadline of an item that has none."""


class Flag(IntFlag):
    """Flags of a descriptor."""

    CALL_GOES_ON = 1
    RESULT_FITS = 2


class Kind(IntEnum):
    """What a completion tells: QL_ITEM_... and QL_BATCH_..."""

    ITEM_DONE = 1
    ITEM_LATE = 2
    ITEM_OLD = 3
    ITEM_LEFT = 4
    BATCH_DONE = 5
    BATCH_HOST = 6
    BATCH_FAILED = 7
    BATCH_GONE = 8
    ITEM_PART = 9


class Descriptor(ctypes.Structure):
    """Mirror of ql_descriptor."""

    FORMAT = "=QQQddIIiIiBBH"
    """The same for `struct`, which fills one in a tenth of the time."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("sequence", "generation", "client")),
        *((name, ctypes.c_double) for name in ("enqueued_at", "deadline")),
        *((name, ctypes.c_uint32) for name in ("slot", "layer")),
        *(("rows", ctypes.c_int32), ("bytes", ctypes.c_uint32), ("priority", ctypes.c_int32)),
        *((name, ctypes.c_uint8) for name in ("x_dtype", "y_dtype")),
        ("flags", ctypes.c_uint16),
    ]


class Completion(ctypes.Structure):
    """Mirror of ql_completion."""

    FORMAT = "=QQqqqdiiiBBH"

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("sequence", "batch")),
        *((f"{name}_nanoseconds", ctypes.c_int64) for name in ("kernel", "in", "out")),
        ("seconds", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("rows", "start", "layer")),
        *(("kind", ctypes.c_uint8), ("is_last", ctypes.c_uint8), ("status", ctypes.c_uint16)),
    ]


class ItemPart(ctypes.Structure):
    """Mirror of ql_item_part."""

    _fields_ = [
        ("sequence", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("start", "rows")),
    ]


class PaceStruct(ctypes.Structure):
    """Mirror of ql_pace."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("sweet_rows", "chunk_rows", "most_rows")),
        *(("sizes_count", ctypes.c_int32), ("row_seconds", ctypes.c_double)),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.POINTER(ctypes.c_double)) for name in ("size_seconds", "seconds")),
    ]


class QueueLimits(ctypes.Structure):
    """Mirror of ql_queue_limits."""

    _fields_ = [
        ("max_batch_rows", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("max_age_seconds", "max_wait_seconds")),
        *((name, ctypes.c_int32) for name in ("paces_count", "layers_count")),
        ("paces", ctypes.POINTER(PaceStruct)),
        ("pace_of_layer", ctypes.POINTER(ctypes.c_int32)),
    ]


class DispatchLayer(ctypes.Structure):
    """Mirror of ql_dispatch_layer."""

    _fields_ = [
        *(("product", LinearParams), ("permutation", ctypes.c_void_p)),
        *((name, ctypes.c_int32) for name in ("form", "is_direct")),
    ]


class DispatchStage(ctypes.Structure):
    """Mirror of ql_dispatch_stage."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("x_bytes", "y_bytes")),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("in_start", "in_stop", "kernel_start")),
        *((name, ctypes.c_void_p) for name in ("kernel_stop", "out_start", "out_stop")),
        *((name, ctypes.c_void_p) for name in ("in_done", "kernel_done", "out_done")),
    ]


class DispatchOptions(ctypes.Structure):
    """Mirror of ql_dispatch_options."""

    _fields_ = [
        ("queue", QueueLimits),
        ("layers", ctypes.POINTER(DispatchLayer)),
        ("stages", ctypes.POINTER(DispatchStage)),
        *((name, ctypes.c_int32) for name in ("stages_count", "most_running", "most_chained")),
        *((name, ctypes.c_int32) for name in ("table_rows", "spins", "starts_lone", "done_fd")),
        *((name, ctypes.c_int32) for name in ("row_blocks", "timed_each", "copied_row_bytes")),
        ("idle_spin_seconds", ctypes.c_double),
        *(("slab", ctypes.c_void_p), ("slot_unit_bytes", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("in_stream", "out_stream")),
        *(("launch", CudaLaunch), ("second", CudaLaunch)),
        *((name, ctypes.c_void_p) for name in ("run", "wait", "error_text")),
    ]


_HANDLE = ctypes.c_void_p
_ITEMS = ctypes.c_void_p  # of descriptors, packed by `struct`
_PARTS = ctypes.POINTER(ItemPart)
_SEQUENCES = ctypes.POINTER(ctypes.c_uint64)

QUEUE_FUNCTIONS: Functions = {
    "ql_queue_new": (_HANDLE, (ctypes.POINTER(QueueLimits),)),
    "ql_queue_free": (None, (_HANDLE,)),
    "ql_queue_admit": (ctypes.c_double, (_HANDLE, _ITEMS, ctypes.c_int64)),
    "ql_queue_cancel": (None, (_HANDLE, ctypes.c_uint64)),
    "ql_queue_has_begun": (ctypes.c_int, (_HANDLE, ctypes.c_uint64)),
    "ql_queue_rows": (ctypes.c_int64, (_HANDLE,)),
    "ql_queue_next_expiry": (ctypes.c_double, (_HANDLE,)),
    "ql_queue_expire": (
        ctypes.c_int64,
        (_HANDLE, ctypes.c_double, ctypes.c_int64, _SEQUENCES, ctypes.POINTER(ctypes.c_uint8)),
    ),
    "ql_queue_wait_end": (ctypes.c_double, (_HANDLE, ctypes.c_double)),
    "ql_queue_take": (ctypes.c_int64, (_HANDLE, ctypes.c_double, ctypes.c_int64, _PARTS)),
    "ql_queue_take_together": (ctypes.c_int64, (_HANDLE, _SEQUENCES, ctypes.c_int64, _PARTS)),
}


DISPATCH_FUNCTIONS: Functions = {
    "ql_dispatch_new": (_HANDLE, (ctypes.POINTER(DispatchOptions),)),
    "ql_dispatch_stop": (ctypes.c_int, (_HANDLE, ctypes.c_double)),
    "ql_dispatch_free": (None, (_HANDLE,)),
    "ql_dispatch_plan": (
        None,
        (
            *(_HANDLE, ctypes.c_int32, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
            ctypes.POINTER(CudaPlan),
        ),
    ),
    "ql_dispatch_submit": (None, (_HANDLE, _ITEMS, ctypes.c_int64)),
    "ql_dispatch_drain": (ctypes.c_int64, (_HANDLE, ctypes.c_void_p, ctypes.c_int64)),
    "ql_dispatch_cancel": (ctypes.c_int, (_HANDLE, ctypes.c_uint64)),
    "ql_dispatch_has_begun": (ctypes.c_int, (_HANDLE, ctypes.c_uint64)),
    "ql_dispatch_host_joins": (None, (_HANDLE, ctypes.c_uint64)),
    "ql_dispatch_host_done": (None, (_HANDLE, ctypes.c_uint64)),
    "ql_dispatch_rows_left": (ctypes.POINTER(ctypes.c_int64), (_HANDLE,)),
    "ql_dispatch_oldest": (ctypes.c_double, (_HANDLE,)),
    "ql_dispatch_error_text": (ctypes.c_char_p, (_HANDLE,)),
    "ql_descriptor_bytes": (ctypes.c_int, ()),
    "ql_completion_bytes": (ctypes.c_int, ()),
    "ql_dispatch_options_bytes": (ctypes.c_int, ()),
}


def limits_of(
    layers: Sequence[str],
    paces: Mapping[str, Pace],
    *,
    max_batch_rows: int,
    max_age_seconds: float,
    max_wait_seconds: float = 0.0,
) -> QueueLimits:
    """Return what a native queue must know; what it points to lives as long as it does.

    Args:
        layers: full names, by the numbers that descriptors have for them.
        paces: of those that were measured.
        max_batch_rows: most rows of one batch.
        max_age_seconds: longest wait of an item that has not begun to run.
        max_wait_seconds: longest wait for more rows while nothing runs.
    """
    general = unmeasured(max_batch_rows)
    of_layers = [paces.get(name, general) for name in layers]
    distinct = list({id(pace): pace for pace in of_layers}.values())
    places = {id(pace): place for place, pace in enumerate(distinct)}
    structs, kept = (PaceStruct * len(distinct))(), []
    for struct, pace in zip(structs, distinct, strict=True):
        kept.append(_fill(struct, pace, max_batch_rows))
    numbers = (ctypes.c_int32 * len(layers))(*(places[id(pace)] for pace in of_layers))
    limits = QueueLimits(
        max_batch_rows=max_batch_rows,
        max_age_seconds=max_age_seconds,
        max_wait_seconds=max_wait_seconds,
        paces_count=len(distinct),
        layers_count=len(layers),
        paces=structs,
        pace_of_layer=numbers,
    )
    limits.kept = kept
    return limits


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return `library` with the functions of the queue declared.

    Raises:
        AttributeError: it has none.
    """
    return declare(library, QUEUE_FUNCTIONS)


def dispatching(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return `library`, a GPU's, with the functions of the dispatcher declared.

    Raises:
        BuildError: it has none, or structs of another size.
    """
    try:
        declare(library, DISPATCH_FUNCTIONS)
    except AttributeError as error:
        raise BuildError(f"the GPU kernels have no dispatcher: {error}; build them again") from None
    sizes = (
        library.ql_descriptor_bytes(),
        library.ql_completion_bytes(),
        library.ql_dispatch_options_bytes(),
    )
    structs = (Descriptor, Completion, DispatchOptions)
    expected = tuple(ctypes.sizeof(struct) for struct in structs)
    if sizes != expected:
        raise BuildError(f"the dispatcher has structs of {sizes} bytes, expected {expected}")
    return library


def _fill(struct: PaceStruct, pace: Pace, most_rows: int) -> Any:
    sizes = (ctypes.c_int32 * len(pace.sizes))(*(rows for rows, _ in pace.sizes))
    costs = (ctypes.c_double * len(pace.sizes))(*(seconds for _, seconds in pace.sizes))
    table = [0.0, *(pace.seconds(rows) for rows in range(1, most_rows + 1))]
    seconds = (ctypes.c_double * len(table))(*table)
    struct.sweet_rows, struct.chunk_rows = pace.sweet_rows, pace.chunk_rows
    struct.most_rows, struct.row_seconds = pace.most_rows, pace.row_seconds
    struct.sizes_count = len(pace.sizes)
    struct.sizes, struct.size_seconds, struct.seconds = sizes, costs, seconds
    return sizes, costs, seconds
