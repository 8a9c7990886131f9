"""Two processes tell how fast bytes go between them, by shared memory and by messages."""

from __future__ import annotations

import pytest

import warm
from shardwise.errors import LaunchError
from shardwise.fit.calibrate import links


@pytest.mark.parametrize("shares_memory", [True, False])
def test_between_two_ranks(monkeypatch: pytest.MonkeyPatch, shares_memory: bool) -> None:
    monkeypatch.setattr(links.sys, "executable", warm.python())
    monkeypatch.setenv("WARM_RANKS", "1")
    assert links.between_ranks(2**16, shares_memory=shares_memory) > 2**16


def test_ranks_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.sys, "executable", warm.python())
    monkeypatch.setenv("WARM_RANKS", "1")
    monkeypatch.setattr(links, "REPEATS", "many")
    with pytest.raises(LaunchError, match=r"could not be measured: .*many.* See shardwise doctor"):
        links.between_ranks(2**16, shares_memory=True)
