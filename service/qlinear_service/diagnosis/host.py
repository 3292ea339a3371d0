"""Packages, cache and CPU kernels of this machine.

CPU kernels that are not there are built, as the server would. Nothing heavy is imported before it
is looked at: a missing package is a finding and no traceback.
"""

import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from qlinear_service.config import KernelConfig
from qlinear_service.diagnosis.finding import Finding, State
from qlinear_service.errors import BuildError, SelfTestError

__all__ = ["host_findings"]

SERVER_EXTRA = 'extra == "server"'


def host_findings(config: KernelConfig) -> Iterator[Finding]:
    """Yield what is found, in the order in which things build on each other."""
    packages = _packages()
    yield packages
    yield _cache(config.cache_dir)
    if packages.state is State.OK:
        yield from _cpu_kernels(config)


def _packages() -> Finding:
    found: dict[str, str | None] = {}
    for requirement in requires("qlinear") or []:
        if SERVER_EXTRA in requirement.replace("'", '"'):
            name = requirement.partition(";")[0].rstrip().split(">")[0]
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
    missing = [name for name, release in found.items() if release is None]
    if missing:
        text = f"{', '.join(missing)} missing: pip install 'qlinear[server]'"
        return Finding(name="packages", state=State.FAULT, text=text, facts=dict(found))
    text = f"all of the server's are there, torch {found.get('torch')}"
    return Finding(name="packages", state=State.OK, text=text, facts=dict(found))


def _cache(cache_dir: Path) -> Finding:
    facts: dict[str, object] = {"path": str(cache_dir), "writable": True}
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir):
            pass
    except OSError as error:
        text = (
            f"{cache_dir} cannot be written ({error.strerror}): kernels that it does not hold are "
            "built at each start; name another folder with --cache-dir"
        )
        return Finding(name="cache", state=State.NOTE, text=text, facts=facts | {"writable": False})
    return Finding(name="cache", state=State.OK, text=f"{cache_dir} can be written", facts=facts)


def _cpu_kernels(config: KernelConfig) -> Iterator[Finding]:
    """Yield what the CPU kernels are and whether they compute rightly."""
    from qlinear_service.kernels.backends import load_kernels
    from qlinear_service.sample_layers import sample_layers
    from qlinear_service.selftest import run_self_test

    name = "cpu kernels"
    wanted = State.FAULT if config.device == "cpu" else State.NOTE
    try:
        kernels = load_kernels(
            cache_dir=config.cache_dir,
            threads=config.cpu_threads,
            torch_only=config.torch_only,
            batch_invariant=config.batch_invariant,
        )
    except BuildError as error:
        yield Finding(name=name, state=wanted, text=str(error))
        return
    unwanted = kernels.name == "torch" and not config.torch_only
    facts = {"name": kernels.name}
    state = State.NOTE if unwanted else State.OK
    yield Finding(name=name, state=state, text=kernels.description, facts=facts)
    name = "cpu self-test"
    try:
        kinds = run_self_test(kernels, sample_layers())
    except SelfTestError as error:
        yield Finding(name=name, state=wanted, text=str(error))
        return
    text = f"agree with the reference on {kinds} kinds of layers"
    yield Finding(name=name, state=State.OK, text=text, facts={"kinds": kinds})
