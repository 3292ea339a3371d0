"""No kernel reads or writes one byte beyond a tensor."""

import subprocess
import sys
from pathlib import Path


def test_kernels_stay_inside_their_tensors() -> None:
    """In a process of its own, for an overrun ends it."""
    program = Path(__file__).with_name("guarded_call.py")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-500:]}"
    # Formats, shapes, both ends and dtypes: the plain body and the best one run everywhere.
    assert int(done.stdout) >= 2 * 16 * 6 * 2 * 3
