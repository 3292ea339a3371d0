"""What computes batches where the layers are, and what the queue knows of their costs."""

from qlinear_service.batching import WorkQueue
from qlinear_service.config import ServiceConfig
from qlinear_service.engine import BatchRunner, CpuRunner, Engine, WorkerThread
from qlinear_service.errors import OutOfDeviceMemory
from qlinear_service.gpu.engine import STAGES, GpuEngine
from qlinear_service.gpu.replicas import ReplicaRunner
from qlinear_service.loaded import Loaded, Replica
from qlinear_service.scheduling import Pace, pace_of
from qlinear_service.slots import Slab

__all__ = ["new_queue", "new_runner", "paces_of"]

STOP_SECONDS = 1.0
"""How long an engine may take to end that has computed nothing yet."""


def new_runner(
    loaded: Loaded, config: ServiceConfig, slab: Slab, worker: WorkerThread
) -> BatchRunner:
    """Return what computes batches where the layers are.

    Raises:
        OutOfDeviceMemory: the device has no room for the buffers of batches.
    """
    registry = loaded.registry
    if loaded.gpu is None:
        # What a path needs that dequantizes a layer at each call, the floor does not tell.
        roofline = loaded.roofline if loaded.kernels.name == "cpu" else None
        engine = Engine(kernels=loaded.kernels, registry=registry, slab=slab, roofline=roofline)
        return CpuRunner(engine, worker)
    stages = config.batching.max_batches_in_flight or STAGES
    only = Replica(config.kernels.device, loaded.gpu, registry)
    engines: dict[str, BatchRunner] = {}
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
