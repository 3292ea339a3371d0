"""Which texts are a W3C traceparent."""

import pytest

from qlinear_service.tracing import valid_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        f"00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-00",
        f"01-{TRACE}-{PARENT}-01",
        f"01-{TRACE}-{PARENT}-01-what.comes-later",  # a version that is not written yet
    ],
)
def test_valid_ones_pass_unchanged(text: str) -> None:
    assert valid_traceparent(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f" 00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n",
        f"01-{TRACE}-{PARENT}-01-" + "x" * 1000,
    ],
)
def test_others_are_ignored(text: str) -> None:
    assert valid_traceparent(text) is None
