"""Replicas behind one name, for real: clients find new ones, and lose no call when others go.

A name server with changing answers, servers on addresses of the loopback network, the client as it
is: `round_robin`, DNS asked again when a connection ends. Only the connections' age is shortened.
"""

import pytest
from chaos.truth import Truth
from name_server import NAME, Names
from replica_load import under_load
from replicas import Replica, come_restart_and_die, start_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FOUND_SECONDS = 25.0
"""The client asks DNS at most every 10 s; a connection's age and a slow machine are the rest."""


def target_of(names: Names, own: list[Replica]) -> str:
    """As a client in a cluster writes it, but for whom it asks."""
    return f"dns://127.0.0.1:{names.port}/{NAME}:{own[0].port}"


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_no_call_is_lost_when_replicas_come_restart_and_die(
    names: Names, three: list[Replica], truth: Truth, transport: str
) -> None:
    start_two(names, three)
    with under_load(truth, target_of(names, three), transport) as load:
        come_restart_and_die(names, three, FOUND_SECONDS)
    assert load.problems == []
    assert load.answered > 100
    assert names.asked["A"] > 1
