"""A headless Chromium for tests of the page, which notes all that a page should not do."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MILLISECONDS = 30_000


@dataclass
class Opened:
    """A page of a server, and what it did."""

    page: Any
    address: str
    complaints: list[str] = field(default_factory=list)
    """Lines of the console, errors of scripts, dialogs."""
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """Return what the first such element shows."""
        return str(self.page.locator(selector).first.inner_text())

    def until(self, condition: str) -> None:
        """Wait until an expression of JavaScript holds.

        Asked from here: the page's policy lets nobody evaluate text inside it, Playwright included.
        """
        end = time.monotonic() + WAIT_MILLISECONDS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not in time: {condition}"
            self.page.wait_for_timeout(100)

    def is_well(self) -> None:
        """Check that nothing was complained of and nobody but the server was asked."""
        assert self.complaints == []
        own = {f"http://{self.address}/", f"http://{self.address}/now.json"}
        assert set(self.requests) == own


def _missing(what: str) -> None:
    """Skip, or fail in CI, which must not skip in silence."""
    how = f"{what} is missing: make browser"
    if os.environ.get("CI_REQUIRE_BROWSER") == "1":
        pytest.fail(f"CI must not skip this: {how}")
    pytest.skip(how)


@contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser inside the block."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        _missing("chromium")
    with sync_playwright() as playwright:
        # Its sandbox does not start as root; the pages are our own.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Any, address: str, *, scheme: str = "light", width: int = 1280
) -> Iterator[Opened]:
    """Open the page of the server at HOST:PORT inside the block."""
    viewport = {"width": width, "height": 900}
    context = browser.new_context(color_scheme=scheme, viewport=viewport)
    found = Opened(context.new_page(), address)
    page = found.page
    page.set_default_timeout(WAIT_MILLISECONDS)
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (found.complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: found.requests.append(request.url))
    try:
        page.goto(f"http://{address}/")
        found.until("document.getElementById('state').textContent !== '…'")
        yield found
    finally:
        context.close()
