"""`qlinear load`: drives a running server, shows what callers see, and checks sampled answers.

Only this module joins the client and `loadgen`. Progress goes to stderr, the report to stdout (to
stderr with `--json -`, where stdout is the JSON alone).
"""

import argparse
import asyncio
import difflib
import itertools
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from qlinear_client import AsyncClient, CallError, LayerInfo, ServerInfo
from qlinear_service.errors import ConfigError, QlinearError
from qlinear_service.loadgen.drive import drive_closed, drive_open
from qlinear_service.loadgen.options import ITEM_BYTES, add_flags
from qlinear_service.loadgen.progress import show_progress
from qlinear_service.loadgen.report import Facts, as_json, print_report
from qlinear_service.loadgen.samples import Samples, Verdict, compare_repeated
from qlinear_service.loadgen.tally import Answer, Tally, Window
from qlinear_service.loadgen.traffic import Payloads, Request, Traffic, arrivals

__all__ = ["add_arguments", "run"]

FAILURE_PAUSE_SECONDS = 0.01
"""A caller whose call failed at once must not turn the closed loop into a flood of failures."""
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
PIPE_WIDTH = 200  # a table in a file or pipe is not cut to 80 columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `qlinear load`."""
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load the server, and return 0, 1 for wrong answers, or 130 if interrupted.

    Raises:
        QlinearError: the server, a layer or the files to check against cannot be used.
    """
    try:
        return asyncio.run(_run(args))
    except CallError as error:
        raise QlinearError(f"{args.target}: {error.code.name}: {error}") from error
    except KeyboardInterrupt:  # while it connects or checks; the load itself ends with a report
        return INTERRUPTED


async def _run(args: argparse.Namespace) -> int:
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    # Without retries: what the server refuses is to be seen, not smoothed over.
    chosen = {} if args.transport == "auto" else {"transport": args.transport}
    async with AsyncClient(args.target, max_retries=0, **chosen) as client:
        info = await client.server_info()
        layers = _chosen(await client.list_layers(), args.layer)
        if max(args.rows) > info.max_request_rows:
            raise ConfigError(
                f"--rows {max(args.rows)}: {args.target} takes {info.max_request_rows} at most"
            )
        # torch, a large import, serves --check alone.
        files = None
        if args.check is not None:
            from qlinear_service.loadgen.reference_check import ReferenceFiles

            files = ReferenceFiles(args.check)
            files.require({layer.name: (layer.n, layer.k) for layer in layers})
        load = _Load(args, client, layers, seed)
        print(f"seed {seed}", file=sys.stderr)
        facts = await load.drive(info)
        if files is not None:
            verdict = await asyncio.to_thread(files.check, load.samples.kept, load.payloads)
        else:
            verdict = await load.repeat(batch_invariant=info.batch_invariant)
    return _finish(args, facts, load.tally, verdict if args.check_samples else None)


class _Load:
    """One run: the traffic, and what became of it."""

    def __init__(
        self, args: argparse.Namespace, client: AsyncClient, layers: list[LayerInfo], seed: int
    ) -> None:
        self._args = args
        self._client = client
        self._seed = seed
        self._traffic = Traffic(
            layers=[layer.name for layer in layers], rows=args.rows, dtypes=args.dtype, seed=seed
        )
        self.payloads = Payloads(
            k_of={layer.name: layer.k for layer in layers},
            max_rows=max(args.rows),
            dtypes=args.dtype,
            seed=seed,
        )
        most_values = max(layer.n for layer in layers) * max(args.rows)
        largest = most_values * max(ITEM_BYTES[dtype] for dtype in args.dtype)
        self.samples = Samples(most=args.check_samples, largest_bytes=largest, seed=seed)
        self.tally = Tally(Window(0.0, 0.0))

    async def drive(self, info: ServerInfo) -> Facts:
        """Send for the time asked for, or until Ctrl-C, and return what was done."""
        args, loop = self._args, asyncio.get_running_loop()
        opens = loop.time() + args.warmup
        self.tally = Tally(Window(opens, opens + args.duration))
        driving = asyncio.create_task(self._drive(opens - args.warmup, loop.time))
        console = Console(stderr=True)
        showing = asyncio.create_task(show_progress(self.tally, clock=loop.time, console=console))
        loop.add_signal_handler(signal.SIGINT, driving.cancel)
        interrupted = False
        try:
            await driving
        except asyncio.CancelledError:
            interrupted = True
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            showing.cancel()
            await asyncio.wait([showing])
        is_open = args.rate is not None
        return Facts(
            target=args.target,
            server_version=info.version,
            device=info.device,
            transport=args.transport,
            loop="open" if is_open else "closed",
            concurrency=None if is_open else args.concurrency,
            rate_per_second=args.rate,
            max_in_flight=args.max_in_flight if is_open else None,
            seed=self._seed,
            warmup_seconds=args.warmup,
            seconds=max(min(loop.time() - opens, args.duration), 0.0),
            interrupted=interrupted,
        )

    async def _drive(self, begin: float, clock: Callable[[], float]) -> None:
        requests = iter(self._traffic)
        if self._args.rate is None:
            concurrency = self._args.concurrency
            await drive_closed(
                requests, self._send, self.tally, concurrency=concurrency, clock=clock
            )
            return
        await drive_open(
            requests,
            self._send,
            self.tally,
            due_times=(begin + offset for offset in arrivals(self._args.rate, self._seed)),
            max_in_flight=self._args.max_in_flight,
            clock=clock,
        )

    async def _send(self, request: Request) -> Answer:
        x = self.payloads[request]
        try:
            y = await self._client.matmul(request.layer, x, timeout=self._args.timeout)
        except CallError as error:
            pause = error.retry_after_seconds or FAILURE_PAUSE_SECONDS
            return Answer(code=error.code.name, pause_seconds=pause)
        self.samples.offer(request, y)
        return Answer(nbytes=x.nbytes + y.nbytes)

    async def repeat(self, *, batch_invariant: bool) -> Verdict:
        """Send each sampled call again, alone, and compare the answers."""
        verdict = Verdict(against="the same call sent alone after the load")
        samples = sorted(self.samples.kept, key=attrgetter("request"))
        for request, group in itertools.groupby(samples, key=attrgetter("request")):
            try:
                y = await self._client.matmul(request.layer, self.payloads[request])
            except CallError:
                verdict.not_checked += len(list(group))
                continue
            for sample in group:
                compare_repeated(verdict, sample, y, batch_invariant=batch_invariant)
        return verdict


def _finish(args: argparse.Namespace, facts: Facts, tally: Tally, verdict: Verdict | None) -> int:
    console = Console(
        stderr=args.json == "-",
        markup=False,  # names come from the server: markup in them is text
        highlight=False,
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
    )
    print_report(console, facts, tally, verdict)
    if args.json is not None:
        text = json.dumps(as_json(facts, tally, verdict), indent=2) + "\n"
        _write(args.json, text)
    total = tally.total()
    if verdict is not None and verdict.wrong:
        return 1
    if facts.interrupted:
        return INTERRUPTED
    if not total.answered:
        raise QlinearError(f"{args.target}: no call was answered")
    return 1 if args.fail_on_error and (total.failed or total.not_sent) else 0


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise QlinearError(f"{path}: {error.strerror}") from error


def _chosen(layers: Sequence[LayerInfo], names: Sequence[str] | None) -> list[LayerInfo]:
    """Return the layers that were asked for, by full name or by a module that one model has."""
    if names is None:
        return list(layers)
    by_name = {layer.name: [layer] for layer in layers}
    for layer in layers:
        by_name.setdefault(layer.name.removeprefix(f"{layer.model}/"), []).append(layer)
    chosen = []
    for name in names:
        found = by_name.get(name, [])
        if len(found) != 1:
            near = found or [
                layer
                for close in difflib.get_close_matches(name, by_name)
                for layer in by_name[close]
            ]
            fault = "is in several models" if found else "is not served"
            listed = ", ".join(sorted({layer.name for layer in near or layers[:3]}))
            raise ConfigError(f"--layer {name!r} {fault}; name one of: {listed}")
        chosen += found
    return chosen
