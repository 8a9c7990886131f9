"""Doctor on this very machine: two real processes meet, and none stays behind."""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest

from shardwise.cli.main import main
from shardwise.cli.meeting import meet


def children() -> set[psutil.Process]:
    """Other tests may have left helpers of the interpreter, such as the tracker of shared memory."""
    return set(psutil.Process().children())


@pytest.mark.slow
def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--timeout", "60"])
    report = json.loads(capsys.readouterr().out)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["python"] == statuses["torch"] == statuses["distributed"] == statuses["loopback"] == "ok"
    assert report["healthy"] == ("fail" not in statuses.values()) == (status == 0)
    assert {"cores", "memory", "/dev/shm", "shared memory", "allocator", "threads", "gpus", "temp folder"} <= set(
        statuses
    )


def test_ranks_that_never_meet_are_ended() -> None:
    started, before = time.monotonic(), children()
    meeting = meet(0.5, (sys.executable, "-c", "import time; time.sleep(600)"))
    assert meeting.trouble == "the two processes did not meet in time"
    assert time.monotonic() - started < 30
    assert children() <= before


def test_a_rank_that_fails_is_quoted_and_the_other_is_ended() -> None:
    program = "import sys, time\nif sys.argv[1] == '0': time.sleep(600)\nsys.exit('no route to loopback')"
    before = children()
    meeting = meet(60, (sys.executable, "-c", program))
    assert meeting.trouble == "rank 1 ended with status 1: no route to loopback"
    assert children() <= before
