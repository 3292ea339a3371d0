"""A wheel with kernels inside is for one platform; all else of packaging is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

PREBUILT = Path(__file__).parent / "service/qlinear_service/prebuilt"


class Wheel(bdist_wheel):
    """A wheel of any Python 3: of one platform if compiled kernels are in it, else of all."""

    def finalize_options(self) -> None:
        """Decide whether there is anything compiled."""
        super().finalize_options()
        self.root_is_pure = not any(PREBUILT.glob("*.so"))

    def get_tag(self) -> tuple[str, str, str]:
        """Return what stands in the name: kernels are loaded by name and know no Python."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"bdist_wheel": Wheel})
