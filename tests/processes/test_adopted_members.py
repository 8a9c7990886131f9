"""The process on a host of an elastic job, whose launcher is lost and another one takes over: what it tells that one of
the processes that it has started."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.hosts.host_messages import Inbox, Outbox, order, packed
from shardwise.launch.hosts.members import MemberAgent
from shardwise.launch.job import Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog
from shardwise.system.launcher_address import LauncherAddress
from tests.patience import wait_until

RANK = """#!/bin/sh
env > "$RECORDS/env-$SHARDWISE_MEMBER.draft"
mv "$RECORDS/env-$SHARDWISE_MEMBER.draft" "$RECORDS/env-$SHARDWISE_MEMBER"
exec sleep 100
"""


class Launcher:
    """What a host hears and says, without a connection."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def write(self, block: bytes) -> None:
        self.heard.append(json.loads(block[1:]))

    def flush(self) -> None: ...
    def close(self) -> None: ...

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["kind"] in kinds]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[MemberAgent, Launcher, Path]]:
    (tmp_path / "memory").mkdir()
    (tmp_path / "python").write_text(RANK)
    (tmp_path / "python").chmod(0o755)
    launcher, (reads, writes) = Launcher(), os.pipe()
    with SignalLog() as signals, Folder(None) as folder, Images(tmp_path / "memory") as images:
        agent = MemberAgent(Inbox(reads), Outbox(launcher), folder, images, signals)
        agent._job = Job(("train.py",), 3, python=str(tmp_path / "python"))
        try:
            yield agent, launcher, tmp_path
        finally:
            agent._end_alone()
            for descriptor in (reads, writes, *agent._lives.values()):
                os.close(descriptor)


def tell(agent: MemberAgent, do: str, **details: Any) -> None:
    message = order(packed({"do": do, **details}))
    assert message is not None, "it is not of the form that hosts take"
    agent._answer(message)


def start(agent: MemberAgent, out: Path, number: int) -> dict[str, str]:
    """A process without a token, as over a connection that others can read; its environment."""
    attempt = {"address": "h", "run_id": "run", "token": "", "port": 1, "number": 0, "max_restarts": 0}
    variables = {"SHARDWISE_MEMBER": str(number), "RECORDS": str(out)}
    tell(agent, "member", number=number, rank=number, size=3, local=number, attempt=attempt, environment=variables)
    path = out / f"env-{number}"
    wait_until(path.exists)
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def until(agent: MemberAgent, launcher: Launcher, number: int) -> None:
    """Until it has reported so many ends."""

    def has_reported() -> bool:
        agent._watch()
        return len(launcher.of_kind("member")) >= number

    if len(launcher.of_kind("member")) < number:
        wait_until(has_reported)


def test_the_next_launcher_hears_of_all_processes_that_the_last_one_knew(
    host: tuple[MemberAgent, Launcher, Path],
) -> None:
    agent, launcher, out = host
    tell(agent, "trust", token="word", environment={"SECRET": "kept"})
    environment = start(agent, out, 0)
    assert (environment["SHARDWISE_TOKEN"], environment["SECRET"]) == ("word", "kept")
    for number in (1, 2):
        start(agent, out, number)
    pids = dict(zip((0, 1, 2), map(agent._ranks.pid, range(3)), strict=True))
    os.kill(pids[1], signal.SIGKILL)
    until(agent, launcher, 1)
    kept = {"label": "host-4", "state": "", "number": 0, "version": 7, "hosts": [["host-4", "h", 1]], "before": []}
    tell(agent, "keep", **kept, seconds=60)
    assert launcher.of_kind("kept") == [{"kind": "kept", "version": 7}]

    launcher.heard.clear()
    tell(agent, "adopt", members=[0, 1, 5])  # not 2: it was started, and that was not written down
    tell(agent, "launcher", number=1, host="i", port=2)
    told, ended = launcher.of_kind("adopted", "member")
    assert told["members"] == [0, 1]
    assert (ended["outcome"]["rank"], ended["outcome"]["exit_code"]) == (1, -signal.SIGKILL)
    assert agent._images.folder is not None
    assert LauncherAddress.read(agent._images.folder) == LauncherAddress(1, "i", 2)
    until_ended(pids[2])
    agent._watch()
    assert launcher.of_kind("member") == [ended], "nobody knows of that one"
    assert psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE
    (out / "env-2").unlink()
    start(agent, out, 2)  # another one, under its number
    agent._watch()
    assert launcher.of_kind("member") == [ended]


def until_ended(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
