"""Bytes and seconds as people read and write them."""

from __future__ import annotations

import math
import re

from shardwise.errors import ConfigError

PAGE = 4096
"""Bytes. Reads and writes that bypass the page cache begin and end on multiples of it, in the file and in memory."""
BYTES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def format_bytes(num_bytes: float) -> str:
    """`1536` as `1.5 KiB`."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    for name in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.1f} {name}"
    return f"{num_bytes / 1024:.1f} TiB"


def format_enough(num_bytes: int) -> str:
    """As `format_bytes`, rounded up: whoever gives what it says gives at least `num_bytes`."""
    tenth = next((BYTES[name] / 10 for name in "TGMK" if num_bytes >= BYTES[name]), 1)
    return format_bytes(math.ceil(num_bytes / tenth) * tenth)


def parse_bytes(text: str) -> int:
    """`"1.5 KiB"`, `"64M"` or `"4096"` in bytes; `ValueError` for anything else. Units are powers of 1024."""
    match = _BYTES_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes; write 4096, 64M or 1.5GiB")
    return int(float(match[1]) * BYTES[match[2].upper()])


def bytes_of(what: str, size: int | str) -> int:
    """The argument `what` of a call, in bytes. Raises `ConfigError` unless they are 0 or more."""
    try:
        num_bytes = parse_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise ConfigError(f"{what}: {error}.") from None
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise ConfigError(f"{what} is {size!r}; give a number of bytes of at least 0, such as 4096, '64M' or '1.5GiB'.")
    return num_bytes


def format_seconds(seconds: float) -> str:
    """`75.2` as `1m15s`, `0.0123` as `12 ms`, `0.0012` as `1.2 ms`."""
    if seconds < 0.01:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def format_count(count: float) -> str:
    """`33_700_000` as `33.7 M`."""
    for width, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " K")):
        if abs(count) >= width:
            return f"{count / width:.1f}{name}"
    return f"{count:.0f}"
