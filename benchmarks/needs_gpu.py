"""Says where the GPU kernels cannot be measured: on a machine without a GPU that torch can use."""

import sys

from qlinear_service.kernels.driver import ask_driver

USAGE = 2
"""The exit code of a benchmark that was called wrongly, or without a GPU."""


def gpu_missing(prog: str) -> bool:
    """Return whether there is no GPU to measure, which is said in one sentence on stderr.

    Args:
        prog: the benchmark, as its users call it.
    """
    problem = _problem()
    if problem:
        print(f"{prog}: needs a CUDA GPU; {problem}", file=sys.stderr)
    return bool(problem)


def _problem() -> str:
    driver = ask_driver()
    if driver.problem or not driver.gpus:
        return driver.problem or "the driver shows none"
    import torch  # late: it takes seconds, and there may be no GPU

    if torch.version.cuda is None:
        return f"torch {torch.__version__} cannot use one; it is no build for CUDA"
    return ""
