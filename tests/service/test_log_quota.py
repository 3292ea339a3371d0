"""What clients get wrong cannot flood the log; what went wrong here is always in it."""

import json
import logging
import math

import pytest
from watched_metrics import Clock

from qlinear_service import statuses
from qlinear_service.errors import EngineFailure, InvalidRequest, Overloaded
from qlinear_service.log_quota import LogQuota
from qlinear_service.log_values import FORMATS, event


def test_a_period_has_so_many_lines_and_the_next_says_what_was_left_out() -> None:
    clock = Clock()
    quota = LogQuota(2, 10.0, clock)
    assert [quota.ask() for _ in range(5)] == [0, 0, None, None, None]
    clock.seconds += 9.9
    assert quota.ask() is None
    clock.seconds += 0.1
    assert [quota.ask() for _ in range(3)] == [4, 0, None]
    clock.seconds += 100
    assert quota.ask() == 1


def test_a_client_that_errs_all_day_has_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(statuses, "REFUSALS", LogQuota(50, 10.0, clock))
    caplog.set_level(logging.INFO, "qlinear_service.statuses")

    def refuse(error: Exception, times: int = 1) -> list[str]:
        caplog.clear()
        for _ in range(times):
            statuses.status_of(error, "MatMul", request="r")
        return [record.getMessage() for record in caplog.records]

    wrong = InvalidRequest("x is missing")
    lines = refuse(wrong, 1000)
    assert len(lines) == 50
    assert lines[-1] == (
        'call_refused method=MatMul request=r code=INVALID_ARGUMENT text="x is missing"'
    )
    # Overload has none, and takes none from the others; failures have theirs in any case.
    assert refuse(Overloaded("full", reason="queue_rows", retry_after_seconds=1.0), 1000) == []
    assert len(refuse(EngineFailure("0123"), 3)) == 3
    clock.seconds += 10
    assert refuse(wrong)[0].endswith(" left_out=950")
    # Whoever debugs wants to see all of them.
    caplog.set_level(logging.DEBUG, "qlinear_service.statuses")
    assert len(refuse(wrong, 200)) == 200


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_leaves_the_line_json(number: float) -> None:
    records: list[logging.LogRecord] = []
    logger = logging.Logger("made")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    event(logger, logging.INFO, "measured", seconds=number)

    def refused(word: str) -> None:
        raise ValueError(word)

    line = json.loads(FORMATS["json"]().format(records[0]), parse_constant=refused)
    assert line["seconds"] == str(number)
