"""Where Prometheus and promtool are on this machine, and what a test does where they are not."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from source_tree import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
UNPACKED = ROOT / ".venv/prometheus/usr/bin"

ANNOUNCED = {"qlinear_sweet_spot_rows"}
"""Named by the metrics' contract; a server may not show them yet."""

_GPU = "only a GPU has it"
NOT_ON_A_CPU = {
    "qlinear_gpu_clock_hertz": _GPU,
    "qlinear_gpu_memory_clock_hertz": _GPU,
    "qlinear_gpu_throttled": _GPU,
    "qlinear_gpu_throttle_reason": _GPU,
    "qlinear_gpu_memory_errors": _GPU,
    "qlinear_gpu_power_watts": _GPU,
    "qlinear_gpu_temperature_celsius": _GPU,
    "qlinear_tuned_bandwidth_bytes_per_second": "plans are tuned for GPUs",
    "qlinear_sweet_spot_rows": "needs a measured curve of costs",
}
"""Metrics that a server on a CPU may lack, each with its reason."""


def tool(name: str) -> str:
    """Return the path of `name`; without it skip, or fail in CI, which must not skip in silence."""
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if found is None:
        how = f"{name} is missing: make prometheus, or apt-get install prometheus"
        if os.environ.get("CI_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(f"CI must not skip this: {how}")
        pytest.skip(how)
    return found


def promtool(*words: str | Path) -> str:
    """Return what promtool says; a complaint of it fails the test."""
    done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rule_files() -> list[Path]:
    """The files of rules, sorted."""
    return sorted((PROMETHEUS / "rules").glob("*.yml"))


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Return all rules of a kind, "alert" or "record", by name."""
    groups = [
        group for path in rule_files() for group in yaml.safe_load(path.read_text())["groups"]
    ]
    found = [rule for group in groups for rule in group["rules"] if kind in rule]
    by_name = {rule[kind]: rule for rule in found}
    assert len(by_name) == len(found), "two rules have one name"
    return by_name


def metrics_of(expression: str) -> set[str]:
    """Return the server's metrics in a query, without the suffixes of histograms."""
    words = re.findall(r"(?<![\w:])qlinear_\w+(?![\w:])", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", word) for word in words}


def records_of(expression: str) -> set[str]:
    """Return the recorded series in a query."""
    return set(re.findall(r"(?<![\w:])(?:job|instance|qlinear):[\w:]+", expression))


def needs(expression: str) -> set[str]:
    """Return the server's metrics that a query needs, those behind recorded series included."""
    behind = (needs(rules("record")[name]["expr"]) for name in records_of(expression))
    return metrics_of(expression).union(*behind)
