"""Ranks that cannot complete a rendezvous: the missing ones are named, and no rank waits silently."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import shardwise as sw
import warm
from shardwise.comm import StartupBarrier
from shardwise.comm.watch import startup_barrier
from shardwise.errors import CommError, FaultError
from tests.free_port import free_port
from tests.patience import PATIENCE
from tests.thorough import thorough_only

Connect = Callable[[], TCPStore]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connections to one store; each rank has its own, as in a job."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    host = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    del host


def attended(
    connect: Connect, ranks: list[tuple[int, int]], *, timeout_seconds: float = PATIENCE, patience_seconds: float = 10
) -> list[FaultError | None]:
    """What each of these ranks, of worlds of these sizes, comes to."""
    outcomes: list[FaultError | None] = [None] * len(ranks)
    stores = [connect() for _ in ranks]

    def attend(index: int, rank: int, size: int) -> None:
        try:
            StartupBarrier(stores[index], "0", me=f"process {index}").wait(
                rank,
                size,
                "here",
                timeout_seconds=timeout_seconds,
                patience_seconds=patience_seconds,
                is_host=False,
            )
        except FaultError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=attend, args=(index, *rank)) for index, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_come_and_come_again(connect: Connect) -> None:
    for _ in range(4):
        assert attended(connect, [(0, 3), (1, 3), (2, 3)]) == [None] * 3
    keys = [key for key in connect().list_keys() if "/here/" in key]
    assert len(keys) <= 2 * 3  # those of the last meeting, and of the one before if somebody was slow


class OwnClock(threading.local):
    """Of each thread: it shows how long that has slept, and the first sleep ends when the others sleep, too."""

    now, has_slept, others = 0.0, False, threading.Barrier(2)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not self.has_slept:
            self.has_slept = True
            self.others.wait(PATIENCE)
        self.now += seconds


def test_a_rank_that_never_comes_is_named(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_barrier, "time", OwnClock())
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        errors = attended(connect, [(0, 4), (2, 4)], timeout_seconds=2.0, patience_seconds=0.8)
    for error in errors:
        assert error is not None
        assert (error.kind, error.ranks) == ("timeout", (1, 3))
        assert str(error).startswith("Ranks 1 and 3 of 4 never came to here, where the others have waited for 2 s.")
    assert [message.partition(" yet")[0] for message in caplog.messages] == [
        "Ranks 1 and 3 of 4 did not come to here"
    ] * 2  # one rank speaks, and ever more seldom


class Stopped:
    """The clock of a rank that stands still for a minute after its first look at who is there."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile, self._num_looks = meanwhile, 0

    def monotonic(self) -> float:
        self._num_looks += 1
        if self._num_looks == 1:
            return 0.0
        if self._num_looks == 2:
            self._meanwhile()
        return 60.0


def test_a_rank_that_was_stopped_for_longer_than_the_timeout_finds_who_came_meanwhile(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_comes() -> None:
        other = StartupBarrier(connect(), "0", me="other")
        assert other.wait(1, 2, "here", timeout_seconds=2, patience_seconds=1, is_host=False) == 1

    monkeypatch.setattr(startup_barrier, "time", Stopped(other_comes))
    assert attended(connect, [(0, 2)], timeout_seconds=2.0) == [None]


def test_two_processes_that_are_one_rank(connect: Connect) -> None:
    errors = attended(connect, [(0, 3), (1, 3), (1, 3)])
    for error in errors:
        assert error is not None
        assert (error.kind, error.ranks) == ("contradiction", (1,))
        assert str(error).startswith("Two processes are rank 1: process ")


def test_ranks_of_worlds_of_other_sizes(connect: Connect) -> None:
    errors = attended(connect, [(0, 2), (1, 3)])
    for error in errors:
        assert error is not None
        assert error.kind == "contradiction"
        assert "WORLD_SIZE=3" in str(error)
        assert "WORLD_SIZE=2" in str(error)


def test_the_launcher_cancels_a_rendezvous_that_cannot_complete(connect: Connect) -> None:
    launcher = StartupBarrier(connect(), "0", me="launcher")
    launcher.cancel_without([1], [0])  # nobody waits yet
    results: list[FaultError | None] = []
    waiting = threading.Thread(target=lambda: results.extend(attended(connect, [(0, 2)])))
    waiting.start()
    while waiting.is_alive():
        launcher.cancel_without([1], [0])
        waiting.join(0.02)
    (error,) = results
    assert error is not None
    assert (error.kind, error.ranks) == ("ended", (1,))
    assert str(error).startswith("Rank 1 has ended, and well, before it met the others in World.join().")


def test_a_rank_that_met_the_others_may_end(connect: Connect) -> None:
    assert attended(connect, [(0, 2), (1, 2)]) == [None] * 2
    store = connect()
    StartupBarrier(store, "0", me="launcher").cancel_without([1], [0])
    assert not any(key.endswith("/message") for key in store.list_keys())


def test_a_host_that_does_not_answer_is_reported(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    port = str(free_port())
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (
        caplog.at_level(logging.WARNING, logger="shardwise"),
        pytest.raises(CommError, match=f"Rank 1 of 2 could not meet the others at 127.0.0.1:{port}: .*refused"),
    ):
        sw.World.join(2, environment, patience_seconds=0.2)
    assert f"Rank 1 waits for rank 0, which does not answer at 127.0.0.1:{port}, for " in caplog.text
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_one_error(capfd: pytest.CaptureFixture) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(CommError, match=r"Rank 0 of 2 could not meet .*Address already in use"):
            sw.World.join(1, environment)
    assert capfd.readouterr().err == ""


def test_a_rank_that_ends_before_it_joins(tmp_path: Path) -> None:
    """The launcher knows at once; without it the others would wait for their timeout, of ten minutes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1': sys.exit(0)\n"
        "import shardwise as sw\n"
        "with sw.World.join(): raise AssertionError\n"
    )
    command = [warm.python(), "-m", "shardwise", "launch", "--timeout", str(PATIENCE), "--nproc", "3", str(script)]
    environment = {**os.environ, **warm.RANKS_TOO}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "shardwise: rank 1 of 3 ended early: its script was over, but the others still needed it.\n"
    ), done.stderr
    # One of the others may have been ended while it was still importing.
    assert "then raised shardwise.errors.FaultError: Rank 1 has ended, and well, before it met" in done.stderr


MEETS_AGAIN = """
import os
import shardwise as sw
from shardwise.errors import CommError

rank = int(os.environ["RANK"])
for number in range(9):
    try:
        with sw.World.join() as world:
            assert world.exchange(bytes([number])) == [bytes([number])] * 3
            if number % 3 == rank:
                raise ValueError("as in a script that retries")
            world.barrier()
            raise AssertionError("a rank is missing")
    except (ValueError, CommError):
        pass
with sw.World.join() as world:
    print(f"mean {world.mean(rank)}", flush=True)
"""


@thorough_only("slow; smaller tests beside it cover the same code")
def test_ranks_meet_again_in_the_same_processes(tmp_path: Path) -> None:
    """After a fault in each world before: no rank connects to what another one had in an earlier world, and closed."""
    script = tmp_path / "train.py"
    script.write_text(MEETS_AGAIN)
    command = [warm.python(), "-m", "shardwise", "launch", "--nproc", "3", str(script)]
    environment = {**os.environ, **warm.RANKS_TOO}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean 1.0") == 3
