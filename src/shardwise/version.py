"""The version, which git tags say: it is written into a package when that is built."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("shardwise")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0+unknown"


__version__ = _version()
