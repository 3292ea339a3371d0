"""The chaos suite: a real server, hundreds of callers, everything that goes wrong, and the account.

    python tests/chaos/run.py --calls 20000 --seed 1

A run has parts of some ten thousand calls with a seed and a server of their own; the same seed
draws the same calls and faults (when they meet is up to the machine). See docs/chaos.md.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "proto", "service", "client")]

from chaos.callers import Caller, World  # noqa: E402
from chaos.ledger import OK, Ledger  # noqa: E402
from chaos.models import chaos_layers, write_models  # noqa: E402
from chaos.network import Cutter, Victims  # noqa: E402
from chaos.process import Server, descriptors_of, settles  # noqa: E402
from chaos.streams import RawStream  # noqa: E402
from chaos.truth import Truth  # noqa: E402

CALLERS = 240
STREAM_CALLERS = 20
STREAM_SHARE = 0.15
WARM_SHARE, STEADY_SHARE = 0.2, 0.4
MOST_GROWTH_BYTES = 16 << 20
"""Of the server between two instants at which nothing is in: a leak of 1 KiB a call is more, and
malloc's spare megabytes are less."""

MOST_CACHED_BYTES = 16 << 20
"""What a dispatcher and its device remember of each kind of batch, on top of that: bounded, and
full only after tens of thousands of calls."""

CALLS_PER_PART = 20_000


@dataclass
class Part:
    """One part of a run, from start to account.

    Args:
        seed: of all that is drawn.
        calls: to be sent, about.
        folder: for models and logs.
        library: of a GPU that is none, to serve on; None: the CPU.
    """

    seed: int
    calls: int
    folder: Path
    library: Path | None = None
    problems: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = chaos_layers()
        self.models = self.folder / "models"
        if not self.models.exists():
            self.models.mkdir()
            write_models(self.models, layers)
        self.is_invariant = self.seed % 2 == 0
        flags = ("--batch-invariant",) if self.is_invariant else ()
        self.server = Server(self.models, self.folder, 1000 * self.seed, flags, self.library)
        self.ledger = Ledger(self.server.how_away)
        self.truth = Truth(layers, self.seed)

    async def run(self) -> None:
        """Send all calls; problems are collected, not raised."""
        began = time.monotonic()
        try:
            await self.server.start()
            await self._phase("warm", WARM_SHARE)
            descriptors = descriptors_of("self")
            before = self.server.descriptors(), self.server.anonymous_bytes()
            await self._phase("steady", STEADY_SHARE)
            await self._compare(*before)
            restarts = self._restarts(signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)
            await self._phase("restarts", 1 - WARM_SHARE - STEADY_SHARE, restarts)
            self._note(await self.server.end(signal.SIGTERM))
        finally:
            self.server.kill()
        self.ledger.check_sum()
        if not self.server.knows(self.ledger.incidents):
            self._note("a caller was told of an incident that the log does not know")
        if not await settles(lambda: descriptors_of("self"), descriptors):
            self._note(f"callers kept {descriptors_of('self') - descriptors} file descriptors")
        self.problems += [f"{n} times: {text}" for text, n in self.ledger.problems.items()]
        self.notes["seconds"] = time.monotonic() - began

    async def _phase(
        self, name: str, share: float, meanwhile: Awaitable[None] | None = None
    ) -> None:
        """Let all callers make their share of calls, beside what cuts and kills; then quiet."""
        cutter = Cutter(self.server.target, self.seed)
        world = World(
            truth=self.truth,
            ledger=self.ledger,
            target=self.server.target,
            cut_target=await cutter.start(),
            same_bits=self.is_invariant,
            is_away=lambda: self.server.is_away,
        )
        await world.open()
        victims = Victims(self.server.target, self.seed)
        async with beside(cutter.run(), victims.run()):
            calls = [self._callers(world, name, share), self._streams(world, name, share)]
            work = asyncio.gather(*calls, *([] if meanwhile is None else [meanwhile]))
            await work
        await world.close()
        await cutter.stop()
        for key, count in (("cut", cutter.cuts), ("killed clients", victims.killed)):
            self.notes[key] = self.notes.get(key, 0) + count
        await self._quiet()

    async def _callers(self, world: World, name: str, share: float) -> None:
        count = max(1, round(self.calls * share * (1 - STREAM_SHARE) / CALLERS))
        callers = [Caller(world, f"{self.seed} {name} {number}") for number in range(CALLERS)]
        await asyncio.gather(*(caller.run(count) for caller in callers))

    async def _streams(self, world: World, name: str, share: float) -> None:
        left = round(self.calls * share * STREAM_SHARE)

        async def caller(number: int) -> None:
            nonlocal left
            streams = itertools.count()
            while left > 0:
                await world.while_away()
                draw = random.Random(f"{self.seed} {name} stream {number} {next(streams)}")
                sent = await RawStream(world, draw).run()
                left -= sent  # not in one statement: others count down meanwhile

        await asyncio.gather(*(caller(number) for number in range(STREAM_CALLERS)))

    async def _restarts(self, *signals: signal.Signals) -> None:
        """End the server in the middle of everything, and start it again, at the same address."""
        draw = random.Random(f"{self.seed} restarts")
        for number in signals:
            await asyncio.sleep(draw.uniform(0.5, 1.5))
            self._note(await self.server.end(number))
            await asyncio.sleep(draw.uniform(0, 0.3))
            await self.server.start()

    async def _quiet(self) -> None:
        """Wait until the server holds nothing of any call."""

        def held() -> float:
            metrics = self.server.metrics()
            return metrics["qlinear_inflight_bytes"] + metrics.get("qlinear_queue_rows", 0)

        if not await settles(held, 0):
            self._note(f"{held():.0f} bytes and rows are held, and no call is in")

    async def _compare(self, descriptors: int, memory: int) -> None:
        """Compare with what the server had when nothing was in the last time."""
        if not await settles(self.server.descriptors, descriptors):
            self._note(f"{self.server.descriptors() - descriptors} file descriptors were kept")
        most = MOST_GROWTH_BYTES + (MOST_CACHED_BYTES if self.library is not None else 0)
        await settles(self.server.anonymous_bytes, memory + most, 5)
        grown = self.server.anonymous_bytes() - memory
        self.notes["grown MiB"] = round(grown / 2**20, 1)
        if grown > most:
            self._note(f"memory grew by {grown / 2**20:.1f} MiB")
        answered = self.ledger.answered - self.ledger.ends["asking", OK]
        if self.server.metrics()["answered"] < answered:
            self._note("the server has counted fewer answers than there were")

    def _note(self, problem: str) -> None:
        if problem:
            self.problems.append(problem)


