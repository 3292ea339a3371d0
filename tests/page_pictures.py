"""Renews docs/page-light.png and docs/page-dark.png: the page of a real server under load.

`make picture` runs it. Prints what showing a document of 200 layers takes in the browser.
"""

import time

from browser_tools import chromium, opened
from real_prometheus import served_model, under_load
from source_tree import ROOT
from watched_metrics import busy, crowd, port_of

LOAD = ("--rows", "1,4,16,48", "--concurrency", "24")
LOAD_SECONDS = 75
SHOWS = 50


def main() -> None:
    """Take both pictures."""
    with chromium() as browser:
        with served_model() as (target, metrics), under_load(target, *LOAD):
            time.sleep(LOAD_SECONDS)
            for scheme in ("light", "dark"):
                with opened(browser, metrics, scheme=scheme) as page:
                    page.until("document.querySelectorAll('#roofline circle').length > 3")
                    page.page.set_viewport_size({"width": 1280, "height": 1160})
                    page.page.screenshot(path=ROOT / f"docs/page-{scheme}.png")
                    page.is_well()
        with port_of(busy(crowd(200, shapes=6, length=60))) as address:
            with opened(browser, address) as page:
                took = page.page.evaluate(
                    "n => { const times = []; for (let i = 0; i < n; i++) { const start = "
                    "performance.now(); now.layers.forEach(one => one.rows_waiting = i); show(); "
                    "document.body.offsetHeight; times.push(performance.now() - start); } "
                    "return times.sort((a, b) => a - b)[n >> 1]; }",
                    SHOWS,
                )
                print(f"200 layers, each changed: shown in {took:.1f} ms (median of {SHOWS})")


if __name__ == "__main__":
    main()
