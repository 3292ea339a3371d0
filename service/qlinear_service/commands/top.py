"""`qlinear top`: what a running server does, in a terminal; the same as its page, for ssh.

Asks the metrics port for /now.json every few seconds. With --json it prints that document.
"""

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from qlinear_service.errors import ConfigError
from qlinear_service.watch.fetch import DEFAULT_URL, Unreachable, base_url, fetch
from qlinear_service.watch.screen import gone, screen

__all__ = ["add_arguments", "run"]

PIPE_WIDTH = 120  # of a file or pipe; a terminal has its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's address and how to show it."""
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server's metrics port, HOST:PORT or http://HOST:PORT [%(default)s]",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between looks [2]"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="of a look [5]"
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one document a line")


def run(args: argparse.Namespace) -> int:
    """Show the server until Ctrl-C, or once; return 0.

    Raises:
        ConfigError: an argument cannot be used.
        Unreachable: the server does not answer the first look, or any look with --json.
    """
    for name in ("interval", "timeout"):
        if not 0.1 <= getattr(args, name) <= 3600:
            given = getattr(args, name)
            raise ConfigError(f"--{name} is {given:g}; expected 0.1 to 3600 seconds")
    url = base_url(args.url)
    first = fetch(url, args.timeout)
    if args.json:
        return _print_json(args, url, first)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if args.once:
        console.print(screen(first, url, width=console.width, height=None))
        return 0
    if not console.is_terminal:
        raise ConfigError("the output is no terminal; use --once, or --json for machines")
    _watch(args, url, first, console)
    return 0


def _print_json(args: argparse.Namespace, url: str, document: dict[str, Any]) -> int:
    while True:
        print(json.dumps(document), flush=True)
        if args.once:
            return 0
        time.sleep(args.interval)
        document = fetch(url, args.timeout)


def _watch(args: argparse.Namespace, url: str, document: dict[str, Any], console: Console) -> None:
    """Show the server; one that is lost is shown as it was, until it is back."""

    def drawn(document: dict[str, Any]) -> RenderableType:
        return screen(document, url, width=console.width, height=console.height)

    now, lost_since = drawn(document), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(now, refresh=True)
            time.sleep(args.interval)
            try:
                found = fetch(url, args.timeout)
                now = drawn(found)
                document, lost_since = found, None
            except Unreachable as error:
                lost_since = lost_since or time.monotonic()
                now = drawn(gone(document, str(error), time.monotonic() - lost_since))
