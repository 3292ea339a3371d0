"""Which GPUs machine code is made for, and what a name or a GPU means among them.

Machine code for these and no PTX: drivers refuse PTX that is newer than they are, and PTX compiled
on the spot for a GPU that nobody tested has given wrong results elsewhere. A GPU that is not in the
list is refused by its name.
"""

from collections.abc import Sequence

from qlinear_service.errors import BuildError
from qlinear_service.kernels.driver import ask_driver

__all__ = ["ARCHITECTURES", "architecture_of", "chosen_architectures"]

ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
"""Compute capabilities that machine code is made for. 90a is 9.0 with wgmma and setmaxnreg; it runs
on every 9.0. The code for 100 and 120 is compiled and not measured."""


def architecture_of(major: int, minor: int) -> str | None:
    """Return the architecture to build for a compute capability; None if it is none of ours."""
    return next((name for name in ARCHITECTURES if name.rstrip("a") == f"{major}{minor}"), None)


def chosen_architectures(names: Sequence[str]) -> tuple[str, ...]:
    """Return the architectures that `names` mean, each once, in the order of ARCHITECTURES.

    Args:
        names: "80", "90" or "90a" and so on; "native" means those of the GPUs in this machine.

    Raises:
        BuildError: a name is unknown, or "native" means nothing here.
    """
    known = {name.rstrip("a"): name for name in ARCHITECTURES} | {x: x for x in ARCHITECTURES}
    wanted = [known.get(name, name) for name in names if name != "native"]
    if "native" in names:
        wanted += _native_architectures()
    unknown = [name for name in wanted if name not in ARCHITECTURES]
    if unknown or not wanted:
        given = f"architecture {unknown[0]!r} is unknown" if unknown else "no architecture is named"
        raise BuildError(f"{given}; expected some of {', '.join(ARCHITECTURES)}, or native")
    return tuple(name for name in ARCHITECTURES if name in wanted)


def _native_architectures() -> list[str]:
    driver = ask_driver()
    if driver.problem:
        raise BuildError(f"native means nothing here: {driver.problem}")
    found = []
    for gpu in driver.gpus:
        architecture = architecture_of(gpu.major, gpu.minor)
        if architecture is None:
            raise BuildError(
                f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, for which there are "
                f"no kernels; expected one of {', '.join(ARCHITECTURES)}"
            )
        found.append(architecture)
    return found
