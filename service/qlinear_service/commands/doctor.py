"""`qlinear doctor`: has this machine what serving needs; with `--health`: is a server well.

Exit code 0 means yes and 1 no. `--health` is for probes of containers, which start it every few
seconds: it imports neither torch nor numpy.
"""

import argparse
import json
import os
import platform
import sys
from typing import Any

from qlinear_service import __version__
from qlinear_service.config import AUTO, ServerConfig
from qlinear_service.config_sources import resolve
from qlinear_service.diagnosis.finding import Finding, State
from qlinear_service.errors import ConfigError, QlinearError

__all__ = ["add_arguments", "run"]

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}
"""What one calls to reach a server that listens everywhere."""


MOST_SECONDS = 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the server would be started with, and the flags of --health."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--config", metavar="FILE", help="the server's TOML file")
    parser.add_argument(
        "--device", help="the device that is to compute: cpu, cuda:N, or auto [auto]"
    )
    parser.add_argument("--devices", metavar="N,N", help="GPUs that are to compute together")
    parser.add_argument("--cache-dir", metavar="DIR", help="the folder of built kernels")
    health = parser.add_argument_group("health of a running server")
    health.add_argument(
        "--health", action="store_true", help="ask a server instead of looking at this machine"
    )
    health.add_argument(
        "--target", metavar="HOST:PORT", help="the server [that of the configuration]"
    )
    health.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help='which health: "" or readiness (wants calls), liveness, startup [""]',
    )
    health.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait [5]"
    )


def run(args: argparse.Namespace) -> int:
    """Print what is found; return 0 if the server can serve, or does, and 1 if not.

    Raises:
        QlinearError: the configuration cannot be used, or the server does not answer.
    """
    given = {"device": args.device, "devices": args.devices, "cache_dir": args.cache_dir}
    flags = {name: value for name, value in given.items() if value is not None}
    config = resolve(flags=flags, environ=os.environ, config_file=args.config).config
    if args.health:
        return _ask_health(args, args.target or _address(config.server))
    # Not before they are needed: --health is to be quick.
    from qlinear_service.diagnosis.gpu import gpu_findings
    from qlinear_service.diagnosis.host import host_findings
    from qlinear_service.gpu.choice import choose_device

    kernels = config.kernels
    # A device that is named is examined, whatever it lacks.
    if kernels.device == AUTO and not kernels.devices:
        kernels = choose_device(kernels).config
    findings = []
    for examine in (host_findings, gpu_findings):
        for finding in examine(kernels):
            findings.append(finding)
            if not args.json:  # at once: building kernels takes a while
                print(f"{finding.state.value:<5}  {finding.name:<13}  {finding.text}", flush=True)
    device = ", ".join(kernels.device_names)
    faults = [finding for finding in findings if finding.state is State.FAULT]
    if args.json:
        print(json.dumps(_described(findings, device), indent=2))
    elif faults:
        names = ", ".join(finding.name for finding in faults)
        print(f"qlinear {__version__} cannot serve on {device}: {names}")
    else:
        print(f"qlinear {__version__} can serve on {device}")
    return 1 if faults else 0


def _described(findings: list[Finding], device: str) -> dict[str, object]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        "can_serve": all(finding.state is not State.FAULT for finding in findings),
        "findings": {
            finding.name: {"state": finding.state.value, "text": finding.text} | finding.facts
            for finding in findings
        },
    }


def _address(config: ServerConfig) -> str:
    if config.port == 0:
        raise ConfigError("the configured port is 0, any free one; name the server with --target")
    return f"{ANY_ADDRESS.get(config.host, config.host)}:{config.port}"


def _why_no_health(error: Any, target: str, service: str) -> str:
    """Return in one sentence why a server's health is not known.

    Args:
        error: a grpc.RpcError.
        target: what was asked; an address that cannot be one is what is told.
        service: which health of it.
    """
    # Not before something is wrong: the client imports numpy.
    from qlinear_client import CallError
    from qlinear_client._targets import checked_target, plain_words

    try:
        checked_target(target)
    except CallError as impossible:
        return impossible.message
    name, details = error.code().name, plain_words(error.details())
    if name == "NOT_FOUND":
        details = f"the server has no health called {service!r}; expected liveness, startup or "
        details += "readiness"
    if name == "UNIMPLEMENTED":
        details = "what answers there has no health; is it a qlinear server?"
    return f"{target}: {name}: {details}"


def _ask_health(args: argparse.Namespace, target: str) -> int:
    if not 0 < args.timeout <= MOST_SECONDS:
        given = f"{args.timeout:g}; expected seconds above 0, {MOST_SECONDS} at most"
        raise ConfigError(f"--timeout is {given}")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters is said below
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    # A proxy of the environment is for the world outside.
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with grpc.insecure_channel(target, options=options) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=args.service), timeout=args.timeout
            )
    except grpc.RpcError as error:
        raise QlinearError(_why_no_health(error, target, args.service)) from error
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if args.json:
        print(json.dumps({"target": target, "service": args.service, "status": status}))
    else:
        print(f"{target}: {status}", file=sys.stdout if status == "SERVING" else sys.stderr)
    return 0 if status == "SERVING" else 1
