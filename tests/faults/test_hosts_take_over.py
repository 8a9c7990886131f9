"""Real processes on hosts that are addresses of this machine, which a stand-in for ssh reaches: the launcher is killed,
or a host, or both, and other hosts go on. The ranks of `elastic_rank.py` add numbers up, and fail if ever a sum is not
that of the members that it should be of."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.running_job import RunningJob
from tests.faults.test_members import RANK, all_facts, lives
from tests.thorough import soak

pytestmark = [soak("kills launchers and hosts, some at any moment"), pytest.mark.timeout(400)]
SSH = """#!/bin/sh
# ssh -T OPTIONS HOST COMMAND
for word; do before=$last; last=$word; done
export SSH_CONNECTION="127.0.0.1 22 $before 22"
exec sh -c "$last"
"""
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


class Job(RunningJob):
    """An elastic job of one rank on each of three hosts."""

    def __init__(self, out: Path, num_steps: int, *options: str) -> None:
        super().__init__(out)
        (out / "bin").mkdir()
        (out / "bin" / "ssh").write_text(SSH)
        (out / "bin" / "ssh").chmod(0o755)
        where = [
            "--hosts",
            ",".join(f"{host}:1" for host in HOSTS),
            "--chdir",
            str(out),
            "--log-dir",
            str(out / "logs"),
        ]
        script = [str(RANK), str(out), str(num_steps), "0"]
        words = ["--elastic", "1:3", "--retries", "1000", "--launcher-timeout", "60"]
        command = [sys.executable, "-m", "shardwise", "launch", *where, *words, *options, *script]
        environment = {
            **os.environ,
            "PATH": f"{out / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (out / "said").open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)

    @property
    def said(self) -> str:
        later = self.out / "shardwise-launcher.log"
        return super().said + (later.read_text() if later.exists() else "")

    def until_regrouped(self, number: int) -> None:
        """Until so many ranks are in the newest generation."""

        def has_come() -> bool:
            members = all_facts(self.out, "regrouped", "members")
            generations = all_facts(self.out, "regrouped", "generation")
            return bool(members) and len(members[generations.index(max(generations))]) == number

        self.until(has_come)

    def agent(self, host: str) -> int:
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
            is_there = variables.get("SSH_CONNECTION") == f"127.0.0.1 22 {host} 22"
            if is_there and "shardwise.launch.hosts" in words and str(self.out) in variables.get("PATH", ""):
                return int(process.pid)
        raise AssertionError(f"no agent on {host}")

    def lose(self, host: str) -> None:
        """With all its processes, the launcher that it may have started included."""
        agent = psutil.Process(self.agent(host))
        for process in [*agent.children(recursive=True), agent]:
            process.kill()

    def launchers(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
            if "shardwise.launch.elastic.heir" in words and str(self.out) in variables.get("PATH", ""):
                found.append(process.pid)
        return found

    def processes(self) -> list[int]:
        return [pid for pid in all_facts(self.out, "joined", "pid") if lives(pid)] + self.launchers()


@contextlib.contextmanager
def job(out: Path, num_steps: int, *options: str) -> Iterator[Job]:
    """Whatever becomes of it, nothing stays behind."""
    running = Job(out, num_steps, *options)
    try:
        yield running
        running.until(lambda: not running.processes(), 60)
        folders = all_facts(out, "joined", "folder")
        running.until(lambda: not [folder for folder in folders if Path(folder).exists()], 20)
    finally:
        running.process.kill()
        running.process.wait()
        for host in HOSTS:
            with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
                running.lose(host)


def test_ranks_do_not_notice_that_their_launcher_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, 3000) as running:
        running.until_joined(3)
        running.process.kill()
        running.until(lambda: running.status is not None)
    assert running.status == 0
    assert re.search(
        r"the launcher was lost\. Process (\d+) on 127\.0\.0\.2 has taken over, with 3 of 3 hosts\. "
        r"`kill \1` there ends the job\.",
        running.said,
    ), running.said
    assert all_facts(tmp_path, "done", "generation") == [0, 0, 0]
    assert not all_facts(tmp_path, "fault", "text")


@pytest.mark.parametrize("first", ["host", "launcher"])
def test_the_launcher_is_lost_with_a_host(first: str, tmp_path: Path) -> None:
    """The first in the list, so that the next one collects the voices. The rank there is a lost one; and where a host
    comes back, it gets one again."""
    with job(tmp_path, 10**6) as running:
        running.until_joined(3)
        if first == "host":
            running.lose(HOSTS[0])
            running.process.kill()
        else:
            running.process.kill()
            running.lose(HOSTS[0])
        running.until(lambda: "has taken over, with 2 of 3 hosts" in running.said)
        running.until(lambda: any(len(members) == 2 for members in all_facts(tmp_path, "regrouped", "members")))
        running.until_joined(4)  # by the stand-in for ssh, from the host that has the launcher
        running.until_regrouped(3)
        os.kill(running.launchers()[0], signal.SIGTERM)
        running.until(lambda: running.status is not None)
    assert running.status == 143
    assert "AssertionError" not in running.said


def test_launchers_are_lost_with_their_hosts_one_after_the_other(tmp_path: Path) -> None:
    with job(tmp_path, 10**6) as running:
        running.until_joined(3)
        running.process.kill()
        running.until(lambda: running.said.count("has taken over") == 1)
        running.lose(HOSTS[0])
        running.until(lambda: running.said.count("has taken over") == 2)
        assert "on 127.0.0.3 has taken over, with 2 of 3 hosts" in running.said
        running.until_joined(4)
        running.until_regrouped(3)
        os.kill(running.launchers()[0], signal.SIGTERM)
        running.until(lambda: running.status is not None)
    assert running.status == 143


def test_ranks_end_with_a_launcher_that_nobody_is_to_follow(tmp_path: Path) -> None:
    with job(tmp_path, 10**6, "--launcher-timeout", "0") as running:
        running.until_joined(3)
        running.process.kill()
        running.until(lambda: not running.processes(), 30)
    assert "has taken over" not in running.said
