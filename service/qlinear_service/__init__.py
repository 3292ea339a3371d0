"""The qlinear server: quantized linear layers answered over gRPC.

A request passes through `servicer`, `codec`, `batching`, `engine` and back: docs/architecture.md.
"""

from importlib.metadata import version

__version__ = version("qlinear")

__all__ = ["__version__"]
