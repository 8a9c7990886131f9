"""Everything that a plain loop does, right after steps whose updated parameters are still being gathered.

Like `test_plain_loops.py`, but with gathers that continue behind the step: between hosts, and on fake devices whose
collectives run at the last moment, with NaN in their outputs until then. So reading a parameter too early, or writing
to one that is being sent, is always detected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import loops_matrix
import pytest
from fake_devices import Devices
from test_plain_loops import NAMES, marked, wrong

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import sampled

pytestmark = sampled


def on_devices(num_ranks: int, work: Callable[[sw.World], Any], **more: Any) -> list[Any]:
    del more["shares_memory"]  # devices share no memory
    return Devices("late").run(num_ranks, work, **more)


def between_hosts(num_ranks: int, work: Callable[[sw.World], Any], **more: Any) -> list[Any]:
    return run_ranks(num_ranks, work, hosts=[f"host{rank}" for rank in range(num_ranks)], **more)


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
@pytest.mark.parametrize("preset", ["zero1", "zero2"])
@pytest.mark.parametrize("run", [on_devices, between_hosts])
def test_equal_or_refused_by_a_sentence_behind_a_step(
    run: Callable[..., list[Any]], preset: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops_matrix, "run_ranks", run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = loops_matrix.race(("step", name, "step", name, "step", "evaluate"), preset, shares_memory=True)
    assert not wrong(verdict, (name,), preset)
