"""Which device computes, and why: what was asked for, or what this machine has.

Asks the driver and looks for a library; starts no GPU and builds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qlinear_service.config import KernelConfig
from qlinear_service.errors import ConfigError
from qlinear_service.kernels.architectures import ARCHITECTURES, architecture_of
from qlinear_service.kernels.build_cuda import read_record
from qlinear_service.kernels.cuda_library import find_cuda_library
from qlinear_service.kernels.driver import Driver, Gpu, ask_driver

__all__ = ["Choice", "architecture_for", "choose_device", "differing"]

INSTEAD = "serve with --device cpu, or run qlinear doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The device and the reason for it."""

    config: KernelConfig
    """With a device that is cpu or cuda:N."""
    why: str
    """One clause for people."""
    gpu_unused: bool = False
    """There is a GPU, nobody asked for the CPU, and yet the CPU computes."""


def choose_device(config: KernelConfig) -> Choice:
    """Return where to compute.

    Raises:
        ConfigError: a GPU is asked for by its number, and there is none, or none that is supported;
            or several that differ.
    """
    if config.cuda_ordinals:
        for ordinal in config.cuda_ordinals:
            architecture_for(ordinal)
        differ = differing(ask_driver(), config.cuda_ordinals)
        if differ:
            raise ConfigError(differ)
        first = replace(config, device=config.device_names[0])
        return Choice(config=first, why="it was asked for")
    if config.device == "cpu":
        return Choice(config=config, why="it was asked for")
    on_cpu = replace(config, device="cpu")
    if config.torch_only:
        return Choice(config=on_cpu, why="torch_only is for the CPU")
    driver = ask_driver()
    if driver.problem or not driver.gpus:
        return Choice(config=on_cpu, why=driver.problem or "the driver shows no GPU")
    gpu = driver.gpus[0]
    problem = _problem_of(gpu, driver, config)
    if problem:
        return Choice(config=on_cpu, why=f"{gpu.name} is there, but {problem}", gpu_unused=True)
    return Choice(config=replace(config, device="cuda:0"), why=f"{gpu.name} is there")


def architecture_for(ordinal: int) -> str:
    """Return the architecture of the GPU that is asked for, as kernels are built for it.

    Raises:
        ConfigError: there is no such GPU, or no kernels for it.
    """
    driver, asked = ask_driver(), f"device is cuda:{ordinal}, and"
    if driver.problem:
        raise ConfigError(f"{asked} {driver.problem}; {INSTEAD}")
    if ordinal >= len(driver.gpus):
        raise ConfigError(f"{asked} the driver shows {_listed(driver)}; {INSTEAD}")
    gpu = driver.gpus[ordinal]
    architecture = architecture_of(gpu.major, gpu.minor)
    if architecture is None:
        raise ConfigError(f"{asked} {_unsupported(gpu)}; {INSTEAD}")
    return architecture


def differing(driver: Driver, ordinals: Sequence[int]) -> str:
    """Return why these GPUs cannot compute together; "" if they can.

    Those of different kinds compute by different plans, and the same batch must have the same bits
    on whichever it runs.
    """
    gpus = [gpu for gpu in driver.gpus if gpu.ordinal in ordinals]
    kinds = {(gpu.name, gpu.major, gpu.minor) for gpu in gpus}
    if len(kinds) < 2:
        return ""
    listed = ", ".join(f"cuda:{gpu.ordinal} {gpu.name}" for gpu in gpus)
    return f"devices are {listed}; expected GPUs of one kind, or one server for each"


def _problem_of(gpu: Gpu, driver: Driver, config: KernelConfig) -> str:
    """Return why the GPU cannot be used as things are; "" if it can."""
    architecture = architecture_of(gpu.major, gpu.minor)
    if architecture is None:
        return _unsupported(gpu)
    library, why_not = find_cuda_library(config.cache_dir, (architecture,))
    if library is None:
        return f"its kernels are not: {why_not}; --device cuda:0 builds them where nvcc is"
    record = read_record(library)
    too_old = "" if record is None else driver.problem_with(record.compiler)
    if too_old:
        return f"{library} {too_old}"
    try:
        import torch  # late: takes a second, and nobody without a GPU comes here
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use it; a GPU needs a build of torch for CUDA"
    return ""


def _unsupported(gpu: Gpu) -> str:
    return (
        f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, for which there are no "
        f"kernels (there are some for {', '.join(ARCHITECTURES)})"
    )


def _listed(driver: Driver) -> str:
    names = ", ".join(f"cuda:{gpu.ordinal} {gpu.name}" for gpu in driver.gpus)
    return names or "no GPU"
