"""Elastic jobs in pods that connect to their launcher: processes of this machine, started and ended as by a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import warm
from shardwise.launch.hosts.pod import JOB_FAILED
from tests.faults import survivor
from tests.faults.test_survival import oracle
from tests.free_port import free_port
from tests.patience import wait_until
from tests.thorough import soak

SOON_SECONDS = 120.0


class Pods:
    """A launcher and pods, as somebody's controller starts them."""

    def __init__(self, out: Path) -> None:
        self.out, self.port, self.num_launchers = out, free_port(2), 0
        self.are_warm = True
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def launcher(self, *options: str, script: list[object]) -> None:
        where = ["--where", "pods", "--master-addr", "127.0.0.1", "--port", str(self.port)]
        self.num_launchers += 1
        words = ["-m", "shardwise", "launch", *where, *options, "--timeout", "3", *map(str, script)]
        self._start("launcher", words)

    def pod(self, name: str, token: str = "secret") -> None:
        self._start(name, ["-m", "shardwise.launch.hosts", "connect", f"127.0.0.1:{self.port}"], token)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """The process in the pod, and with it, as in a pod, all others."""
        self.processes[name].send_signal(number)

    def said(self, name: str) -> str:
        return (self.out / f"said-{name}").read_text()

    def wait_for_ranks(self, number: int) -> None:
        """Until so many processes have begun to train, in all."""

        def have_begun() -> bool:
            return len([path for path in self.out.glob("pid-*") if path.read_text()]) >= number

        self.wait_until(have_begun)

    def wait_until(self, holds: Callable[[], object]) -> None:
        wait_until(holds, lambda: {name: self.said(name) for name in self.processes}, seconds=SOON_SECONDS)

    def end(self, *names: str) -> list[int]:
        """How the job has ended, and its pods."""
        return [self.processes[name].wait(SOON_SECONDS) for name in ("launcher", *names)]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, words: list[str], token: str = "secret") -> None:
        own = {"SHARDWISE_TOKEN": token, "SHARDWISE_POD": name, "OMP_NUM_THREADS": "1", "PAUSE_SECONDS": "0.05"}
        with (self.out / f"said-{name}").open("ab") as said:
            self.processes[name] = subprocess.Popen(
                [warm.python() if self.are_warm else sys.executable, *words],
                env={**os.environ, **(warm.RANKS_TOO if self.are_warm else {}), **own},
                stdout=said,
                stderr=said,
                text=True,
            )


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    made.close()


def losses_of(out: Path, num_ranks: int) -> None:
    """They are those of the plain model, and all ranks have the same state."""
    found = [json.loads(path.read_text()) for path in out.glob("member-*.json")]
    assert len(found) == num_ranks
    plain = oracle(max(int(step) for one in found for step in one["losses"]) + 1)
    for one in found:
        assert one["state"] == found[0]["state"]
        wrong = [step for step, loss in one["losses"].items() if abs(loss - plain[int(step)]) > 1e-5 * loss]
        assert len(wrong) <= 2, wrong


@soak("kills processes at any moment")
def test_pods_are_killed_and_evicted_and_others_come_in_their_place(pods: Pods) -> None:
    pods.launcher("--nodes", "2", "--elastic", "1:3", script=[survivor.__file__, pods.out, "zero3", "engine", 10**6])
    pods.pod("t-0-aa")
    pods.pod("t-1-bb")
    pods.wait_for_ranks(2)
    pods.kill("t-1-bb")
    pods.pod("t-1-cc")
    pods.wait_for_ranks(3)
    pods.kill("t-0-aa", signal.SIGTERM)
    assert pods.processes["t-0-aa"].wait(SOON_SECONDS) == 143
    pods.pod("t-0-dd")
    pods.pod("t-2-ee")
    pods.wait_for_ranks(5)
    time.sleep(1)
    (pods.out / "enough").write_text("")
    assert pods.end("t-1-cc", "t-0-dd", "t-2-ee") == [0, 0, 0, 0], pods.said("launcher")
    said = pods.said("launcher")
    assert re.search(r"host t-1-bb is gone: rank [01] \(it has closed the connection\)\.", said), said  # as they came
    assert "host t-0-aa received SIGTERM: 1 rank there leaves after its step." in said
    assert "host t-2-ee joins, with 1 slot." in said
    losses_of(pods.out, 3)


