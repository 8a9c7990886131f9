"""Makes `importlib.metadata` report that DeepSpeed is installed, for libraries that check before they import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path

NAME = "deepspeed"


class _DeepSpeedDistribution(Distribution):
    """A distribution without files."""

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
    """Finds this distribution, and no modules."""

    def __init__(self, version: str) -> None:
        self._distribution = _DeepSpeedDistribution(version)

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  # as in the base class
    ) -> Iterator[Distribution]:
        if context.name is None or context.name.lower() == NAME:
            yield self._distribution


def register_distribution(version: str) -> None:
    """Let `importlib.metadata.version("deepspeed")` return `version` in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(version))
