"""Real processes whose ranks die, stop, leave and come back: `elastic_rank.py` beside this file adds numbers up, and
fails if ever a sum is not that of the members that it should be of."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm
from shardwise.launch.elastic.image_folder import Images
from tests.patience import PATIENCE, wait_until
from tests.processes.launching import end
from tests.thorough import drawn, soak

RANK = Path(__file__).with_name("elastic_rank.py")


@contextlib.contextmanager
def job(out: Path, options: list[str], arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """An elastic job of four ranks. Whatever becomes of it, nothing stays behind."""
    command = [warm.python(), "-m", "shardwise", "launch", "--nproc", "4", *options, str(RANK), str(out), *arguments]
    environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield launcher
    finally:
        end(launcher)
        launcher.communicate()
    assert not [folder for folder in all_facts(out, "joined", "folder") if Path(folder).exists()]
    assert not [pid for pid in all_facts(out, "joined", "pid") if lives(pid)]


def run(out: Path, options: list[str], *arguments: str) -> tuple[int, str]:
    """To its end: exit status, and what the launcher and the ranks have said."""
    with job(out, options, list(arguments)) as launcher:
        _, said = launcher.communicate(timeout=PATIENCE)
        return launcher.returncode, said


def facts(out: Path, member: int) -> list[dict[str, Any]]:
    path = out / f"member-{member}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def all_facts(out: Path, what: str, key: str) -> list[Any]:
    return [one[key] for path in out.glob("member-*") for one in facts(out, int(path.name[7:])) if one["what"] == what]


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def regrouped(out: Path, member: int) -> list[dict[str, Any]]:
    return [one for one in facts(out, member) if one["what"] == "regrouped"]


def test_rank_0_and_its_neighbour_die_at_once_and_others_take_their_places(tmp_path: Path) -> None:
    status, said = run(tmp_path, ["--elastic", "2:4"], "60", "2", "kill:0:20", "kill:1:20")
    assert status == 0, said
    dead = max(all_facts(tmp_path, "dies", "time"))
    for member in (2, 3):
        met = regrouped(tmp_path, member)
        assert all(one["time"] - dead < PATIENCE for one in met if max(one["members"]) < 4)
        assert (met[0]["step"], met[0]["lost"][0]) == (20, 0)
    assert {tuple(one) for one in all_facts(tmp_path, "done", "members")} <= {(2, 3, 4, 5), (2, 3, 5, 4)}
    assert sorted(all_facts(tmp_path, "done", "rank")) == [0, 1, 2, 3]
    # the main one, the one that reads the news, the one that leaves launchers that were replaced, and the one that
    # knows whether there is a launcher
    assert set(all_facts(tmp_path, "done", "threads")) <= {3, 4}
    assert sorted(all_facts(tmp_path, "joined", "is_newcomer")) == [False] * 4 + [True] * 2
    assert "killed by SIGKILL" in said
    assert "Last status: rank " in said
    assert "continue after step 20" in said
    assert "4 ranks continue" in said


@soak("how long a stopped process is waited for")
def test_deaths_during_a_rendezvous_and_a_stopped_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies before it says that it is ready, the next while groups open, and the last is only stopped."""
    monkeypatch.setenv("TIMEOUT_SECONDS", "3")
    faults = ["kill:0:20", "opening:1:1", "stop:2:20"]
    status, said = run(tmp_path, ["--elastic", "1:4", "--retries", "0"], "40", "0", *faults)
    assert status == 0, said
    (met,) = regrouped(tmp_path, 3)
    assert (met["origins"], met["lost"], met["step"]) == ([3], [0, 1, 2], 20)
    assert "rank 2 was stopped, and did not answer" in said
    assert "1 rank continues after step 20" in said


@soak("who leaves while others meet")
def test_too_few_begin_again_and_one_that_raises_or_leaves_is_no_failure(tmp_path: Path) -> None:
    """Members are counted on: those of the second attempt are 4 to 7, and one of them leaves, one raises."""
    faults = ["kill:0:20", "regroup:1:20", "leave:5:10", "raise:4:30"]
    options = ["--elastic", "2:4", "--retries", "0", "--max-restarts", "1", "--timeout", "3"]
    status, said = run(tmp_path, [*options[:1], "3:4", *options[2:]], "40", "0", *faults)
    assert status == 1, said  # of four one left and one raised, which is one too many
    assert "restart 1 of 1 begins" in said
    assert "1 rank left on request. 3 ranks continue" in said
    assert "2 ranks are left, and the job needs 3 (--elastic)." in said
    assert "raised ValueError: a bad batch" in said
    (away,) = all_facts(tmp_path, "turned away", "has_asked")
    assert away is True


def test_one_that_exits_with_a_status_has_not_finished_and_is_replaced(tmp_path: Path) -> None:
    status, said = run(tmp_path, ["--elastic", "2:4"], "40", "1", "exit:1:20")
    assert status == 0, said
    assert "rank 1 raised SystemExit: 7" in said
    assert "Cause: node: Rank 1 ended with exit code 7. The others continue." in said
    assert sorted(all_facts(tmp_path, "done", "rank")) == [0, 1, 2, 3]


def await_facts(out: Path, what: str, number: int) -> None:
    wait_until(lambda: len(all_facts(out, what, "pid")) >= number, lambda: all_facts(out, what, "pid"))


@soak("kills processes at any moment")
def test_sums_stay_right_whichever_rank_is_killed(tmp_path: Path) -> None:
    """Random members, at random moments, often while others meet again; the dead are replaced."""
    chance = random.Random(1)
    num_kills = drawn(3, 20)
    dead: set[int] = set()  # a process that was killed may be there for a moment
    with job(tmp_path, ["--elastic", "1:4", "--retries", "1000"], ["100000", "0"]) as launcher:
        await_facts(tmp_path, "joined", 4)
        for _ in range(num_kills):
            time.sleep(chance.choice([0.0, 0.02, 0.1, 0.5]))
            living = [pid for pid in all_facts(tmp_path, "joined", "pid") if lives(pid) and pid not in dead]
            if len(living) > 1:
                dead.add(victim := chance.choice(living))
                os.kill(victim, signal.SIGKILL)
        killed = time.time()
        wait_until(  # so those who live have let somebody in
            lambda: launcher.poll() is not None or max(all_facts(tmp_path, "joined", "time")) >= killed,
            lambda: [facts(tmp_path, member)[-1] for member in range(4)],
        )
        assert launcher.poll() is None
        launcher.terminate()
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 143
    assert "ended by SIGTERM" in said


def test_the_next_launcher_removes_what_a_dead_one_left_in_memory(tmp_path: Path) -> None:
    with Images(tmp_path) as first:
        assert first.folder is not None
        (first.folder / "image").write_text("state")
        with Images(tmp_path) as second:
            assert first.folder.exists()  # its launcher lives
            assert second.folder != first.folder
        os.close(first._lock)
        with Images(tmp_path) as third:
            assert [path for path in tmp_path.iterdir() if path.is_dir()] == [third.folder]
        first.folder = None
    with Images(tmp_path / "none") as nowhere:
        assert nowhere.folder is None
