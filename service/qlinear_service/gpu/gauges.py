"""Clock, throttling, power and temperature of a GPU, asked of the driver's NVML at each scrape.

ctypes over five functions of a library that comes with every driver; a package for it would be one
more thing to install. What a GPU does not tell is left out; without NVML there are no gauges.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Gauges"]

LIBRARY = "libnvidia-ml.so.1"

# Of nvml.h.
CLOCK_SM = 1
TEMPERATURE_GPU = 0
REASONS_THAT_SLOW = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Power cap, slowdown by hardware, by heat (software, hardware), power brake; not: idle."""


class Gauges:
    """What one GPU says of itself; call it from any thread.

    Args:
        library: NVML, started.
        handle: of the GPU.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> "Gauges | None":
        """Return the gauges of torch's `device`; None where NVML does not know it."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        # By its name for life: NVML numbers GPUs regardless of CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() != 0:
            return None
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        return cls(library, handle)

    def __call__(self) -> Mapping[str, float]:
        """Return what it tells now, by the names of metrics."""
        library = self._library
        clock = self._asked(library.nvmlDeviceGetClockInfo, ctypes.c_uint(CLOCK_SM))
        power = self._asked(library.nvmlDeviceGetPowerUsage)
        warmth = self._asked(library.nvmlDeviceGetTemperature, ctypes.c_uint(TEMPERATURE_GPU))
        reasons = self._asked(library.nvmlDeviceGetCurrentClocksThrottleReasons, wide=True)
        found = {
            "qlinear_gpu_clock_hertz": None if clock is None else clock * 1e6,
            "qlinear_gpu_power_watts": None if power is None else power / 1e3,
            "qlinear_gpu_temperature_celsius": None if warmth is None else float(warmth),
            "qlinear_gpu_throttled": (
                None if reasons is None else float(bool(reasons & REASONS_THAT_SLOW))
            ),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _asked(self, function: Any, *arguments: Any, wide: bool = False) -> int | None:
        answer = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        status = function(self._handle, *arguments, ctypes.byref(answer))
        return int(answer.value) if status == 0 else None
