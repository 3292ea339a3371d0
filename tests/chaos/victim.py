"""A client process that calls until it is killed. Usage: victim.py TARGET TRANSPORT."""

import asyncio
import sys

import numpy as np

from qlinear_client import AsyncClient, CallError

IN_FLIGHT = 40


async def main(target: str, transport: str) -> None:
    x = np.ones((3, 96), dtype=np.float16)

    async def call(client: AsyncClient) -> None:
        while True:
            try:
                await client.matmul("one/up", x)
            except CallError:
                await asyncio.sleep(0.01)

    async with AsyncClient(target, transport=transport) as client:
        calls = [asyncio.create_task(call(client)) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(0)
        print("calls", flush=True)
        await asyncio.gather(*calls)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
