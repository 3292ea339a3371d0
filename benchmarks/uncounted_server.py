"""`qlinear serve` with metrics that count nothing: what a call costs without them.

What is told of calls and batches goes nowhere; the clock is still read where metrics would be told.
"""

import sys

from qlinear_service import metrics


def _nothing(*_: object, **__: object) -> None:
    """Count nothing."""


for told in ("call_finished", "slot_filled", "replied", "waited", "batch_finished"):
    setattr(metrics.Metrics, told, _nothing)

if __name__ == "__main__":
    from qlinear_service.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
