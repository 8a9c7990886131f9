"""`importlib.metadata` says that DeepSpeed is installed, for libraries that ask before they import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path

NAME = "deepspeed"


class _Presented(Distribution):
    """A distribution without files, of the version whose names the facade has."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
            "top_level.txt": NAME,
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        return self._texts.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


class _Finder(DistributionFinder):
    """Finds that distribution, and no module."""

    def __init__(self, version: str) -> None:
        self._found = _Presented(version)

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  # as its base has it
    ) -> Iterator[Distribution]:
        if context.name is None or context.name.lower() == NAME:
            yield self._found


def present(version: str) -> None:
    """From now on, in this process, `importlib.metadata.version("deepspeed")` is `version`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(version))
