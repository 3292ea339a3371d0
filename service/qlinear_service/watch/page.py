"""The page at the metrics port's root: one HTML document with its style and script inside it.

It is the same for every server and holds no data; its script asks for /now.json. Names of layers
come from files of anybody: the script shows them as text only, and the browser is told to run this
very script and no other, and to ask this server and no other.
"""

import base64
import hashlib
from importlib.resources import files

from qlinear_service.watch.document import FORMAT

__all__ = ["PAGE", "POLICY"]

SCRIPTS = ("units.js", "dom.js", "plots.js", "page.js")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE = _asset("page.css")
_SCRIPT = "".join(map(_asset, SCRIPTS)).replace("@FORMAT@", str(FORMAT))

PAGE = _asset("page.html").replace("@STYLE@", _STYLE).replace("@SCRIPT@", _SCRIPT).encode()
"""UTF-8."""

POLICY = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page's Content-Security-Policy."""