@contextlib.asynccontextmanager
async def beside(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` until the end of the block."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(calls: int, seed: int, *, per_part: int = CALLS_PER_PART, keep: Path | None = None) -> bool:
    """Run parts with seeds from `seed` on until so many calls were sent; was all well?"""
    sent, well, began = 0, True, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = keep or Path(name)
        folder.mkdir(exist_ok=True)
        while sent < calls:
            part = Part(seed, min(per_part, calls - sent), folder)
            asyncio.run(part.run())
            sent += part.ledger.sent
            well = well and not part.problems
            print_part(part)
            seed += 1
    print(f"{sent} calls in {time.monotonic() - began:.0f} s: {'all well' if well else 'FAILED'}")
    return well


def print_part(part: Part) -> None:
    """Print its account, and how to run it again."""
    ledger, notes = part.ledger, ", ".join(f"{k} {v:.4g}" for k, v in part.notes.items())
    print(f"seed {part.seed}: {ledger.sent} sent = {ledger.answered} answered + {ledger.failed}"
          f" failed with a status; {notes}", flush=True)  # fmt: skip
    if part.problems:
        print(ledger.table())
        for problem in part.problems:
            print(f"  PROBLEM {problem}")
        print(f"  again: make chaos CALLS={part.calls} SEED={part.seed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=CALLS_PER_PART, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="[random]")
    parser.add_argument("--per-part", type=int, default=CALLS_PER_PART, help="[%(default)s]")
    parser.add_argument("--keep", type=Path, help="folder for models and the servers' logs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the server's end, too
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # of connections that are cut on purpose
    print(f"seed {args.seed}", flush=True)
    sys.exit(not run(args.calls, args.seed, per_part=args.per_part, keep=args.keep))


if __name__ == "__main__":
    main()
