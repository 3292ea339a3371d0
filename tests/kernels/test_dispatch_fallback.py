"""Where the native dispatcher cannot be: Python's queue over the same GPU, as it would have it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import LAYERS, PLAIN_NAME
from fake_cuda import HostKernels
from measured_layers import metrics_of

from qlinear_service.batcher import Batcher
from qlinear_service.config import BatchingConfig, KernelConfig, ServiceConfig
from qlinear_service.dispatch.batcher import DispatchBatcher
from qlinear_service.engine import WorkerThread
from qlinear_service.gpu import direct
from qlinear_service.gpu.engine import CHAINED, STAGES, GpuEngine
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.runners import Batching, new_batching
from qlinear_service.slots import Slab


def batching_of(kernels: HostKernels, **batching: Any) -> Batching:
    metrics = metrics_of()
    metrics.layers = {PLAIN_NAME: LAYERS[PLAIN_NAME]}
    return new_batching(
        Loaded(
            registry=LayerRegistry([LAYERS[PLAIN_NAME]]),
            kernels=TorchKernels(),
            gpu=CudaStreams(kernels),
        ),
        ServiceConfig(kernels=KernelConfig(device="cuda:0"), batching=BatchingConfig(**batching)),
        Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22),
        WorkerThread("engine"),
        clock=asyncio.get_running_loop().time,
        metrics=metrics,
    )


@pytest.mark.parametrize(("asked", "most"), [(0, STAGES), (1, 1), (5, 5)])
async def test_a_slab_that_cannot_be_registered_leaves_pythons_number_of_batches(
    kernels: HostKernels,
    caplog: pytest.LogCaptureFixture,
    asked: int,
    most: int,
) -> None:
    kernels.library.fake_rows_reset()
    kernels.library.fake_fail_registers(1)
    made = batching_of(kernels, max_batches_in_flight=asked)
    assert isinstance(made.batcher, Batcher)
    assert "slab_not_registered" in caplog.text
    engine = made.stop.__self__  # type: ignore[attr-defined]
    assert isinstance(engine, GpuEngine)
    assert made.batcher._in_flight.most == engine.most_in_flight == most
    assert engine.stage_count == engine._stages.free == most + CHAINED
    assert made.stop(5)


async def test_a_slab_that_is_registered_has_the_dispatchers_number(
    kernels: HostKernels,
) -> None:
    kernels.library.fake_rows_reset()
    made = batching_of(kernels)
    assert isinstance(made.batcher, DispatchBatcher)
    assert made.batcher._engine._engine.most_in_flight == direct.STAGES  # type: ignore[attr-defined]
    assert made.stop(5)
