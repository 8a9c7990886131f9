"""Names of packages that are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

PACKAGES = (
    "checkpoint",
    "checkpoint.formats",
    "launch",
    "optim",
    "parallel.sequence",
    "parallel.tensor",
    "system.disk",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_where_it_is_said_to_be_and_others_are_missed(name: str) -> None:
    package: Any = importlib.import_module(f"shardwise.{name}")
    for one in package.__all__:
        assert getattr(package, one) is not None
    with pytest.raises(AttributeError, match=f"module 'shardwise.{name}' has no attribute 'Missing'"):
        _ = package.Missing
