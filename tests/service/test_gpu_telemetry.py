"""What a GPU says of itself, with a driver that is made up: values, refusals, silence."""

import logging
import threading
import types
from typing import Any

import pytest
import torch
from measured_layers import Spec, metrics_of, scrape, value

from qlinear_service.gpu import telemetry
from qlinear_service.gpu.telemetry import TOO_OLD_SECONDS, GpuTelemetry, open_telemetry
from qlinear_service.measured import MeasuredDevice

WAIT_SECONDS = 10
CUDA = torch.device("cuda:1")


class NVMLError(Exception):
    """As pynvml raises it."""


class Nvml:
    """The functions of pynvml that are used; a GPU with a name and values that can be changed."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC = 0

    def __init__(self) -> None:
        self.reasons = 0x4 | 0x1  # power cap, and idle, which slows nothing
        self.unknown: set[str] = set()
        self.started = False
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Semaphore(0)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "unknown"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert handle == "GPU-1234"
        assert self.answers.wait(WAIT_SECONDS)
        self.asked.release()
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 699_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 71

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return {0: 12, 1: 3}[kind]


EVERYTHING = {
    ("qlinear_gpu_clock_hertz",): 1.98e9,
    ("qlinear_gpu_memory_clock_hertz",): 3.201e9,
    ("qlinear_gpu_power_watts",): 699.5,
    ("qlinear_gpu_temperature_celsius",): 71.0,
    ("qlinear_gpu_throttled",): 1.0,
    ("qlinear_gpu_throttle_reason", "power_cap"): 1.0,
    ("qlinear_gpu_throttle_reason", "hardware_slowdown"): 0.0,
    ("qlinear_gpu_throttle_reason", "software_thermal"): 0.0,
    ("qlinear_gpu_throttle_reason", "hardware_thermal"): 0.0,
    ("qlinear_gpu_throttle_reason", "power_brake"): 0.0,
    ("qlinear_gpu_memory_errors", "corrected"): 12.0,
    ("qlinear_gpu_memory_errors", "uncorrected"): 3.0,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    def properties(device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(uuid="1234" if device == CUDA else "other")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return Nvml()


def test_everything_that_a_gpu_tells(nvml: Nvml) -> None:
    gpu = GpuTelemetry(nvml, "GPU-1234")
    assert gpu() == {}  # not asked yet
    gpu.sample()
    assert gpu() == EVERYTHING
    nvml.reasons = 0x1 | 0x2 | 0x100  # idle, set clocks, display: nothing is wrong
    gpu.sample()
    assert {value for name, value in gpu().items() if "throttle" in name[0]} == {0.0}
    nvml.reasons = 0x40 | 0x8
    gpu.sample()
    slow = {name[1] for name, value in gpu().items() if name[0].endswith("_reason") and value}
    assert slow == {"hardware_thermal", "hardware_slowdown"}


def test_what_a_gpu_does_not_tell_is_left_out(nvml: Nvml) -> None:
    def refuse(*_: object) -> int:
        raise NVMLError("not supported")

    nvml.nvmlDeviceGetTotalEccErrors = refuse  # type: ignore[method-assign]
    nvml.unknown = {"nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"}
    gpu = GpuTelemetry(nvml, "GPU-1234")
    gpu.sample()
    gone = ("qlinear_gpu_memory_errors", "qlinear_gpu_temperature_celsius")
    # An older driver knows the reasons by another name.
    assert gpu() == {name: one for name, one in EVERYTHING.items() if name[0] not in gone}
    nvml.unknown |= {"nvmlDeviceGetCurrentClocksThrottleReasons"}
    gpu.sample()
    assert not any("throttle" in name[0] for name in gpu())


def test_a_driver_that_hangs_holds_up_no_scrape_and_its_last_words_grow_old(nvml: Nvml) -> None:
    now = 100.0
    gpu = GpuTelemetry(nvml, "GPU-1234", clock=lambda: now)
    gpu.sample()
    nvml.answers.clear()
    gpu.start()
    metrics = metrics_of(Spec("up", n=16), devices=[MeasuredDevice(name="cpu", telemetry=gpu)])
    power = {"device": "cpu"}
    assert value(scrape(metrics), "qlinear_gpu_power_watts", **power) == 699.5
    reason = {"device": "cpu", "reason": "power_cap"}
    assert value(scrape(metrics), "qlinear_gpu_throttle_reason", **reason) == 1
    now += TOO_OLD_SECONDS + 1
    assert not [name for name, _ in scrape(metrics) if name.startswith("qlinear_gpu")]
    gpu.stop()
    nvml.answers.set()


def test_it_is_asked_again_and_again_on_a_thread_of_its_own(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "EVERY_SECONDS", 0.001)
    gpu = open_telemetry(CUDA, nvml)
    assert gpu is not None
    assert nvml.started
    for _ in range(6):
        assert nvml.asked.acquire(timeout=WAIT_SECONDS)
    assert gpu() == EVERYTHING
    gpu.stop()
    gpu._thread.join(WAIT_SECONDS)
    assert not gpu._thread.is_alive()


def test_a_fault_ends_the_telemetry_and_nothing_else(
    nvml: Nvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.nvmlDeviceGetPowerUsage = lambda handle: "?"  # type: ignore[method-assign, assignment, return-value]
    gpu = GpuTelemetry(nvml, "GPU-1234")
    gpu.start()
    gpu._thread.join(WAIT_SECONDS)
    assert "gpu_telemetry_ended" in caplog.text
    assert gpu() == {}


def test_without_nvml_there_is_none(
    nvml: Nvml, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_telemetry(torch.device("cuda:0"), nvml) is None  # a GPU that NVML lacks
    assert "gpu_telemetry_missing" in caplog.text

    def missing() -> None:
        raise NVMLError("libnvidia-ml.so.1 is not there")

    nvml.nvmlInit = missing  # type: ignore[method-assign]
    assert open_telemetry(CUDA, nvml) is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert open_telemetry(CUDA) is None
