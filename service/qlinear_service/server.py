"""The composition root: builds every part, binds, loads, serves, drains.

The order is the point. Bind first, so that probes are answered while models load; NOT_SERVING
before calls are refused, so that balancers leave in time; wait for our own count of calls before
`server.stop`, which would drop answers of aborted ones. Only commands/serve.py imports this.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

from qlinear_service import __version__
from qlinear_service.calls import Serving
from qlinear_service.channel import channel_options, max_stream_seconds
from qlinear_service.config import ServiceConfig
from qlinear_service.engine import WorkerThread
from qlinear_service.errors import ConfigError, EngineLost, Unavailable
from qlinear_service.handlers import SERVICE, Handlers
from qlinear_service.health import Health
from qlinear_service.lifecycle import Lifecycle, Phase
from qlinear_service.loaded import Loaded
from qlinear_service.log_values import event
from qlinear_service.measured import Load
from qlinear_service.metrics import Metrics
from qlinear_service.metrics_server import serve_metrics
from qlinear_service.process import collect_rarely
from qlinear_service.runners import Batching, new_batching
from qlinear_service.servicer import LinearServicer
from qlinear_service.signals import stop_on_signals
from qlinear_service.slots import Slab
from qlinear_service.tracing import Tracer
from qlinear_service.transport import LocalTransport

__all__ = ["Loader", "Server", "serve"]

logger = logging.getLogger(__name__)

Loader = Callable[[threading.Event], Loaded]
"""Blocking; gives up early, with anything, once the event is set."""

LAST_WORDS_SECONDS = 1.0
"""How long calls that were just failed, and health watchers, have to receive their status."""

QUIET_SECONDS = 0.2
"""`server.stop` meets calls that arrive meanwhile with CANCELLED, so they are refused in our own
words until none has come for this long: a caller that has just got its answer sends the next."""

MOST_QUIET_SECONDS = 1.0
"""Callers that never pause cannot keep the server from stopping."""


class Server:
    """One server of one process.

    Use `bind`, `load`, then `drain`; `serve` below does it for a process.

    Args:
        config: all of it.
        tracer: told of calls and batches, if they are traced.
    """

    def __init__(self, config: ServiceConfig, tracer: Tracer | None = None) -> None:
        self._config, self._tracer = config, tracer
        self._lifecycle = Lifecycle()
        self._health = Health()
        self.metrics = Metrics(
            registry=CollectorRegistry(),
            version=__version__,
            device=",".join(config.kernels.device_names),
            state=lambda: self._lifecycle.phase.value,
        )
        self._servicer = LinearServicer(
            limits=config.limits,
            device=",".join(config.kernels.device_names),
            batch_invariant=config.kernels.batch_invariant,
            lifecycle=self._lifecycle,
            max_stream_age_seconds=max_stream_seconds(config.server.max_connection_seconds),
        )
        self._worker = WorkerThread("engine")
        self._stop_loading = threading.Event()
        self._grpc_server: grpc.aio.Server | None = None
        self._batching: Batching | None = None
        self.batch_loop: asyncio.Task[None] | None = None
        """Runs as long as the server serves; if it ends by itself, the engine is gone."""

    async def bind(self) -> int:
        """Listen and answer health; return the port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        await self._health.start()
        server = grpc.aio.server(options=channel_options(self._config))
        handlers = Handlers(
            self._servicer,
            lifecycle=self._lifecycle,
            metrics=self.metrics,
            tracer=self._tracer,
        )
        server.add_generic_rpc_handlers((handlers.generic_handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        if self._config.server.reflection:
            names = [
                SERVICE,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ]
            reflection.enable_server_reflection(names, server)
        host, wanted = self._config.server.host, self._config.server.port
        address = f"[{host}]:{wanted}" if ":" in host else f"{host}:{wanted}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken, or the host is none of this "
                "machine; choose others with --host and --port"
            ) from None
        await server.start()
        self._grpc_server = server
        values = {"host": host, "port": port, "version": __version__, "pid": os.getpid()}
        event(logger, logging.INFO, "listening", **values)
        return port

    async def load(self, loader: Loader) -> None:
        """Load on the engine's thread, then serve.

        Raises:
            QlinearError: whatever the loader raises.
        """
        started = time.perf_counter()
        loaded = await self._worker.run(loader, self._stop_loading)
        self._compose(loaded, started)
        collect_rarely()
        self._lifecycle.phase = Phase.SERVING
        await self._health.ready()
        seconds = time.perf_counter() - started
        event(logger, logging.INFO, "ready", layers=len(loaded.registry), seconds=seconds)

    def _compose(self, loaded: Loaded, started: float) -> None:
        limits = self._config.limits
        clock = asyncio.get_running_loop().time
        slab = Slab(capacity_bytes=limits.max_queue_bytes, largest_bytes=limits.largest_slot_bytes)
        self._batching = batching = new_batching(
            loaded,
            self._config,
            slab,
            self._worker,
            clock=clock,
            metrics=self.metrics,
            tracer=self._tracer,
        )
        self.metrics.started(
            layers=loaded.registry,
            kernels=loaded.kernels.name,
            load_seconds=time.perf_counter() - started,
            devices=loaded.measured(self._config.kernels.device),
            load=Load(
                queue_rows=batching.queue_rows,
                inflight_bytes=lambda: slab.used_bytes,
                queue_limit_bytes=limits.max_queue_bytes,
            ),
            curves=loaded.curves,
        )
        self.batch_loop = asyncio.create_task(batching.batcher.run(), name="batch loop")
        transport = LocalTransport(
            slab=slab, batcher=batching.batcher, clock=clock, metrics=self.metrics
        )
        self._servicer.attach(
            Serving(
                registry=loaded.registry,
                transport=transport,
                limits=limits,
                metrics=self.metrics,
                tracer=self._tracer,
            )
        )

    async def drain(self) -> bool:
        """Stop in order; return whether the engine's threads have ended too.

        Calls that are in finish within the grace period; what is left then gets UNAVAILABLE.
        """
        timing = self._config.server
        if self._lifecycle.phase is Phase.SERVING:
            event(logger, logging.INFO, "draining", calls=int(self._lifecycle.admitted))
            await self._health.not_ready()
            await asyncio.sleep(timing.drain_delay_seconds)
        self._lifecycle.begin_drain()
        return await self._finish(timing.grace_seconds)

    async def abandon(self) -> bool:
        """Stop at once: nothing more can be computed. Returns what `drain` does."""
        await self._health.not_ready()
        self._lifecycle.begin_drain()
        return await self._finish(0)

    async def _finish(self, grace_seconds: float) -> bool:
        self._stop_loading.set()
        calls = self._lifecycle
        if not await calls.admitted.wait_none(grace_seconds) and self._batching is not None:
            event(logger, logging.WARNING, "grace_over", calls=int(calls.admitted))
            self._batching.batcher.fail_all(
                Unavailable("the server has shut down before it came to this call; send it again")
            )
            await calls.admitted.wait_none(LAST_WORDS_SECONDS)
        if self._grpc_server is not None:
            await calls.wait_quiet(QUIET_SECONDS, at_most_seconds=MOST_QUIET_SECONDS)
            await calls.refused.wait_none(LAST_WORDS_SECONDS)
            await self._grpc_server.stop(LAST_WORDS_SECONDS)
            # Its finalizer needs a running event loop: let it go while there is one.
            self._grpc_server = None
        if self.batch_loop is not None:
            self.batch_loop.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self.batch_loop
        ended = self._batching is None or self._batching.stop(LAST_WORDS_SECONDS)
        ended = self._worker.stop(LAST_WORDS_SECONDS) and ended
        event(logger, logging.INFO, "stopped", engine_ended=ended)
        return ended


async def serve(
    config: ServiceConfig,
    loader: Loader,
    announce: Callable[[str], None],
    tracer: Tracer | None = None,
) -> int:
    """Run one server until SIGTERM or SIGINT and return the process's exit code.

    Args:
        config: all of it.
        loader: yields layers and kernels.
        announce: told "listening on HOST:PORT" and "metrics on HOST:PORT" once the ports are open,
            and "ready on HOST:PORT" once calls are answered.
        tracer: told of calls and batches, if they are traced.

    Raises:
        QlinearError: it cannot bind or load.
    """
    stop = stop_on_signals()
    server = Server(config, tracer)
    host, metrics_port = config.server.host, config.server.metrics_port
    # Around everything, so that the drain can be watched to its end.
    with serve_metrics(server.metrics, host=host, port=metrics_port) as metrics_address:
        address = f"{host}:{await server.bind()}"
        announce(f"listening on {address}")
        if metrics_address is not None:
            announce(f"metrics on {metrics_address}")
        return await _run(server, loader, stop, lambda: announce(f"ready on {address}"))


async def _run(
    server: Server, loader: Loader, stop: asyncio.Event, announce_ready: Callable[[], None]
) -> int:
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(server.load(loader))
    await asyncio.wait({stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and loading.exception() is not None:
        await server.abandon()
        loading.result()
    if server.batch_loop is not None:
        announce_ready()
        await asyncio.wait({stopping, server.batch_loop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            error = server.batch_loop.exception()
            event(logger, logging.ERROR, "engine_gone", exc_info=error)
            if not await server.abandon() or isinstance(error, EngineLost):
                _leave(1)  # not through what torch does at exit on a device that is gone
            return 1
    loading.cancel()
    if not await server.drain():
        _leave(0)
    return 0


def _leave(code: int) -> NoReturn:
    """End the process without what does not end: a thread in a computation is nobody's to stop."""
    logging.shutdown()
    os._exit(code)
