"""Asks a server's metrics port for the document; every failure is one sentence."""

import http.client
import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from qlinear_service.errors import ConfigError, QlinearError
from qlinear_service.watch.document import FORMAT

__all__ = ["DEFAULT_URL", "Unreachable", "base_url", "fetch"]

DEFAULT_URL = "http://127.0.0.1:9464"
MOST_BYTES = 4 * 1024 * 1024
"""Of a document; ours are a tenth of that at most. What is longer comes from something else."""


class Unreachable(QlinearError):
    """The server does not answer, or what answers is no qlinear server."""


def base_url(text: str) -> str:
    """Return the URL of a metrics port without a slash at its end.

    Args:
        text: HOST:PORT, or an http URL, perhaps of the page or of /metrics.

    Raises:
        ConfigError: it is neither.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        usable = usable and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"--url is {text!r}; expected the metrics port of a server: HOST:PORT or "
            f"http://HOST:PORT, e.g. {DEFAULT_URL}"
        )
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/now.json")
    return f"{parts.scheme}://{parts.netloc}{path}"


def fetch(url: str, timeout_seconds: float) -> dict[str, Any]:
    """Return the document of the server at `url`, as `base_url` gives it.

    Raises:
        Unreachable: nothing answers in time, or not with a document that this version can read.
    """
    # A proxy of the environment is for the world outside.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(f"{url}/now.json", timeout=timeout_seconds) as answer:
            text = answer.read(MOST_BYTES + 1)
    except HTTPError as error:
        raise Unreachable(
            f"{url}/now.json answers {error.code} {error.reason}; is this the metrics port of a "
            "qlinear server, and of one as new as this qlinear?"
        ) from None
    except URLError as error:
        raise _silent(url, str(getattr(error.reason, "strerror", "") or error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if type(error) is http.client.BadStatusLine:
            # Its text is what was sent: from the data port, bytes of HTTP/2.
            raise _silent(url, "what is there does not speak HTTP/1") from None
        raise _silent(url, str(error) or type(error).__name__) from None
    return _read(url, text)


def _silent(url: str, why: str) -> Unreachable:
    return Unreachable(
        f"no server answers at {url}: {why}; is it running, and is this its metrics port "
        "(--metrics-port, 9464 by default; the server prints it as it starts)?"
    )


def _read(url: str, text: bytes) -> dict[str, Any]:
    try:
        if len(text) > MOST_BYTES:
            raise ValueError
        document = json.loads(text)
        found = document["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unreachable(f"what answers at {url} is no qlinear server") from None
    if found != FORMAT:
        raise Unreachable(
            f"the server at {url} speaks format {found!r} of now.json and this qlinear {FORMAT}; "
            "use the qlinear of the server's version"
        )
    return dict(document)
