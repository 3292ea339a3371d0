"""Three servers of small models and a name server; an image, where one can be built."""

from collections.abc import Iterator
from pathlib import Path

import image_tools
import pytest
from chaos.models import chaos_layers, write_models
from chaos.truth import Truth
from name_server import Names, name_server
from replicas import Replica, replicas

AGE_SECONDS = "2"
"""Of connections; what a client waits for is the interval at which it asks DNS."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models with every kind of layer."""
    return write_models(_folder(tmp_path_factory), chaos_layers())


def _folder(factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("replicas") / "models"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def truth() -> Truth:
    """What their answers must be."""
    return Truth(chaos_layers(), 1)


@pytest.fixture
def names() -> Iterator[Names]:
    """A name server; it knows no address yet."""
    with name_server() as running:
        yield running


@pytest.fixture
def three(models: Path) -> Iterator[list[Replica]]:
    """Three servers, none of them started; what batches cost is measured once for all tests."""
    with replicas(
        3, models.parent / "cache", models, "--max-connection-seconds", AGE_SECONDS
    ) as own:
        yield own


@pytest.fixture(scope="session")
def engine() -> str:
    """The program that runs containers; without it the test is skipped."""
    return image_tools.engine()


@pytest.fixture(scope="session")
def image(engine: str) -> str:
    """The image of the CPU target, built here."""
    return image_tools.build(engine)
