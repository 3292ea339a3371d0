"""Metrics are those of one process, whatever the environment says."""

import os
import subprocess
import sys
from pathlib import Path

SCRAPE = """
from measured_layers import Spec, metrics_of, scrape
metrics = metrics_of(Spec("a", n=8))
metrics.call_finished("MatMul", ["a"], "OK", 0.001)
assert any(name == "qlinear_requests_total" for name, _ in scrape(metrics))
"""


def test_no_files_are_written_for_prometheus(tmp_path: Path) -> None:
    """Its multi-process mode keeps files of dead processes for ever, and reads them all."""
    folder = tmp_path / "multiprocess"
    folder.mkdir()
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", SCRAPE], env=environment, check=True, timeout=60)
    assert not list(folder.iterdir())
