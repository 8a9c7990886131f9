"""Ranks of an elastic job that get SIGTERM leave after their step; and the causes that the launcher reports."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import warm
from shardwise.comm.members.departure import ENDING, Departure
from tests.thorough import thorough_only

SCRIPT = Path(__file__).with_name("departing_rank.py")


class Membership:
    def __init__(self, folder: Path | None, size: int) -> None:
        self.folder, self.size, self.num_asked = folder, size, 0

    def leave(self) -> None:
        self.num_asked += 1


def test_it_leaves_once_and_only_where_the_others_can_go_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert not Departure().ask()  # not elastic
        for folder, size, limits, leaves in (
            (tmp_path, 3, "2:4", True),
            (tmp_path, 0, "2:4", True),  # between two generations
            (tmp_path, 2, "2:4", False),
            (None, 3, "2:4", False),
        ):
            membership, departure = Membership(folder, size), Departure()
            departure.follow(membership, limits)
            assert departure.ask() == leaves
            assert not departure.ask()
            assert membership.num_asked == leaves
        (tmp_path / ENDING).touch()
        membership, departure = Membership(tmp_path, 4), Departure()
        departure.follow(membership, "1:4")
        assert not departure.ask()
        assert signal.getsignal(signal.SIGTERM) is not departure._receive  # somebody else handles it
    finally:
        signal.signal(signal.SIGTERM, before)


CASES = {
    "leave": (0, "1 rank left on request. 2 ranks continue after step", 2),
    "leave-plain": (0, "1 rank left on request. 2 ranks continue after step", 2),
    "end": (143, "ended by SIGTERM; 3 of 3 ranks ended by themselves", 3),
    "code": (1, "cause: code: The same happened everywhere: it raised KeyError: 'labels' on all ranks", 0),
    "data": (1, "Cause: data: Rank 1 raised ValueError: no number, as rank 2 had at the same step", 0),
}


@thorough_only("five jobs of three processes")
@pytest.mark.parametrize("what", CASES)
def test_in_real_jobs(what: str) -> None:
    status, words, num_done = CASES[what]
    forks = {} if what == "end" else warm.RANKS_TOO  # there a rank ends its parent
    command = [warm.python(), "-m", "shardwise", "launch", "--nproc", "3", "--elastic", "1:3", "--retries", "0"]
    run = subprocess.run(
        [*command, "--max-restarts", "1", str(SCRIPT), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | forks | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == status, run.stderr
    assert words in run.stderr
    assert run.stdout.count("done after") == num_done
    assert run.stdout.count("saved after") == (3 if what == "end" else 0)
