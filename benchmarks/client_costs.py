"""What one call costs the client and the server together, for each transport of the client.

Decides the client's default: a transport that is cheap for one and dear for the other is not.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
from callers import through_client
from processes import ServerProcess

from qlinear_client import AsyncClient

WARMUP_SECONDS = 0.3


async def measure_client(
    server: ServerProcess, layer: str, k: int, in_flight: int, *, runs: int, seconds: float
) -> list[dict[str, Any]]:
    """Return medians of alternating runs, one entry for each transport."""
    x = np.random.default_rng(k).standard_normal((1, k)).astype(np.float16)
    clients = {way: AsyncClient(server.target, transport=way) for way in ("unary", "stream")}
    costs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for client in clients.values():
        await through_client(client, layer, x, in_flight=in_flight, seconds=WARMUP_SECONDS)
    for number in range(runs):
        ways = list(clients)
        for way in ways if number % 2 == 0 else reversed(ways):
            own, theirs = time.process_time(), server.cpu_seconds()
            loop = await through_client(
                clients[way], layer, x, in_flight=in_flight, seconds=seconds
            )
            own, theirs = time.process_time() - own, server.cpu_seconds() - theirs
            costs[way].append((own / loop.calls, theirs / loop.calls))
    for client in clients.values():
        await client.close()
    return [
        {
            "transport": way,
            "client_cpu_seconds": statistics.median(own for own, _ in pairs),
            "server_cpu_seconds": statistics.median(theirs for _, theirs in pairs),
            "sum_cpu_seconds": statistics.median(own + theirs for own, theirs in pairs),
        }
        for way, pairs in costs.items()
    ]
