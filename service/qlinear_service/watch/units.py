"""Numbers as people read them: three digits and a unit."""

__all__ = ["amount", "big", "rate", "seconds", "share", "short_name"]


def seconds(value: float | None) -> str:
    """Return a time: "3.2 ms"; a dash for None."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale * 0.9995:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-6)} µs"


def amount(value: float) -> str:
    """Return bytes: "1.5 GiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale * 0.9995:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def big(value: float | None) -> str:
    """Return a number that may be large: "1.2 M"; a dash for None."""
    if value is None:
        return "–"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{_digits(value / scale)} {unit}"
    return _digits(value)


def rate(value: float | None) -> str:
    """Return bytes per second: "41 GB/s"; a dash for None."""
    if value is None:
        return "–"
    text = big(value)
    return f"{text}B/s" if " " in text else f"{text} B/s"


def share(value: float | None) -> str:
    """Return a share of one: "63 %", "0.4 %"; a dash for None."""
    if value is None:
        return "–"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"


def short_name(name: str, most: int) -> str:
    """Return `name`, shortened to `most` characters; most of its end, which tells layers apart."""
    if len(name) <= most:
        return name
    head = (most - 1) // 4
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def _digits(value: float) -> str:
    """Return three digits, without zeros behind the point."""
    if value >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
