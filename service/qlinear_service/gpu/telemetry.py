"""Clocks, throttling, power, temperature and memory errors of a GPU, as its driver tells them.

A thread of its own asks NVML every few seconds, so neither calls nor scrapes wait for a driver
that is slow, as it is when a card is ill. What a GPU does not tell is left out; without NVML there
is nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from qlinear_service.log_values import event

__all__ = ["GpuTelemetry", "open_telemetry"]

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
TOO_OLD_SECONDS = 15.0
"""Then the driver has stopped answering, and the last values say nothing of now."""

REASONS = {
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""What keeps the clock down below what load asks for, as bits of nvml.h; not: idle, set clocks."""

Values = dict[tuple[str, ...], float]


class GpuTelemetry:
    """What one GPU says of itself; call it from any thread.

    Args:
        nvml: the module pynvml, started.
        handle: NVML's, of the GPU.
        clock: seconds.
    """

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._last: tuple[float, Values] = (clock(), {})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="gpu telemetry", daemon=True)

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()

    def __call__(self) -> Mapping[tuple[str, ...], float]:
        """Return what it told last, by metric and labels; nothing if that is too long ago."""
        at, values = self._last
        return values if self._clock() - at <= TOO_OLD_SECONDS else {}

    def sample(self) -> None:
        """Ask once; blocks for as long as the driver takes."""
        self._last = (self._clock(), dict(self._ask()))

    def _work(self) -> None:
        while True:
            try:
                self.sample()
            except Exception as error:
                # The server serves on without; what was told last becomes too old.
                event(logger, logging.WARNING, "gpu_telemetry_ended", error=error)
                return
            if self._stop.wait(EVERY_SECONDS):
                return

    def _ask(self) -> Iterator[tuple[tuple[str, ...], float]]:
        nvml = self._nvml
        clocks = (("clock", nvml.NVML_CLOCK_SM), ("memory_clock", nvml.NVML_CLOCK_MEM))
        for name, kind in clocks:
            if (megahertz := self._told("nvmlDeviceGetClockInfo", kind)) is not None:
                yield (f"qlinear_gpu_{name}_hertz",), megahertz * 1e6
        if (milliwatts := self._told("nvmlDeviceGetPowerUsage")) is not None:
            yield ("qlinear_gpu_power_watts",), milliwatts / 1e3
        sensor = nvml.NVML_TEMPERATURE_GPU
        if (warmth := self._told("nvmlDeviceGetTemperature", sensor)) is not None:
            yield ("qlinear_gpu_temperature_celsius",), float(warmth)
        # Drivers before 535 know it by its older name only.
        reasons = self._told("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._told("nvmlDeviceGetCurrentClocksThrottleReasons")
        if reasons is not None:
            found = {name: float(bool(reasons & bit)) for name, bit in REASONS.items()}
            yield ("qlinear_gpu_throttled",), max(found.values())
            for name, value in found.items():
                yield ("qlinear_gpu_throttle_reason", name), value
        for name in ("corrected", "uncorrected"):
            kind = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{name.upper()}")
            errors = self._told("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)
            if errors is not None:
                yield ("qlinear_gpu_memory_errors", name), float(errors)

    def _told(self, function: str, *arguments: Any) -> int | None:
        """Return what the GPU answers, None if it does not know."""
        try:
            return int(getattr(self._nvml, function)(self._handle, *arguments))
        except (self._nvml.NVMLError, AttributeError):  # packages to come drop old functions
            return None


def open_telemetry(device: torch.device, nvml: Any = None) -> GpuTelemetry | None:
    """Return what asks torch's `device`, started; None where NVML does not know it.

    Args:
        device: a GPU.
        nvml: the module pynvml or, in tests, what takes its place.
    """
    if nvml is None:
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError as error:  # a server without it computes as well
            event(logger, logging.WARNING, "gpu_telemetry_missing", error=error)
            return None
        nvml = pynvml
    try:
        nvml.nvmlInit()
        # By its name for life: NVML numbers GPUs regardless of CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        event(logger, logging.WARNING, "gpu_telemetry_missing", error=error)
        return None
    telemetry = GpuTelemetry(nvml, handle)
    telemetry.start()
    return telemetry
