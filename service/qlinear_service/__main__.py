"""Lets `python -m qlinear_service` do what `qlinear` does."""

import sys

from qlinear_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
