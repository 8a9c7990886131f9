"""Hosts that are lost while the launcher waits for the answers of others."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.hosts.gather import Answers
from shardwise.launch.hosts.host_messages import outcome_as_message
from shardwise.launch.hosts.run import _HostsJob
from shardwise.launch.job import Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.ssh import SshPlan, SshSettings
from shardwise.launch.signals import SignalLog
from tests.patience import PATIENCE

SHARES = (Share(Host("a"), 0, 1), Share(Host("b"), 1, 1))


class FakeConnection:
    """A connection to a host that answers orders at once, from a table."""

    def __init__(self, share: Share, arrivals: Any, answers: dict[str, list[dict[str, Any]]]) -> None:
        self.share, self.name = share, share.host.name
        self.is_lost, self.status, self.complaints = False, 255, "client_loop: send disconnect: Broken pipe"
        self._arrivals, self._answers = arrivals, answers

    def send(self, do: str, **details: object) -> None:
        del details
        for message in self._answers.get(do, ()):
            self._arrivals.put((self, message))


@pytest.fixture
def arrivals() -> Any:
    return queue.Queue()


def test_a_host_lost_while_the_first_one_prepares_ends_the_job(
    arrivals: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher dropped the loss, and waited for that host without end."""
    ended = outcome_as_message(Outcome(0, -15, None, 1.0))
    first: Any = FakeConnection(
        SHARES[0],
        arrivals,
        {
            "prepare": [{"kind": "prepared"}],
            "end": [{"kind": "over", "outcomes": [ended], "killed": 0}],
            "last_status": [{"kind": "last_status", "statuses": []}],
        },
    )
    second: Any = FakeConnection(SHARES[1], arrivals, {})
    arrivals.put((second, {"kind": "lost"}))
    plan = SshPlan(Job(("train.py",), 1, grace_seconds=7), SHARES, SshSettings(directory=str(tmp_path)), {})
    statuses: list[int] = []
    with Folder(None) as folder:
        job = _HostsJob(plan, [first, second], arrivals, folder, SignalLog(), {first: 0.0, second: 0.0})
        answers = Answers(arrivals, lambda: False)
        thread = threading.Thread(target=lambda: statuses.append(job.run("10.0.0.1", 29500, answers)), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert statuses == [1]
    why = "client_loop: send disconnect: Broken pipe"
    told = f"b: the connection is lost ({why}). Its ranks end within a minute and 7 s."
    assert told in capsys.readouterr().err


def test_a_host_lost_after_its_answer_is_a_problem_of_the_next_question(arrivals: Any) -> None:
    hosts: list[Any] = [FakeConnection(share, arrivals, {}) for share in SHARES]
    for host, said in ((hosts[0], "facts"), (hosts[0], "lost"), (hosts[1], "facts")):
        arrivals.put((host, {"kind": said}))
    answers = Answers(arrivals, lambda: False)
    assert answers.collect(hosts, "facts", 30, "python")[1] == {}
    found, problems = answers.collect(hosts[:1], "reached", 0.0, "python")
    assert found == {}
    assert problems["a"].startswith("ssh failed: client_loop: send disconnect: Broken pipe")
