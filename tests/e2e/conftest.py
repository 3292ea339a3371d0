"""Servers for the tests of this folder, started on demand and stopped after the test."""

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest
from running_server import Running, Start, WatchedKernels, quick_config, small_layers

from qlinear_service.config import BatchingConfig, LimitsConfig, ServerConfig
from qlinear_service.cost import CostCurve
from qlinear_service.layers import LayerRegistry
from qlinear_service.loading import Loaded
from qlinear_service.server import Server
from qlinear_service.tracing import Tracer


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Return a function that starts a server; it is stopped after the test, in whatever state."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            limits: LimitsConfig | None = None,
            batching: BatchingConfig | None = None,
            server_config: ServerConfig | None = None,
            curves: Mapping[str, CostCurve] | None = None,
            load: bool = True,
            tracer: Tracer | None = None,
        ) -> Running:
            config = quick_config(
                limits=limits or LimitsConfig(), batching=batching or BatchingConfig()
            )
            config = replace(config, server=server_config or config.server)
            kernels, registry = WatchedKernels(), LayerRegistry(small_layers())
            server = Server(config, tracer)
            port = await server.bind()

            def loader(_stop: threading.Event) -> Loaded:
                return Loaded(registry=registry, kernels=kernels, curves=curves or {})

            options = [("grpc.max_receive_message_length", -1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)

            async def close() -> None:
                kernels.gate.set()
                await channel.close()
                await server.abandon()

            stack.push_async_callback(close)
            running = Running(server, kernels, registry, port, channel, lambda: server.load(loader))
            if load:
                await running.load()
            return running

        yield start


@pytest.fixture
async def running(start: Start) -> Running:
    """A server with default limits."""
    return await start()