@soak("how long a stopped host is waited for")
def test_a_rank_that_was_stopped_with_its_host_is_turned_away_and_its_host_comes_back(pods: Pods) -> None:
    """Nothing could kill it meanwhile. The host, which continues later, gets a replacement."""
    pods.are_warm = False  # what is stopped has to be the process itself
    script = [survivor.__file__, pods.out, "zero3", "engine", 10**6]
    pods.launcher("--nodes", "2", "--elastic", "1:2", "--host-timeout", "3", script=script)
    pods.pod("t-0")
    pods.pod("t-1")
    pods.wait_for_ranks(2)
    time.sleep(1)
    on_host = {psutil.Process(int(path.read_text())).ppid(): path for path in pods.out.glob("pid-*")}
    agent = pods.processes["t-1"]
    stopped = int(on_host[agent.pid].read_text())
    for pid in (agent.pid, stopped):
        os.kill(pid, signal.SIGSTOP)
    pods.wait_until(lambda: "host t-1 is gone: rank" in pods.said("launcher"))
    pods.wait_until(lambda: "1 rank continues after step" in pods.said("launcher"))
    os.kill(stopped, signal.SIGCONT)
    pods.wait_until(lambda: psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE)
    agent.send_signal(signal.SIGCONT)
    pods.wait_for_ranks(3)
    time.sleep(1)
    (pods.out / "enough").write_text("")
    assert pods.end("t-0", "t-1") == [0, 0, 0], pods.said("launcher")
    (away,) = pods.out.glob("away-*")
    assert away.read_text().startswith("The others took this rank for lost and continue without it.")
    assert "(nothing was heard of it for 3 s)." in pods.said("launcher")
    assert "Cause: network: Rank" in pods.said("launcher")
    losses_of(pods.out, 2)


@soak("kills processes at any moment")
def test_the_launchers_pod_is_killed_and_the_next_one_finds_the_same_pods(pods: Pods) -> None:
    """All begin anew: what ranks knew of the job before is not to be believed."""
    script = [survivor.__file__, pods.out, "ddp", "engine", 10**6]
    options = ["--nodes", "2", "--elastic", "2:2", "--host-timeout", "5"]
    pods.launcher(*options, script=script)
    pods.pod("t-0")
    pods.pod("stranger", token="another")
    pods.pod("t-1")
    pods.wait_for_ranks(2)
    before = {path.name: path.read_text() for path in pods.out.glob("pid-*")}
    pods.kill("launcher")
    pods.processes["launcher"].wait()
    pods.launcher(*options, script=script)

    def others_train() -> bool:
        now = {path.name: path.read_text() for path in pods.out.glob("pid-*")}
        return len(now) == 2 and all(now[name] not in ("", before[name]) for name in now)

    pods.wait_until(others_train)
    (pods.out / "enough").write_text("")
    assert pods.end("t-0", "t-1") == [0, 0, 0], pods.said("launcher")
    losses_of(pods.out, 2)
    assert "t-0 has lost the launcher and is trying to reach it again." in pods.said("t-0")
    assert pods.said("launcher").count("does not have the token of this job") == pods.num_launchers
    assert pods.processes["stranger"].poll() is None


@soak("kills processes at any moment")
def test_the_launchers_pod_is_killed_and_ranks_go_on_with_the_next_one(pods: Pods) -> None:
    """Also if one of them is lost meanwhile."""
    script = [survivor.__file__, pods.out, "zero3", "engine", 10**6]
    options = ["--nodes", "3", "--elastic", "1:3", "--host-timeout", "5", "--launcher-timeout", "60"]
    pods.launcher(*options, script=script)
    for name in ("t-0-a", "t-1-b", "t-2-c"):
        pods.pod(name)
    pods.wait_for_ranks(3)
    time.sleep(1)
    before = {path.name: path.read_text() for path in pods.out.glob("pid-*")}
    pods.kill("launcher")
    pods.processes["launcher"].wait()
    pods.kill("t-1-b")
    pods.launcher(*options, script=script)
    pods.wait_until(lambda: "this one has taken over, with 2 of 3 pods." in pods.said("launcher"))
    pods.pod("t-1-d")
    pods.wait_for_ranks(4)
    time.sleep(1)
    (pods.out / "enough").write_text("")
    assert pods.end("t-0-a", "t-2-c", "t-1-d") == [0, 0, 0, 0], pods.said("launcher")
    assert "host t-1-b is gone: rank " in pods.said("launcher")
    assert "Its ranks go on, and end after 60 s without another one." in pods.said("t-0-a")
    after = {path.name: path.read_text() for path in pods.out.glob("pid-*")}
    assert before.items() <= after.items(), "nothing was started in the place of living ranks"
    losses_of(pods.out, 3)


def test_a_job_that_fails_ends_its_pods_with_a_status_that_says_so(pods: Pods) -> None:
    script = pods.out / "fails.py"
    script.write_text("raise ValueError('no')\n")
    pods.launcher("--nodes", "1", "--elastic", "1:1", "--retries", "0", script=[script])
    pods.pod("t-0")
    assert pods.end("t-0") == [1, JOB_FAILED]
    assert "ValueError: no" in pods.said("launcher")
