"""Replicas behind one name, for real: clients find new ones, and lose no call when others go.

A name server with changing answers, servers on addresses of the loopback network, the client as it
is: `round_robin`, DNS asked again when a connection ends. Only the connections' age is shortened.
"""

from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
from chaos.models import chaos_layers, write_models
from chaos.truth import Truth
from name_server import NAME, Names, name_server
from replica_load import under_load
from replicas import Replica, replicas, until_all_answer

from qlinear_client import _config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

AGE_SECONDS = 2
CALLS = 20
FOUND_SECONDS = 25.0
"""The client asks DNS at most every 10 s; a connection's age and a slow machine are the rest."""

BACK_SECONDS = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"), chaos_layers())


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(chaos_layers(), 1)


@pytest.fixture
def names() -> Iterator[Names]:
    with name_server() as running:
        yield running


@pytest.fixture
def three(tmp_path: Path, models: Path) -> Iterator[list[Replica]]:
    with replicas(3, tmp_path, models, "--max-connection-seconds", str(AGE_SECONDS)) as own:
        yield own


def target_of(names: Names, own: list[Replica]) -> str:
    """As a client in a cluster writes it, but for whom it asks."""
    return f"dns://127.0.0.1:{names.port}/{NAME}:{own[0].port}"


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_no_call_is_lost_when_replicas_come_restart_and_die(
    names: Names, three: list[Replica], truth: Truth, transport: str
) -> None:
    first, second, third = three
    first.start()
    second.start()
    names.show(first.host, second.host)
    with under_load(truth, target_of(names, three), transport) as load:
        until_all_answer([first, second], CALLS, BACK_SECONDS)

        third.start()
        names.show(*(replica.host for replica in three))
        until_all_answer([third], CALLS, FOUND_SECONDS)
        until_all_answer(three, CALLS, BACK_SECONDS)

        first.end(SIGTERM)  # the name still lists it
        first.start()
        until_all_answer(three, CALLS, BACK_SECONDS)

        second.end(SIGKILL)
        until_all_answer([first, third], CALLS, BACK_SECONDS)
        names.show(first.host, third.host)
        until_all_answer([first, third], CALLS, BACK_SECONDS)
    assert load.problems == []
    assert names.asked["A"] > 1
