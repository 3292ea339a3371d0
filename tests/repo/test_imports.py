"""Imports go one way: down the floors of the service, never between service and client.

A new module needs a line in FLOORS; that is the moment to think about where it belongs.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from source_tree import CLIENT, SERVICE, imports, module_name, python_files

# Lowest floor first. A module may import from its own floor and from those before it; the
# longest matching name decides ("kernels" is all of kernels.* that is not named elsewhere).
FLOORS: list[set[str]] = [
    {
        "__init__",
        "errors",
        "dtypes",
        "process",
        "publish",
        "partial_file",
        "log_quota",
        "log_values",
        "kernels.__init__",
        "kernels.layout",
    }
    | {
        "kernels.build",
        "kernels.build_cuda",
        "kernels.build_options",
        "kernels.cuda_library",
        "kernels.resources",
    }
    | {"kernels.architectures", "kernels.driver", "kernels.nvcc"}
    | {"kernels.ninja", "kernels.library_cache"},
    {"config", "config_fields", "config_sources", "layers", "kernels.torch_types", "tracing"}
    | {"config_kernels", "config_server", "config_tracing"}
    | {"metrics", "metric_calls", "metric_series"}
    | {"measured", "metric_families", "bandwidth", "roofline", "cost"}
    | {"scheduling", "fairness"},
    {"kernels"},
    {
        "wire",
        "codec",
        "work",
        "lanes",
        "batching",
        "pending",
        "ledger",
        "watchdog",
        "batcher",
        "batch_runs",
        "refusals",
        "in_flight",
        "results",
        "pieces",
        "slots",
        "transport",
    }
    | {"packed", "packed_metadata", "packed_writer", "checkpoints"},
    {"unread"},
    {"servicer", "handlers", "engine", "health", "lifecycle", "channel"}
    | {"streaming", "stream_call", "stream_reader", "calls", "statuses"}
    | {"watch", "metrics_server", "probe", "signals", "gpu", "loaded"}
    | {"dispatch"}
    | {"planning"}
    | {"selftest", "sample_layers", "diagnosis", "models", "loading", "loadgen", "conversion"}
    | {"callers", "curves", "runners", "spans"},
    {"server"},
    {"commands"},
    {"cli", "__main__"},
]

# What a module must not reach, not even through others: planning, configuration and errors are
# tested without a device or a network, and `qlinear call` runs without torch.
NEVER_REACHES: dict[str, set[str]] = {
    "errors": {"torch", "grpc"},
    "dtypes": {"torch", "grpc"},
    "config": {"torch", "grpc"},
    "batching": {"torch", "grpc"},
    "cost": {"torch", "grpc"},
    "scheduling": {"torch", "grpc", "asyncio"},
    "lanes": {"torch", "grpc", "asyncio"},
    "batcher": {"torch", "grpc", "opentelemetry"},
    "dispatch.abi": {"grpc"},
    "slots": {"torch", "grpc"},
    "pieces": {"torch", "grpc"},
    "metrics": {"torch", "grpc"},
    "tracing": {"torch", "grpc", "opentelemetry"},
    "metrics_server": {"torch", "grpc"},
    "engine": {"grpc"},
    "loadgen.drive": {"torch", "grpc"},
    "loadgen.report": {"torch", "grpc"},
    "cli": {"torch", "grpc"},
    "process": {"torch", "grpc"},
    "kernels.build": {"torch", "grpc", "numpy", "rich"},
    "kernels.resources": {"torch", "grpc", "numpy", "rich"},
    "commands.call": {"torch"},
    "commands.plan": {"torch", "grpc"},
    "commands.top": {"torch", "grpc", "numpy"},
    "watch.now": {"torch", "grpc"},
    "kernels.tuned_plans": {"torch", "grpc", "numpy", "rich"},
}

# What a module must not import itself.
NEVER_IMPORTS: dict[str, set[str]] = {
    "servicer": {"torch"},
    "transport": {"torch", "grpc"},
    "codec": {"asyncio", "queue", "qlinear_service.batching", "qlinear_service.batcher"},
}

USES_CLIENT = {"commands.call", "commands.doctor", "commands.load"}
CLIENT_MAY_IMPORT = {"grpc", "google", "ml_dtypes", "numpy", "qlinear", "qlinear_client"}


def short(path: Path) -> str:
    """A service module's name without the package, e.g. "kernels.layout"."""
    parts = path.relative_to(SERVICE).with_suffix("").parts
    return ".".join(parts)


