"""Which copies of parameters have gradients that tell whether they compute the same: ranks must agree on it, as those
that do not tell yet are compared again, by a message."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shardwise.comm import Exchange
from shardwise.memory import Flat
from shardwise.optim.precision import norm


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


class Listed:
    slots = (Named("shared"), Named("part"))


@pytest.mark.parametrize("shared", [0.0, 1e-9, 1e-6, 1e-5, 3e-4, 1.0])
def test_ranks_whose_parts_have_other_norms_agree(shared: float, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = [[shared, 0.05], [shared, 1.0]]
    sent = [struct.pack("<2d", *every) for every in norms]
    flats: Any = [Listed()]

    def found_by(rank: int) -> frozenset[str]:
        def own(flats: list[Flat], norm_type: float, exchange: Exchange) -> list[float]:
            return norms[rank]

        monkeypatch.setattr(norm, "norms_of", own)
        return norm.check_copies(flats, {"shared"}, lambda mine: [mine], lambda _: sent)

    assert found_by(0) == found_by(1) == ({"shared"} if shared < 1e-4 else set())
