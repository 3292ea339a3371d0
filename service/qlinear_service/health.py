"""Standard health on the data port, with a name for each question that is asked.

Liveness is SERVING from the first moment to the last and depends on nothing: a busy or starting
server must not be restarted for it. The names that say "send calls here" follow the lifecycle.
"""

from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]

__all__ = ["HEALTH_NAMES", "Health"]

LIVENESS = "liveness"
STARTUP = "startup"
TRAFFIC_NAMES = ("", "readiness", "qlinear.v1.QuantizedLinear")
HEALTH_NAMES = (LIVENESS, STARTUP, *TRAFFIC_NAMES)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Sets what the health service answers; `servicer` is what the server registers."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        """Show a live server that is not ready."""
        await self.servicer.set(LIVENESS, SERVING)
        for name in (STARTUP, *TRAFFIC_NAMES):
            await self.servicer.set(name, NOT_SERVING)

    async def ready(self) -> None:
        """Show a server that has started and wants calls."""
        for name in (STARTUP, *TRAFFIC_NAMES):
            await self.servicer.set(name, SERVING)

    async def not_ready(self) -> None:
        """Show a server that wants no more calls. It has started and lives: that stays."""
        for name in TRAFFIC_NAMES:
            await self.servicer.set(name, NOT_SERVING)
