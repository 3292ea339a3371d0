"""`qlinear serve PATH`: reads the configuration, sets up logging, runs the server."""

import argparse
import asyncio
import functools
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

from qlinear_service.config import OptionError, ServiceConfig
from qlinear_service.config_sources import (
    add_flags,
    flag_values,
    format_json,
    format_table,
    resolve,
)
from qlinear_service.config_tracing import TracingConfig
from qlinear_service.errors import ConfigError
from qlinear_service.log_values import FORMATS, event
from qlinear_service.process import tune_process
from qlinear_service.tracing import Tracer

__all__ = ["add_arguments", "is_a_fault", "run"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PATH, one flag for each option of the configuration, and what shows them."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a packed file, a checkpoint folder, or a folder of several models",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print each option, its value and where that came from, and exit",
    )
    parser.add_argument("--json", action="store_true", help="print the configuration as JSON")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        QlinearError: the configuration, the address or the model cannot be used.
    """
    resolved = resolve(flags=flag_values(args), environ=os.environ, config_file=args.config)
    if args.print_config or args.json:
        print(format_json(resolved) if args.json else format_table(resolved))
        return 0
    if not args.path:  # "" would be the current folder: an unset variable in a script
        raise ConfigError("PATH is missing: name a packed file, a checkpoint folder or a folder")
    server = resolved.config.server
    _set_up_logging(server.log_level, server.log_format)
    return _serve(Path(args.path), resolved.config)


def _serve(path: Path, config: ServiceConfig) -> int:
    # This is the only place that imports grpc and torch, and does so late: some choices count only
    # before their first import.
    tune_process(os.environ)
    # gRPC's core writes lines of its own form to stderr; what matters arrives as an error here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from qlinear_service.gpu.choice import choose_device
    from qlinear_service.loading import Loaded, load
    from qlinear_service.server import serve

    choice = choose_device(config.kernels)

    def loader(stop: threading.Event) -> Loaded:
        level = logging.WARNING if choice.gpu_unused else logging.INFO
        device = ", ".join(choice.config.device_names)
        event(logger, level, "device", name=device, why=choice.why)
        return load(path, choice.config, stop)

    try:
        config = replace(config, kernels=choice.config)
    except OptionError as error:
        raise ConfigError(f"{error} (device is {config.kernels.device}: {choice.why})") from None
    announce = functools.partial(print, flush=True)
    tracer = _tracer(config.tracing)
    try:
        return asyncio.run(serve(config, loader, announce, tracer))
    finally:
        if tracer is not None:
            tracer.close()


def _tracer(config: TracingConfig) -> Tracer | None:
    """Return what sends spans to where the configuration says, None if it says nowhere.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not config.trace_endpoint:
        return None
    try:
        from qlinear_service.spans import otlp_tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trace_endpoint is set and the package {error.name!r} is missing; install it with: "
            "pip install 'qlinear[tracing]'"
        ) from None
    return otlp_tracer(config.trace_endpoint, config.trace_ratio)


def _set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[form]())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_a_fault)


def is_a_fault(record: logging.LogRecord) -> bool:
    """Say whether what gRPC logs is one: that a client has left before its answer was sent is not.

    It logs that as an error, with a traceback.
    """
    return not record.getMessage().startswith("ExecuteBatchError raised in core")
