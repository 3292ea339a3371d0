"""Every metric of the server: name, type, labels, buckets, and one line on how to read it.

Series are made at their first use; `metric_series.py` holds them. Knows no event and no time.
"""

from bisect import bisect_left
from dataclasses import replace

from qlinear_service.metric_series import Family, Histogram, Number, quantile

__all__ = ["Family", "Histogram", "Number", "m_label", "new_families", "quantile"]

CALL_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
QUEUE_SECONDS = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.1, 1.0, 5.0)
COPY_SECONDS = (1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3)
REPLY_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)
KERNEL_SECONDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 2e-4, 1e-3, 0.01, 0.1)
BATCH_ROWS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
BATCH_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
M_BOUNDS = (1, 8, 16, 32, 64, 128, 512)
M_LABELS = (*(str(bound) for bound in M_BOUNDS), "inf")


def m_label(rows: int) -> str:
    """Return the label `m` of a batch of so many rows: the next bound, or "inf"."""
    return M_LABELS[bisect_left(M_BOUNDS, rows)]


_LAUNCH = ("shape", "m", "device")

_TABLE: tuple[Family, ...] = (
    Family(
        "qlinear_requests_total",
        "counter",
        ("method", "layer", "code"),
        "Finished calls by status; a call for several layers counts once for each. layer: "
        "a loaded one, unknown, or none for methods without one.",
    ),
    Family(
        "qlinear_request_seconds",
        "histogram",
        ("method", "shape"),
        "Arrival to reply of answered calls (code OK), under the shape of the first layer.",
        CALL_SECONDS,
    ),
    Family(
        "qlinear_queue_seconds",
        "histogram",
        ("shape",),
        "Queue to the first batch. Longer than a batch takes: more calls than the device serves.",
        QUEUE_SECONDS,
    ),
    Family(
        "qlinear_transfer_seconds",
        "histogram",
        ("direction",),
        "Copies. slot: a call's bytes into its slot; gather: the rows of a batch out of their "
        "slots into one block; to_device, from_device: between host and GPU; scatter: results out "
        "of the memory that the GPU wrote. The native dispatcher needs no gather and no scatter.",
        COPY_SECONDS,
    ),
    Family(
        "qlinear_reply_seconds",
        "histogram",
        (),
        "Results of a call at hand to its reply encoded.",
        REPLY_SECONDS,
    ),
    Family(
        "qlinear_kernel_seconds",
        "histogram",
        _LAUNCH,
        "Time of one computation, on a GPU that of the device alone; m is the upper bound of its "
        "rows.",
        KERNEL_SECONDS,
    ),
    Family(
        "qlinear_kernel_bytes_total",
        "counter",
        _LAUNCH,
        "Packed codes, scales and zero points, activations and results, each once. Over "
        "kernel_busy_seconds_total: the effective memory bandwidth.",
    ),
    Family(
        "qlinear_kernel_busy_seconds_total",
        "counter",
        _LAUNCH,
        "Seconds of computing; its rate is the share of time in which the device is busy.",
    ),
    Family(
        "qlinear_hbm_bandwidth_bytes_per_second",
        "gauge",
        _LAUNCH,
        "Effective memory bandwidth of the last 10 s; absent without traffic in them.",
    ),
    Family(
        "qlinear_hbm_peak_bytes_per_second",
        "gauge",
        ("device",),
        "Largest read rate measured at start, never a datasheet's; on a CPU that of its caches.",
    ),
    Family(
        "qlinear_roofline_ratio",
        "gauge",
        _LAUNCH,
        "Shortest possible over measured time, last 10 s: 1 is all that this machine can do. "
        "The floor is reading the bytes or multiplying, at the rates measured at start.",
    ),
    Family(
        "qlinear_tuned_bandwidth_bytes_per_second",
        "gauge",
        _LAUNCH,
        "What the plan of a loaded shape reached when it was tuned, weights cold; beside "
        "hbm_bandwidth it shows what serving loses. Absent where no table holds the shape.",
    ),
    Family(
        "qlinear_batch_rows",
        "histogram",
        ("shape",),
        "Rows of a batch: what batching made of the traffic.",
        BATCH_ROWS,
    ),
    Family(
        "qlinear_batch_requests",
        "histogram",
        ("shape",),
        "Calls that shared a batch; 1 only: nobody else asked for that layer meanwhile.",
        BATCH_REQUESTS,
    ),
    Family("qlinear_queue_rows", "gauge", ("layer",), "Rows that wait, by layer."),
    Family(
        "qlinear_inflight_bytes",
        "gauge",
        (),
        "Memory of calls that wait or run; near queue_limit_bytes calls are rejected.",
    ),
    Family(
        "qlinear_rejected_total",
        "counter",
        ("reason",),
        "Calls refused for load or size: queue_rows, queue_bytes, queue_age, unread_bytes, "
        "too_large, not_serving, other.",
    ),
    Family("qlinear_expired_total", "counter", (), "Calls whose deadline passed unanswered."),
    Family("qlinear_cancelled_total", "counter", (), "Calls that their callers took back."),
    Family("qlinear_queue_limit_bytes", "gauge", (), "What inflight_bytes may reach."),
    Family(
        "qlinear_sweet_spot_rows",
        "gauge",
        ("shape", "device"),
        "Rows that cost at most a tenth more than one; batch_rows far below it: room for load.",
    ),
    Family("qlinear_layers_loaded", "gauge", (), "Layers that are served."),
    Family(
        "qlinear_weight_bytes",
        "gauge",
        ("device",),
        "Memory of all layers as packed, with their biases and permutations.",
    ),
    Family("qlinear_gpu_clock_hertz", "gauge", ("device",), "Clock of the multiprocessors now."),
    Family("qlinear_gpu_memory_clock_hertz", "gauge", ("device",), "Clock of the memory now."),
    Family(
        "qlinear_gpu_throttled",
        "gauge",
        ("device",),
        "1 while power, heat or hardware keep the clock down; kernels are slower then.",
    ),
    Family(
        "qlinear_gpu_throttle_reason",
        "gauge",
        ("device", "reason"),
        "1 while this keeps the clock down: power_cap, power_brake, software_thermal, "
        "hardware_thermal, hardware_slowdown.",
    ),
    Family("qlinear_gpu_power_watts", "gauge", ("device",), "Power that the GPU draws now."),
    Family("qlinear_gpu_temperature_celsius", "gauge", ("device",), "How warm the GPU is now."),
    Family(
        "qlinear_gpu_memory_errors",
        "gauge",
        ("device", "kind"),
        "Memory errors (ECC) since the driver was loaded: corrected, uncorrected. Absent where "
        "the memory does not count them.",
    ),
    Family("qlinear_load_seconds", "gauge", (), "From the start of loading to readiness."),
    Family("qlinear_ready", "gauge", (), "1 while calls are answered, 0 at start and drain."),
    Family(
        "qlinear_build_info",
        "gauge",
        ("version", "device", "kernels"),
        "Always 1; its labels say what runs.",
    ),
)


def new_families() -> dict[str, Family]:
    """Return all families by name, without series, in the order of the exposition."""
    return {family.name: replace(family, numbers={}, histograms={}) for family in _TABLE}
