"""Real processes whose launcher is killed, and another one takes over: the ranks of `elastic_rank.py` add numbers up,
and fail if ever a sum is not that of the members that it should be of."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm
from shardwise.checkpoint import checkpoints_in
from shardwise.launch.adopted import find_ranks
from tests.faults.running_job import RunningJob
from tests.faults.test_members import RANK, all_facts, facts, lives
from tests.patience import PATIENCE
from tests.thorough import drawn, soak

pytestmark = soak("kills launchers and ranks, some at any moment")
SAVING_RANK = Path(__file__).with_name("saving_rank.py")
_TAKEN_OVER = re.compile(r"Process (\d+) has taken over")


class Job(RunningJob):
    """An elastic job of three ranks, and whichever process is its launcher."""

    def __init__(self, out: Path, script: list[str], *options: str) -> None:
        super().__init__(out)
        ranks = ["--nproc", "3", "--elastic", "1:3", "--retries", "1000", "--log-dir", str(out / "logs")]
        command = [warm.python(), "-m", "shardwise", "launch", *ranks, *options, *script]
        environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"}
        with (out / "said").open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        self.first = self.process.pid

    @property
    def launcher(self) -> int:
        """The process that is the launcher now, as far as it has said so."""
        numbers = _TAKEN_OVER.findall(self.said)
        return int(numbers[-1]) if numbers else self.first

    @property
    def folder(self) -> Path:
        return Path(all_facts(self.out, "joined", "folder")[0])

    def kill_the_launcher(self) -> None:
        os.kill(self.launcher, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        return [pid for pid in all_facts(self.out, "joined", "pid") if lives(pid)]

    def kill_a_rank(self, chance: random.Random) -> None:
        """Unless there are fewer than three."""
        if len(living := self.ranks()) == 3:
            os.kill(chance.choice(living), signal.SIGKILL)

    def processes(self) -> list[int]:
        return self.ranks() + standbys(self.folder)


def standbys(folder: Path) -> list[int]:
    """The processes that wait to take over, or have."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "shardwise.launch.elastic.standby" in words and str(folder) in words:
            found.append(process.pid)
    return found


@contextlib.contextmanager
def job(out: Path, num_steps: int, *options: str) -> Iterator[Job]:
    """One that adds numbers up. Whatever becomes of it, nothing stays behind."""
    with ended(Job(out, [str(RANK), str(out), str(num_steps), "0"], *options)) as running:
        yield running


@contextlib.contextmanager
def ended(running: Job) -> Iterator[Job]:
    try:
        yield running
        running.until(lambda: not running.processes() and not running.folder.exists(), 20)
    finally:
        for pid in [running.launcher, running.launcher]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                time.sleep(1)
        running.process.kill()
        running.process.wait()


def test_ranks_do_not_notice_that_their_launcher_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, 600) as running:
        running.until_joined(3)
        running.kill_the_launcher()
        running.until(lambda: running.status is not None)
    assert running.status == 0
    assert running.process.returncode == -signal.SIGKILL
    assert re.search(
        r"the launcher \(process \d+\) was killed\. Process (\d+) has taken over after \d+\.\d s: 3 ranks go on\. "
        r"`kill \1` ends the job\.",
        running.said,
    ), running.said
    assert "the job has ended with status 0." in running.said
    assert all_facts(tmp_path, "done", "generation") == [0, 0, 0]
    assert not all_facts(tmp_path, "fault", "text")


def test_a_rank_that_is_killed_while_there_is_no_launcher_is_replaced_by_the_next(tmp_path: Path) -> None:
    chance = random.Random(2)
    with job(tmp_path, 1500) as running:
        running.until_joined(3)
        running.kill_the_launcher()
        running.kill_a_rank(chance)
        running.until_joined(4)
        running.kill_a_rank(chance)  # and one that is killed later
        running.until_joined(5)
        running.until(lambda: running.status is not None, 120)
    assert running.status == 0
    assert "ended without a record, so it was killed" in running.said
    assert running.said.count("1 replacement starts") == 2
    assert sorted(all_facts(tmp_path, "done", "rank")) == [0, 1, 2]


