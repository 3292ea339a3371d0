"""The NVIDIA driver, the GPUs, torch's CUDA and the GPU kernels of this machine.

GPU kernels that are not there are not built here, which takes minutes. Where the server computes on
the CPU, nothing of this is more than a note.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from qlinear_service.config import KernelConfig
from qlinear_service.diagnosis.finding import Finding, State
from qlinear_service.errors import BuildError, SelfTestError
from qlinear_service.gpu.choice import differing
from qlinear_service.kernels import cuda_abi
from qlinear_service.kernels.architectures import ARCHITECTURES, architecture_of
from qlinear_service.kernels.build_cuda import check_tools, read_record
from qlinear_service.kernels.cuda_abi import CudaDevice
from qlinear_service.kernels.cuda_library import PREBUILT, find_cuda_library
from qlinear_service.kernels.driver import Driver, Gpu, ask_driver

__all__ = ["gpu_findings"]

GIB = 1 << 30


def gpu_findings(config: KernelConfig) -> Iterator[Finding]:
    """Yield what is found, in the order in which things build on each other."""
    driver = ask_driver()
    ordinals = config.cuda_ordinals
    wanted = State.FAULT if ordinals else State.NOTE
    yield _driver(driver, wanted)
    kernels, library = _kernels(config.cache_dir, driver, wanted)
    yield kernels
    yield from _gpus(driver, library, ordinals)
    yield _torch(driver, wanted)
    for ordinal in ordinals:
        if library is not None and ordinal < len(driver.gpus):
            # Of several each has its own, and the name of the only one stays as it is.
            name = f"gpu {ordinal} test" if len(ordinals) > 1 else "gpu self-test"
            yield _self_test(library, ordinal, name)


def _driver(driver: Driver, wanted: State) -> Finding:
    facts = {"cuda_version": driver.cuda_version, "gpus": len(driver.gpus)}
    if driver.problem:
        return Finding(name="gpu driver", state=wanted, text=driver.problem, facts=facts)
    text = f"runs CUDA up to {_dotted(driver.cuda_version)}, shows {len(driver.gpus)} GPUs"
    return Finding(name="gpu driver", state=State.OK, text=text, facts=facts)


def _kernels(cache_dir: Path, driver: Driver, wanted: State) -> tuple[Finding, Path | None]:
    """Return what there is of a library for the GPUs here, and where it can be loaded from."""
    needed = [architecture_of(gpu.major, gpu.minor) for gpu in driver.gpus]
    path, why_not = find_cuda_library(cache_dir, [each for each in needed if each is not None])
    name = "gpu kernels"
    if path is None:
        try:
            tools = check_tools()
        except BuildError as error:
            return Finding(name=name, state=wanted, text=f"{why_not}; {error}"), None
        text = f"not built; a server that needs them builds them first ({tools}), or make cuda does"
        return Finding(name=name, state=State.NOTE, text=text), None
    facts = {"path": str(path), "prebuilt": path == PREBUILT}
    record = read_record(path)
    built_with = "" if record is None else record.compiler
    try:
        library = cuda_abi.declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        return Finding(name=name, state=wanted, text=f"{path} cannot be loaded: {error}"), None
    held = library.ql_cuda_architectures().decode()
    facts |= {"architectures": held.split(), "compiler": built_with}
    too_old = driver.problem_with(built_with)
    if too_old:
        return Finding(name=name, state=wanted, text=f"{path} {too_old}", facts=facts), None
    place = "prebuilt" if path == PREBUILT else "built"
    text = f"{place} for {held} with {built_with}: {path}"
    return Finding(name=name, state=State.OK, text=text, facts=facts), path


def _gpus(driver: Driver, path: Path | None, ordinals: Sequence[int]) -> Iterator[Finding]:
    """Yield each GPU, those that were asked for and are not there, and if several differ."""
    for gpu in driver.gpus:
        supported = _supported(gpu, path)
        state = State.OK if supported else State.FAULT if gpu.ordinal in ordinals else State.NOTE
        text = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.memory_bytes / GIB:.0f} GiB"
        if not supported:
            text += f": there are no kernels for it; expected one of {', '.join(ARCHITECTURES)}"
        facts = asdict(gpu) | {"supported": supported}
        yield Finding(name=f"gpu {gpu.ordinal}", state=state, text=text, facts=facts)
    for ordinal in ordinals:
        if not driver.problem and ordinal >= len(driver.gpus):
            text = f"cuda:{ordinal} is asked for, and the driver shows {len(driver.gpus)} GPUs"
            yield Finding(name=f"gpu {ordinal}", state=State.FAULT, text=text)
    differ = differing(driver, ordinals)
    if differ:
        yield Finding(name="gpus together", state=State.FAULT, text=differ)


def _supported(gpu: Gpu, path: Path | None) -> bool:
    """Say whether the library, or where there is none its sources, can compute on a GPU."""
    if path is None:
        return architecture_of(gpu.major, gpu.minor) is not None
    info = CudaDevice()
    library = cuda_abi.declare(ctypes.CDLL(str(path)))
    status = library.ql_cuda_device_info(gpu.ordinal, info)
    return status == cuda_abi.Status.OK and bool(info.supported)


def _torch(driver: Driver, wanted: State) -> Finding:
    """Return what torch can do with a GPU: tensors on it are torch's."""
    name = "gpu torch"
    try:
        import torch
    except ImportError as error:
        return Finding(name=name, state=wanted, text=f"torch cannot be imported: {error}")
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.version.cuda is None:
        text = f"torch {torch.__version__} is a build without CUDA; a GPU needs one with it"
        return Finding(name=name, state=wanted, text=text, facts=facts)
    text = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if torch.cuda.is_available():
        return Finding(name=name, state=State.OK, text=text, facts=facts)
    known = "" if driver.cuda_version is None else f" of CUDA {_dotted(driver.cuda_version)}"
    return Finding(
        name=name, state=wanted, text=f"{text} and finds no driver{known} for it", facts=facts
    )


def _self_test(path: Path, ordinal: int, name: str) -> Finding:
    try:
        from qlinear_service.diagnosis.gpu_self_test import tested_kinds

        kinds = tested_kinds(path, ordinal)
    except (BuildError, SelfTestError, RuntimeError, ImportError) as error:
        # RuntimeError: a GPU that is lost or full, in torch's words or ours.
        return Finding(name=name, state=State.FAULT, text=str(error).partition("\n")[0])
    text = f"cuda:{ordinal} agrees with the reference on {kinds} kinds of layers"
    return Finding(name=name, state=State.OK, text=text, facts={"kinds": kinds})


def _dotted(release: Sequence[int] | None) -> str:
    return "?" if release is None else ".".join(map(str, release))
