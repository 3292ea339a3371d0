"""The page in a real Chromium: it renders, follows the traffic, and does nothing else."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from browser_tools import chromium, opened
from measured_layers import ROOFLINE, TELEMETRY, Spec, metrics_of
from real_prometheus import LAYER, K, served_model
from watched_metrics import HOSTILE, busy, crowd, port_of, traffic

from qlinear_client import Client
from qlinear_service.watch import units

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


def test_it_renders_and_follows_the_traffic_of_a_real_server(browser: Any) -> None:
    with served_model() as (target, metrics), opened(browser, metrics) as page:
        assert page.text("#state") == "serving"
        assert page.text("#healthy .headline") == "Yes, and idle"
        assert page.page.locator("#layers tr").count() == 36
        assert page.page.locator("#roofline circle").count() == 0
        assert page.page.locator("#roofline path.roof").count() >= 1
        with Client(target) as client:
            for _ in range(50):
                client.matmul(LAYER, np.ones((4, K), np.float16))
        page.until("document.querySelectorAll('#roofline circle').length === 1")
        page.until("document.querySelector('#healthy .headline').textContent === 'Yes'")
        row = page.text("#shapes tr").split("\t")
        assert row[0].strip() == "k384_n384_b4_g128"
        assert float(row[2]) > 0
        assert row[3].endswith("s")
        assert row[9].strip().endswith("B/s")
        assert page.text("#heat td[class^=h]").isdecimal()
        assert page.text("#time .headline").endswith("%")
        assert LAYER in page.text("#layers tr")
        page.until("document.querySelector('#calls-trend .wave').getAttribute('d').length > 10")
        page.is_well()


def test_it_is_readable_in_light_and_in_dark(browser: Any) -> None:
    specs = crowd(3, shapes=2)
    metrics = busy(specs)
    backs = {}
    with port_of(metrics) as address:
        for scheme in ("light", "dark"):
            traffic(metrics, specs)
            with opened(browser, address, scheme=scheme) as page:
                page.until("document.querySelectorAll('#heat td[class^=h]').length > 0")
                for selector in ("h1", ".headline", ".muted", "#shapes td", "#heat td[class^=h]"):
                    colours = page.page.locator(selector).first.evaluate(COLOURS)
                    assert contrast(*colours) >= 4.5, (scheme, selector, colours)
                backs[scheme] = page.page.evaluate(
                    "getComputedStyle(document.body).backgroundColor"
                )
                page.is_well()
    light, dark = (luminance(backs[scheme]) for scheme in ("light", "dark"))
    assert light > 0.8
    assert dark < 0.05


COLOURS = """element => {
  let back = element;
  while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor];
}"""


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(1, 2, 3)", as WCAG defines it."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """WCAG's ratio of two colours; 4.5 is what text needs."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_hostile_names_are_text(browser: Any) -> None:
    metrics = metrics_of(*(Spec(name, n=8) for name in HOSTILE), roofline=ROOFLINE)
    with port_of(metrics) as address, opened(browser, address) as page:
        names = page.page.locator("#layers td.name").all_text_contents()
        assert names[:4] == [f"m/{name}" for name in HOSTILE[:4]]
        assert page.page.locator("img").count() == 0
        assert page.page.locator("script").count() == 1
        assert "hacked" not in page.page.title()
        page.is_well()
        # Were a name ever to become markup, the browser would not run it either.
        page.page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', "
            "`<img src=x onerror=\"document.title='hacked'\">`)"
        )
        page.page.wait_for_timeout(300)
        assert "hacked" not in page.page.title()
        assert any("Content Security Policy" in one for one in page.complaints)


def test_a_lost_server_is_said_and_found_again(browser: Any) -> None:
    metrics = busy(crowd(3, shapes=1))
    with ExitStack() as serving:
        address = serving.enter_context(port_of(metrics))
        with opened(browser, address) as page:
            serving.close()
            page.until("document.getElementById('state').textContent === 'unreachable'")
            assert page.page.title() == "! qlinear unreachable"
            assert page.page.locator("#main.stale").count() == 1
            assert page.page.locator("#layers tr").count() == 3
            with port_of(metrics, int(address.rpartition(":")[2])):
                page.until("document.getElementById('state').textContent === 'serving'")
                assert page.page.locator("#main.stale").count() == 0