def test_launchers_are_killed_one_after_the_other_and_ranks_too(tmp_path: Path) -> None:
    chance = random.Random(3)
    num_kills = drawn(4, 20)
    with job(tmp_path, 100000) as running:
        running.until_joined(3)
        for number in range(num_kills):
            if chance.random() < 0.7:
                running.kill_a_rank(chance)
            time.sleep(chance.choice([0.0, 0.02, 0.1, 0.5]))
            running.kill_the_launcher()
            running.until(lambda: len(_TAKEN_OVER.findall(running.said)) > number)  # noqa: B023
            time.sleep(chance.choice([0.0, 0.05, 1.0]))
            running.until(lambda: len(standbys(running.folder)) > 1)
        running.until(lambda: len(running.ranks()) == 3)
        killed = time.time()
        running.kill_a_rank(chance)
        running.until(lambda: max(all_facts(tmp_path, "joined", "time")) > killed)
        os.kill(running.launcher, signal.SIGTERM)
        running.until(lambda: running.status is not None)
    assert running.status == 143
    assert "ended by SIGTERM" in running.said
    assert "AssertionError" not in running.said


@pytest.mark.parametrize("kills_a_rank", [False, True])
def test_launchers_are_killed_while_a_checkpoint_is_written(kills_a_rank: bool, tmp_path: Path) -> None:
    """Two, one after the other; the rank that writes goes on, or is killed then. No step is taken again, and the
    checkpoint is whole."""
    with ended(Job(tmp_path, [str(SAVING_RANK), str(tmp_path)])) as running:
        running.until_joined(3)
        running.until(lambda: (tmp_path / "saving").exists())
        for number in range(2):
            running.until(lambda: len(standbys(running.folder)) > number)  # noqa: B023
            running.kill_the_launcher()
            running.until(lambda: len(_TAKEN_OVER.findall(running.said)) > number)  # noqa: B023
        if kills_a_rank:
            os.kill(facts(tmp_path, 1)[0]["pid"], signal.SIGKILL)
        (tmp_path / "go on").touch()
        running.until(lambda: running.status is not None)
    assert running.status == 0
    assert list(checkpoints_in(tmp_path / "checkpoints")) == [1, 2]
    assert len(all_facts(tmp_path, "done", "num_void")) >= (2 if kills_a_rank else 3)
    if not kills_a_rank:
        assert set(all_facts(tmp_path, "done", "generation")) == {0}, "no rank has noticed"


def test_a_launcher_that_ends_the_job_is_killed(tmp_path: Path) -> None:
    """As by somebody who has no patience: SIGTERM, then SIGKILL. The next one ends the job."""
    with job(tmp_path, 100000) as running:
        running.until_joined(3)
        os.kill(running.launcher, signal.SIGTERM)
        running.until(lambda: "passed on to the ranks" in running.said)
        running.kill_the_launcher()
        running.until(lambda: not running.processes(), 30)
    assert running.status in (143, None)  # None: it had ended all ranks when it was killed


def test_ranks_without_any_launcher_end(tmp_path: Path) -> None:
    with job(tmp_path, 100000, "--launcher-timeout", "3", "--timeout", "2") as running:
        running.until_joined(3)
        running.until(lambda: bool(standbys(running.folder)))
        for pid in [*standbys(running.folder), running.launcher]:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        running.until(lambda: not running.processes(), 30)
        assert time.monotonic() - killed > 3
        running.until(lambda: not running.folder.exists(), 10)
    logs = "".join(path.read_text() for path in tmp_path.glob("logs/*/*/stderr.log"))
    begun = "this job has no launcher: it was killed, and so was the process that takes over. Its ranks go on for 3 s."
    assert logs.count(begun) == 1
    assert logs.count("this job has had no launcher for 3 s. Its ranks end.") == 1


def test_somebody_takes_over_a_job_without_a_launcher(tmp_path: Path) -> None:
    with job(tmp_path, 2000) as running:
        running.until_joined(3)
        running.until(lambda: bool(standbys(running.folder)))
        for pid in [*standbys(running.folder), running.launcher]:
            os.kill(pid, signal.SIGKILL)
        command = [warm.python(), "-m", "shardwise", "launch", "--takeover", str(running.folder)]
        time.sleep(2)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "has taken over: 3 ranks go on." in done.stderr
    assert again.returncode != 0
    assert "has no elastic job that this version can take over" in again.stderr
    assert sorted(all_facts(tmp_path, "done", "generation")) == [0, 0, 0]


def test_ranks_are_found_by_the_environment_that_they_were_given() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "a-run", "SHARDWISE_MEMBER": "7"}
    begun = [subprocess.Popen(["sleep", "60"], env=environment, start_new_session=leads) for leads in (True, False)]
    try:
        assert find_ranks("a-run") == {7: begun[0].pid}
        assert find_ranks("another") == {}
    finally:
        for process in begun:
            process.kill()
            process.wait()
