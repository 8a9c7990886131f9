"""Doctor on this very machine: two real processes meet, and none stays behind."""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest

from shardwise.cli.main import main
from shardwise.cli.meeting import meet


@pytest.mark.slow
def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--timeout", "60"])
    report = json.loads(capsys.readouterr().out)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["python"] == statuses["torch"] == statuses["distributed"] == statuses["loopback"] == "ok"
    assert report["healthy"] == ("fail" not in statuses.values()) == (status == 0)
    assert {"cores", "memory", "/dev/shm", "allocator", "threads", "gpus", "temp folder"} <= set(statuses)


def test_ranks_that_never_meet_are_ended() -> None:
    started = time.monotonic()
    meeting = meet(0.5, (sys.executable, "-c", "import time; time.sleep(600)"))
    assert meeting.trouble == "the two processes did not meet in time"
    assert time.monotonic() - started < 30
    assert not psutil.Process().children()


def test_a_rank_that_fails_is_quoted_and_the_other_is_ended() -> None:
    program = "import sys, time\nif sys.argv[1] == '0': time.sleep(600)\nsys.exit('no route to loopback')"
    meeting = meet(60, (sys.executable, "-c", program))
    assert meeting.trouble == "rank 1 ended with status 1: no route to loopback"
    assert not psutil.Process().children()
