"""The flags of `qlinear load` and what their values must look like."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["ITEM_BYTES", "add_flags"]

T = TypeVar("T")

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element of each dtype that can be sent."""

DEFAULT_CONCURRENCY = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    add = parser.add_argument
    add("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="(default: %(default)s)")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=_count,
        default=DEFAULT_CONCURRENCY,
        metavar="CALLERS",
        help="closed loop: so many that each wait for their answer (default: %(default)s)",
    )
    loop.add_argument(
        "--rate",
        type=_positive,
        metavar="CALLS/S",
        help="open loop: so many calls a second fall due at random (Poisson), however slow the "
        "server is",
    )
    add("--layer", action="append", metavar="NAME", help="repeat for several (default: all)")
    add(
        "--rows",
        type=_list_of(_count),
        default=[1],
        metavar="ROWS,ROWS",
        help="of a call (default: 1)",
    )
    add(
        "--dtype",
        type=_list_of(_dtype),
        default=["float16"],
        metavar="DTYPE,DTYPE",
        help="of the activations (default: float16)",
    )
    add("--duration", type=_positive, default=10.0, metavar="SECONDS", help="(default: 10)")
    add("--warmup", type=_seconds, default=1.0, metavar="SECONDS", help="not counted (default: 1)")
    add("--timeout", type=_positive, default=5.0, metavar="SECONDS", help="of a call (default: 5)")
    add(
        "--transport",
        choices=["auto", "unary", "stream"],
        default="auto",
        help="how calls travel; auto is the client's own choice (default: auto)",
    )
    add("--seed", type=int, metavar="N", help="repeats the traffic of an earlier run")
    add(
        "--max-in-flight",
        type=_count,
        default=1024,
        metavar="CALLS",
        help="open loop: calls due beyond that are not sent, and reported (default: 1024)",
    )
    _add_verdict_flags(parser)


def _add_verdict_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--check",
        type=Path,
        metavar="PATH",
        help="compare sampled answers with the exact ones from these files, the model served; "
        "without it each is compared with the answer to the same call sent alone afterwards",
    )
    add(
        "--check-samples",
        type=_whole,
        default=200,
        metavar="ANSWERS",
        help="answers to keep and check (default: 200; 0: none)",
    )
    add("--fail-on-error", action="store_true", help="exit 1 if any call failed or was not sent")
    add("--json", metavar="FILE", help="write the report as JSON; - is stdout")


def _list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    def read_list(text: str) -> list[T]:
        return [read(part.strip()) for part in text.split(",")]

    return read_list


def _dtype(text: str) -> str:
    if text not in ITEM_BYTES:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected one of {', '.join(ITEM_BYTES)}")
    return text


def _whole(text: str) -> int:
    return _number(text, int, "a whole number, 0 or more", lambda value: value >= 0)


def _count(text: str) -> int:
    return _number(text, int, "a whole number, 1 or more", lambda value: value >= 1)


def _seconds(text: str) -> float:
    return _number(text, float, "seconds, 0 or more", lambda value: 0 <= value < float("inf"))


def _positive(text: str) -> float:
    return _number(text, float, "a number above 0", lambda value: 0 < value < float("inf"))


def _number(text: str, kind: Callable[[str], T], rule: str, fits: Callable[[T], bool]) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected {rule}")
    return value
