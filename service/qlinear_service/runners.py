"""What computes batches where the layers are, what brings them there, and what the queue knows.

On a CPU the queue is Python's and each batch is its own call; on one GPU the native dispatcher has
both queue and device; several GPUs are below Python's queue, too. Both queues decide alike
(docs/decisions/0011-native-dispatch.md).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qlinear_service.batcher import Batcher
from qlinear_service.batching import WorkQueue
from qlinear_service.config import NATIVE, PYTHON, ServiceConfig
from qlinear_service.dispatch.abi import dispatching, limits_of
from qlinear_service.dispatch.batcher import DispatchBatcher
from qlinear_service.dispatch.queue import NativeQueue
from qlinear_service.engine import BatchRunner, CpuRunner, Engine, WorkerThread
from qlinear_service.errors import BuildError, ConfigError, OutOfDeviceMemory
from qlinear_service.gpu import direct
from qlinear_service.gpu.direct import DirectEngine
from qlinear_service.gpu.engine import STAGES, GpuEngine
from qlinear_service.gpu.replicas import ReplicaRunner
from qlinear_service.gpu.room import rows_of_batches
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import PINNED
from qlinear_service.loaded import Loaded, Replica
from qlinear_service.log_values import event
from qlinear_service.metrics import Metrics
from qlinear_service.scheduling import Pace, pace_of
from qlinear_service.slots import Slab
from qlinear_service.tracing import Tracer

__all__ = ["Batching", "new_batching", "new_queue", "new_runner", "paces_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """What takes calls to the engine, and how to stop it."""

    batcher: Batcher | DispatchBatcher
    queue_rows: Callable[[], Mapping[str, int]]
    """Rows that wait, by layer; from any thread."""
    stop: Callable[[float], bool]
    """Ends all threads, in so many seconds; says whether they have ended."""


def new_batching(
    loaded: Loaded,
    config: ServiceConfig,
    slab: Slab,
    worker: WorkerThread,
    *,
    clock: Callable[[], float],
    metrics: Metrics,
    tracer: Tracer | None = None,
) -> Batching:
    """Return what brings calls together and computes them, where the layers are.

    Args:
        loaded: layers, device and curves.
        config: all of it.
        slab: where activations lie.
        worker: the thread of a CPU's engine.
        clock: of the event loop, and monotonic.
        metrics: told of each batch.
        tracer: told of batches in which a call is traced.

    Raises:
        OutOfDeviceMemory: the device has no room for the buffers of batches.
        BuildError: the native dispatcher was asked for, and the GPU's library has none.
        ConfigError: it was asked for, and no single GPU computes.
    """
    asked = config.batching.dispatcher
    # Of what kernels cannot reach where it lies, every batch would come back.
    is_pinned = config.kernels.transfers == PINNED and asked != NATIVE
    is_native = not is_pinned and _can_dispatch(loaded, asked)
    stages = direct.STAGES if is_native else STAGES
    runner = new_runner(loaded, config, slab, worker, stages=stages)
    if is_native and isinstance(runner, GpuEngine) and isinstance(loaded.gpu, CudaStreams):
        if runner.sees_slab or asked == NATIVE:
            return _dispatching(loaded, config, slab, runner, loaded.gpu, clock, metrics, tracer)
        runner.keep(config.batching.max_batches_in_flight or STAGES)
    return _python_batching(loaded, config, slab, runner, clock, metrics, tracer)


def _can_dispatch(loaded: Loaded, dispatcher: str) -> bool:
    """Say whether the native dispatcher may have queue and device.

    Raises:
        BuildError: it was asked for, and the GPU's library has none.
        ConfigError: it was asked for, and no single GPU computes.
    """
    if dispatcher == PYTHON:
        return False
    if loaded.replicas or not isinstance(loaded.gpu, CudaStreams):
        if dispatcher == NATIVE:
            raise ConfigError("dispatcher is native, which is for one GPU; expected auto or python")
        return False
    try:
        dispatching(loaded.gpu.kernels.library)
    except BuildError as error:
        if dispatcher == NATIVE:
            raise
        event(logger, logging.WARNING, "python_dispatches", reason=error)
        return False
    return True


def _python_batching(
    loaded: Loaded,
    config: ServiceConfig,
    slab: Slab,
    runner: BatchRunner,
    clock: Callable[[], float],
    metrics: Metrics,
    tracer: Tracer | None,
) -> Batching:
    queue = new_queue(loaded, config)
    batcher = Batcher(
        queue=queue,
        run_batch=runner.run,
        release=lambda item: slab.release(item.slot),
        clock=clock,
        metrics=metrics,
        most_running=runner.most_in_flight,
        most_batch_seconds=config.batching.max_batch_seconds,
        run_lone=runner.run_lone,
        is_lone=runner.is_lone,
        most_chained=runner.most_chained,
        together=runner if isinstance(runner, GpuEngine | ReplicaRunner) else None,
        tracer=tracer,
    )
    return Batching(batcher=batcher, queue_rows=queue.rows_by_layer, stop=runner.stop)


def _dispatching(
    loaded: Loaded,
    config: ServiceConfig,
    slab: Slab,
    engine: GpuEngine,
    streams: CudaStreams,
    clock: Callable[[], float],
    metrics: Metrics,
    tracer: Tracer | None,
) -> Batching:
    batching, limits, layers = config.batching, config.limits, list(loaded.registry)
    names = [layer.spec.name for layer in layers]
    most_rows = rows_of_batches(layers, batching.max_batch_rows)
    try:
        device = DirectEngine(
            engine=engine,
            streams=streams,
            layers=layers,
            slab=slab,
            limits=limits_of(
                names,
                paces_of(loaded, most_rows),
                max_batch_rows=most_rows,
                max_age_seconds=limits.max_queue_age_seconds,
                max_wait_seconds=batching.max_wait_us / 1e6,
            ),
            most_running=engine.most_in_flight,
        )
    except RuntimeError as error:
        text = f"no room for the buffers of {engine.most_in_flight} batches: {error}"
        raise OutOfDeviceMemory(text) from None
    queue = NativeQueue(
        device.native,
        layers=names,
        features=[layer.spec.n for layer in layers],
        slab=slab,
        max_queue_rows=limits.max_queue_rows,
    )
    batcher = DispatchBatcher(
        native=device.native,
        queue=queue,
        engine=device,
        together=engine,
        slab=slab,
        release=lambda item: slab.release(item.slot),
        clock=clock,
        metrics=metrics,
        max_age_seconds=limits.max_queue_age_seconds,
        most_batch_seconds=batching.max_batch_seconds,
        tracer=tracer,
    )
    return Batching(batcher=batcher, queue_rows=queue.rows_by_layer, stop=device.stop)


STOP_SECONDS = 1.0
"""How long an engine may take to end that has computed nothing yet."""


def new_runner(
    loaded: Loaded,
    config: ServiceConfig,
    slab: Slab,
    worker: WorkerThread,
    *,
    stages: int = STAGES,
) -> BatchRunner:
    """Return what computes batches where the layers are.

    Args:
        loaded: layers and device.
        config: all of it.
        slab: where activations lie.
        worker: the thread of a CPU's engine.
        stages: batches that a GPU has at a time unless `config` says how many.

    Raises:
        OutOfDeviceMemory: the device has no room for the buffers of batches.
    """
    registry = loaded.registry
    if loaded.gpu is None:
        # What a path needs that dequantizes a layer at each call, the floor does not tell.
        roofline = loaded.roofline if loaded.kernels.name == "cpu" else None
        engine = Engine(kernels=loaded.kernels, registry=registry, slab=slab, roofline=roofline)
        return CpuRunner(engine, worker)
    stages = config.batching.max_batches_in_flight or stages
    only = Replica(config.kernels.device, loaded.gpu, registry)
    engines: dict[str, GpuEngine] = {}
    for name, device, held in loaded.replicas or (only,):
        try:
            engines[name] = GpuEngine(
                device=device,
                registry=held,
                slab=slab,
                stages=stages,
                mode=config.kernels.transfers,
                roofline=loaded.roofline,
            )
        except RuntimeError as error:
            for made in engines.values():
                made.stop(STOP_SECONDS)
            text = f"no room for the buffers of {stages} batches: {error}"
            raise OutOfDeviceMemory(text) from None
    return ReplicaRunner(engines) if len(engines) > 1 else next(iter(engines.values()))


def new_queue(loaded: Loaded, config: ServiceConfig) -> WorkQueue:
    """Return the queue of the loaded layers, empty."""
    batching, limits = config.batching, config.limits
    return WorkQueue(
        max_batch_rows=batching.max_batch_rows,
        max_queue_rows=limits.max_queue_rows,
        max_age_seconds=limits.max_queue_age_seconds,
        paces=paces_of(loaded, batching.max_batch_rows),
        max_wait_seconds=batching.max_wait_us / 1e6,
    )


def paces_of(loaded: Loaded, most_rows: int) -> dict[str, Pace]:
    """Return the pace of each layer whose shape was measured, by full name.

    Args:
        loaded: layers and curves.
        most_rows: of one batch.
    """
    by_shape = {shape: pace_of(curve, most_rows) for shape, curve in loaded.curves.items()}
    specs = (layer.spec for layer in loaded.registry)
    return {spec.name: by_shape[spec.shape] for spec in specs if spec.shape in by_shape}
