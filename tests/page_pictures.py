"""Renews docs/page-light.png and docs/page-dark.png: the page of a real server under load.

`make picture` runs it. The layers are made up and as large as those of a small language model.
Prints what showing a document of 200 layers takes in the browser.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from browser_tools import chromium, opened
from random_layers import random_layer
from real_prometheus import served_model, under_load
from source_tree import ROOT
from watched_metrics import busy, crowd, port_of

from qlinear_service.kernels.packing import pack
from qlinear_service.packed_writer import write_packed

BLOCKS = 3
SHAPES = {
    "self_attn.q_proj": (2048, 2048),
    "self_attn.k_proj": (512, 2048),
    "self_attn.v_proj": (512, 2048),
    "self_attn.o_proj": (2048, 2048),
    "mlp.gate_proj": (5632, 2048),
    "mlp.up_proj": (5632, 2048),
    "mlp.down_proj": (2048, 5632),
}
"""Output and input features."""

LOAD = ("--rows", "1,4,16,48", "--concurrency", "24")
LOAD_SECONDS = 60
SHOWS = 50
SHOW = """shows => {
  const times = [];
  for (let i = 0; i < shows; i++) {
    const start = performance.now();
    now.layers.forEach(one => { one.rows_waiting = i; });
    show();
    document.body.offsetHeight;  // lays it out
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[shows >> 1];
}"""


def write_model(path: Path) -> None:
    """Write a packed file of all layers."""
    layers = [
        pack(
            random_layer(
                n=n, k=k, group_size=128, model="model", module=f"layers.{block}.{name}", seed=block
            )
        )
        for block in range(BLOCKS)
        for name, (n, k) in SHAPES.items()
    ]
    write_packed(path, "model", layers, specs=[layer.spec for layer in layers])


def main() -> None:
    """Take both pictures, and the time."""
    with chromium() as browser, TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        write_model(model)
        with served_model(model=model) as (target, metrics), under_load(target, *LOAD):
            time.sleep(LOAD_SECONDS)
            for scheme in ("light", "dark"):
                with opened(browser, metrics, scheme=scheme) as page:
                    page.until("document.querySelectorAll('#roofline circle').length > 3")
                    page.page.set_viewport_size({"width": 1280, "height": 1160})
                    page.page.screenshot(path=ROOT / f"docs/page-{scheme}.png")
                    page.is_well()
        many = port_of(busy(crowd(200, shapes=6, length=60)))
        with many as address, opened(browser, address) as page:
            took = page.page.evaluate(SHOW, SHOWS)
            print(f"200 layers, each changed: shown in {took:.1f} ms (median of {SHOWS})")


if __name__ == "__main__":
    main()
