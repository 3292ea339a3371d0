"""A real Prometheus watches a real server under load: every rule and every panel has data.

What needs a GPU is skipped with its reason where the server does not show it;
`test_dashboard.py` asks that of made-up series.
"""

import math
from collections.abc import Iterator

import pytest
from dashboard_queries import DASHBOARD, queries
from prometheus_tools import NOT_ON_A_CPU, needs, rules
from real_prometheus import Watched, until, watched_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("prometheus")) as made:
        yield made


def has_data(watched: Watched, query: str) -> None:
    """Wait until a query has data; skip if the server lacks what it needs, for a listed reason."""
    shown = watched.exposition()
    lacking = [name for name in needs(query) if f"\n{name}" not in shown]
    for name in lacking:
        if reason := NOT_ON_A_CPU.get(name):
            pytest.skip(f"{name}: {reason}")
    until(f"data of {query}", lambda: watched.values(query))


@pytest.mark.parametrize("name", rules("record"))
def test_every_recording_rule_has_data(watched: Watched, name: str) -> None:
    expr = rules("record")[name]["expr"]
    has_data(watched, expr)
    has_data(watched, name)


@pytest.mark.parametrize("name", queries())
def test_every_query_of_the_dashboard_has_data(watched: Watched, name: str) -> None:
    has_data(watched, queries()[name])


def test_variables_of_the_dashboard_have_values(watched: Watched) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["query"][len("label_values(") : -1].split(", ")
            until(
                variable["name"],
                lambda m=metric, x=label: watched.api(f"label/{x}/values", **{"match[]": m}),
            )


def test_no_rule_fails(watched: Watched) -> None:
    def evaluated() -> list[dict[str, str]]:
        groups = watched.api("rules")["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = until("all rules are evaluated", evaluated)
    assert len(found) == len(rules("record")) + len(rules("alert"))
    assert [rule for rule in found if rule["health"] != "ok"] == []


def test_refusals_are_on_their_way_to_an_alert_and_the_server_is_not_down(
    watched: Watched,
) -> None:
    pending = 'ALERTS{alertname="QlinearCallsRejected"}'
    until("refused calls make an alert pending", lambda: watched.values(pending))
    until("a scrape that worked", lambda: watched.values('up{job="qlinear"}') == [1])
    firing = 'ALERTS{alertname=~"QlinearDown|QlinearNotReady", alertstate="firing"}'
    assert not watched.values(firing)


def test_recorded_bandwidth_is_the_bytes_over_the_seconds_between_two_scrapes(
    watched: Watched,
) -> None:
    record = "qlinear:kernel_bandwidth_bytes_per_second:rate1m"
    until("bandwidth", lambda: watched.values(record))
    series = watched.api("query", query=f"{record}[1m]")["result"][0]
    labels = ", ".join(f'{k}="{v}"' for k, v in series["metric"].items() if k != "__name__")

    def grown(counter: str, moment: float) -> float:
        query = f"{counter}{{{labels}}}[1m]"
        (found,) = watched.api("query", query=query, time=str(moment))["result"]
        return float(found["values"][-1][1]) - float(found["values"][0][1])

    # A scrape that was under way while the rule looked is missing in that one of its values.
    by_hand = [
        grown("qlinear_kernel_bytes_total", at) / grown("qlinear_kernel_busy_seconds_total", at)
        for at, _ in series["values"]
    ]
    recorded = [float(value) for _, value in series["values"]]
    equal = [math.isclose(a, b, rel_tol=1e-6) for a, b in zip(recorded, by_hand, strict=True)]
    assert any(equal), (recorded, by_hand)
