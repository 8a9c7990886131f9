"""Ranks of an elastic job that get SIGTERM leave after their step; and the causes that the launcher reports."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import warm
from shardwise.comm.members.departure import ENDING, Departure
from shardwise.comm.members.member_messages import Announcement, MemberMessage
from shardwise.comm.members.membership import StoreMembership
from shardwise.errors import CommError
from tests.patience import PATIENCE
from tests.thorough import soak

SCRIPT = Path(__file__).with_name("departing_rank.py")


class Membership:
    def __init__(self, folder: Path | None, size: int, least: int) -> None:
        self.folder, self.size, self.least, self.num_asked = folder, size, least, 0

    def leave(self, *, must_go: bool = False) -> None:
        assert must_go
        self.num_asked += 1


def test_it_leaves_once_and_only_where_the_others_can_go_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert not Departure().ask()  # not elastic
        for folder, size, leaves in (
            (tmp_path, 3, True),
            (tmp_path, 0, True),  # between two generations
            (tmp_path, 2, False),
            (None, 3, False),
        ):
            membership, departure = Membership(folder, size, 2), Departure()
            departure.follow(membership)
            assert departure.ask() == leaves
            assert not departure.ask()
            assert membership.num_asked == leaves
        (tmp_path / ENDING).touch()
        membership, departure = Membership(tmp_path, 4, 1), Departure()
        departure.follow(membership)
        assert not departure.ask()
        assert signal.getsignal(signal.SIGTERM) is not departure._receive  # somebody else handles it
    finally:
        signal.signal(signal.SIGTERM, before)


class SlowRequests:
    """A channel whose requests to leave take until the member is ready, unless it waits for them."""

    member = 1

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self._is_ready = threading.Event()

    def has_sent(self) -> bool:
        return False

    def listen(self, first: int, read: Callable[[Announcement], bool]) -> threading.Thread:
        self._read = read
        thread = threading.Thread()
        thread.start()
        return thread

    def close(self) -> None: ...

    def send(self, message: MemberMessage, report: bytes | None = None) -> None:
        if message.kind == "leaving":
            self._is_ready.wait(0.3)
        self.kinds.append(message.kind)
        if message.kind == "ready":
            self._is_ready.set()
            self._read(Announcement("end", 0, text="It is over."))


def test_a_request_to_leave_is_sent_before_the_rank_is_ready_for_the_next_generation() -> None:
    """Otherwise the launcher could let all others leave, and find out afterwards that this one must go too."""
    channel = SlowRequests()
    membership = StoreMembership(cast(Any, channel), cast(Any, None))
    membership.leave(must_go=True)
    world = SimpleNamespace(fault=None, part=lambda: None, generation=0, members=(0, 1))
    with pytest.raises(CommError, match="It is over"):
        membership.regroup(cast(Any, world), b"")
    membership.end(None)
    assert channel.kinds == ["leaving", "ready", "done"]


CASES = {
    "leave": (0, "1 rank left on request. 2 ranks continue after step", 2),
    "leave-plain": (0, "1 rank left on request. 2 ranks continue after step", 2),
    "leave-two": (143, "so all are asked to end and can save", 3),
    "leave-all": (143, "so all are asked to end and can save", 3),
    "end": (143, "ended by SIGTERM; 3 of 3 ranks ended by themselves", 3),
    "code": (1, "cause: code: The same happened everywhere: it raised KeyError: 'labels' on all ranks", 0),
    "data": (1, "Cause: data: Rank 1 raised ValueError: no number, as rank 2 had at the same step", 0),
}


@soak("seven jobs of three processes, each with a signal at some moment")
@pytest.mark.parametrize("what", CASES)
def test_in_real_jobs(what: str) -> None:
    status, words, num_done = CASES[what]
    forks = {} if what == "end" else warm.RANKS_TOO  # there a rank ends its parent
    limits = "2:3" if what == "leave-two" else "1:3"
    command = [warm.python(), "-m", "shardwise", "launch", "--nproc", "3", "--elastic", limits, "--retries", "0"]
    run = subprocess.run(
        [*command, "--max-restarts", "1", str(SCRIPT), what],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | forks | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == status, run.stderr
    assert words in run.stderr
    assert run.stdout.count("done after") == num_done
    assert run.stdout.count("saved after") == (3 if status == 143 else 0)