def test_a_server_of_another_version_brings_its_own_page(browser: Any) -> None:
    metrics = busy(crowd(3, shapes=1))
    with port_of(metrics) as address, opened(browser, address) as page:
        page.page.evaluate("document.body.dataset.first = 'yes'")
        page.page.wait_for_timeout(2500)
        assert page.page.evaluate("document.body.dataset.first") == "yes"
        metrics.version = "2"
        page.until("document.body.dataset.first === undefined")
        page.until("document.getElementById('state').textContent === 'serving'")
        assert "version 2" in page.text("#facts")
        page.is_well()


@pytest.mark.parametrize("body", ["[]", "null", "{}", '{"format": 99}', "<html>", '{"error": 1}'])
def test_what_is_no_document_is_no_answer(browser: Any, body: str) -> None:
    with port_of(busy(crowd(3, shapes=1))) as address, opened(browser, address) as page:
        page.page.route("**/now.json", lambda route: route.fulfill(body=body))
        page.until("document.getElementById('state').textContent === 'unreachable'")
        assert page.page.locator("#layers tr").count() == 3
        page.page.unroute_all()
        page.until("document.getElementById('state').textContent === 'serving'")
        page.is_well()


def test_200_layers_change_only_what_has_changed(browser: Any) -> None:
    specs = crowd(200, shapes=6, length=60)
    with port_of(busy(specs)) as address, opened(browser, address) as page:
        assert page.page.locator("#layers tr").count() == 200
        page.page.evaluate(
            "window.changes = 0; new MutationObserver(list => window.changes += list.length)"
            ".observe(document.getElementById('layers'), "
            "{subtree: true, childList: true, characterData: true, attributes: true})"
        )
        asked = len(page.requests)
        page.page.wait_for_timeout(4500)
        assert len(page.requests) >= asked + 2
        # Calls a second of each layer sink as the window goes on; nothing is made anew.
        assert page.page.evaluate("window.changes") <= 2 * 3 * 200
        page.page.evaluate("document.querySelector('#layers tr').dataset.mine = 'kept'")
        page.page.wait_for_timeout(2500)
        assert page.page.locator("[data-mine=kept]").count() == 1
        page.page.fill("#filter", "layers.7.")
        assert page.page.locator("#layers tr").count() == 1
        page.page.fill("#filter", "")
        page.page.click("#layers-head th:nth-child(3)")
        page.is_well()


def test_a_narrow_window_does_not_scroll_sideways(browser: Any) -> None:
    specs = crowd(3, shapes=2, length=90)
    metrics = busy(specs)
    with port_of(metrics) as address, opened(browser, address, width=400) as page:
        traffic(metrics, specs)
        page.until("document.querySelectorAll('#heat td[class^=h]').length > 0")
        assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_gauges_of_a_gpu_and_what_is_wrong_are_shown(browser: Any) -> None:
    told = TELEMETRY | {("qlinear_gpu_clock_hertz",): 1.98e9}
    specs = crowd(3, shapes=1)
    metrics = metrics_of(*specs, roofline=ROOFLINE, telemetry=told)
    with port_of(metrics) as address:
        traffic(metrics, specs)
        with opened(browser, address) as page:
            assert "1.98 GHz" in page.text("#facts")
            assert "clocked down" in page.text("#machine .headline")
            assert "keep the clock down" in page.text("#notes li.bad")


def test_numbers_read_the_same_on_the_page_and_in_the_terminal(browser: Any) -> None:
    values = [
        0.0,
        *(digit * 10.0**power for power in range(-9, 14) for digit in (1, 1.26, 4.567, 9.994)),
    ]
    with port_of(metrics_of()) as address, opened(browser, address) as page:
        for name in ("seconds", "amount", "big", "rate", "share"):
            shown = page.page.evaluate(f"values => values.map(units.{name})", values)
            assert shown == [getattr(units, name)(value) for value in values], name
        for name in ("seconds", "big", "rate", "share"):
            assert page.page.evaluate(f"units.{name}(null)") == "–"