FILES = {short(path): path for path in python_files(SERVICE)}


@cache
def service_imports(name: str) -> set[str]:
    """The service modules that a module imports, the packages around them included."""
    found: set[str] = set()
    for dotted in imports(FILES[name]):
        head, *parts = dotted.split(".")
        if head != "qlinear_service":
            continue
        for length in range(len(parts) + 1):
            stem = ".".join(parts[:length])
            found |= {stem, f"{stem}.__init__" if stem else "__init__"} & FILES.keys()
    return found - {name}


def floor_of(name: str) -> int | None:
    """The floor that a module lives on; None if the table does not know it."""
    stem = name
    while stem:
        for floor, names in enumerate(FLOORS):
            if stem in names:
                return floor
        stem = stem.rpartition(".")[0]
    return None


def reached(name: str) -> set[str]:
    """A module and all service modules that importing it runs."""
    return closure(name, service_imports)


def named_imports(name: str) -> set[str]:
    """`service_imports` without the packages that hold the module: those it does not ask for."""
    holders = {f"{name[:i]}.__init__" for i, sign in enumerate(name) if sign == "."}
    return service_imports(name) - {"__init__", *holders}


def closure(name: str, step: Callable[[str], set[str]]) -> set[str]:
    """Everything that can be reached from a module by steps, itself included."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(step(current))
    return seen


def outside(name: str) -> set[str]:
    """Top-level names of what a module imports itself."""
    return {dotted.split(".")[0] for dotted in imports(FILES[name])}


@pytest.mark.parametrize("name", FILES)
def test_every_module_imports_downward(name: str) -> None:
    floor = floor_of(name)
    assert floor is not None, f"{name} is not in FLOORS"
    for other in service_imports(name):
        other_floor = floor_of(other)
        assert other_floor is not None
        assert other_floor <= floor, f"{name} (floor {floor}) imports {other} ({other_floor})"


@pytest.mark.parametrize("name", FILES)
def test_no_module_imports_itself_through_others(name: str) -> None:
    for other in named_imports(name):
        assert name not in closure(other, named_imports), f"{name} -> {other} -> ... -> {name}"


@pytest.mark.parametrize("name", NEVER_REACHES)
def test_light_modules_stay_light(name: str) -> None:
    if name not in FILES:
        pytest.skip(f"{name} is not written yet")
    for other in reached(name):
        heavy = outside(other) & NEVER_REACHES[name]
        assert not heavy, f"{name} reaches {heavy} through {other}"


@pytest.mark.parametrize("name", NEVER_IMPORTS)
def test_each_module_keeps_to_its_hop(name: str) -> None:
    if name not in FILES:
        pytest.skip(f"{name} is not written yet")
    assert not imports(FILES[name]) & NEVER_IMPORTS[name]


def test_only_the_serve_command_knows_the_server() -> None:
    users = {name for name in FILES if "server" in service_imports(name)}
    assert users <= {"commands.serve"}


def test_service_and_client_meet_only_in_commands() -> None:
    users = {name for name in FILES if "qlinear_client" in outside(name)}
    assert users <= USES_CLIENT
    for path in python_files(CLIENT):
        heads = {dotted.split(".")[0] for dotted in imports(path)}
        assert "qlinear_service" not in heads, path


def test_the_client_needs_only_the_base_install() -> None:
    for path in python_files(CLIENT):
        for dotted in imports(path):
            head = dotted.split(".")[0]
            allowed = head in sys.stdlib_module_names or head in CLIENT_MAY_IMPORT
            assert allowed, f"{path.name} imports {head}"


def test_the_clients_core_does_not_know_its_shells() -> None:
    shells = {"qlinear_client._client", "qlinear_client._async_client"}
    for path in python_files(CLIENT):
        if module_name(path, CLIENT.parent) not in {*shells, "qlinear_client"}:
            assert not imports(path) & shells, path
