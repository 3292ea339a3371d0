"""What a serving process sets before it imports grpc, seen in processes of their own."""

import os
import subprocess
import sys

import pytest

from qlinear_service import process

CHURN = """
import os, resource, sys
from qlinear_service.process import tune_process
if sys.argv[1] == "tuned":
    tune_process(os.environ)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [bytes(2 << 20) for _ in range(4)]
before = faults()
for _ in range(200):
    blocks = [bytes(block) + b"1" for block in blocks[:2]]
    blocks = [block[: 2 << 20] for block in blocks]
print(faults() - before)
"""


def run(code: str, *words: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GRPC_"))}
    command = [sys.executable, "-c", code, *words]
    return subprocess.check_output(command, text=True, env={**clean, **environment})


def test_large_blocks_are_kept_instead_of_mapped_anew() -> None:
    """Page faults of a churn of 2 MiB blocks: 512 for each block, or next to none."""
    plain, tuned = int(run(CHURN, "plain")), int(run(CHURN, "tuned"))
    assert plain > 20_000
    assert tuned < plain / 10


def test_the_users_own_malloc_settings_stay() -> None:
    faults = int(run(CHURN, "tuned", MALLOC_MMAP_THRESHOLD_="65536"))
    assert faults > 20_000


@pytest.mark.parametrize(
    ("release", "given", "expected"),
    [
        ("1.78.2", {}, {}),
        ("1.80.0", {}, {"GRPC_EXPERIMENTS": "-event_engine_listener"}),
        ("1.85.3", {"GRPC_EXPERIMENTS": "mine"}, {"GRPC_EXPERIMENTS": "mine"}),
    ],
)
def test_the_event_engine_follows_the_release(
    monkeypatch: pytest.MonkeyPatch, release: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(process, "version", lambda name: release)
    monkeypatch.delitem(sys.modules, "grpc", raising=False)
    environ = {**given, "MALLOC_ARENA_MAX": "4"}  # keeps this process's malloc as it is
    process.tune_process(environ)
    assert environ == {**expected, "MALLOC_ARENA_MAX": "4", "OMP_WAIT_POLICY": "passive"}


def test_too_late_is_an_error() -> None:
    code = """
import os, grpc
from qlinear_service.process import tune_process
try:
    tune_process(os.environ)
except RuntimeError as error:
    print(error)
"""
    assert "before grpc is imported" in run(code)


def test_what_is_loaded_is_kept_from_the_garbage_collector() -> None:
    code = """
import gc
from qlinear_service.process import collect_rarely
collect_rarely()
print(gc.get_threshold()[0], gc.get_freeze_count() > 1000, gc.isenabled())
"""
    assert run(code).split() == ["50000", "True", "True"]
