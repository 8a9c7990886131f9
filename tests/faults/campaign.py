"""Kills ranks of `campaign_rank.py`, at drawn steps and in drawn situations, and says what became of the job."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

import warm
from tests.faults.campaign_rank import FOREVER, SAVE_EVERY
from tests.processes.launching import end

SCRIPT = Path(__file__).with_name("campaign_rank.py")
NUM_RANKS = 4
SITUATIONS = {"anywhere": 6, "rank 0": 3, "recovering": 4, "stopped": 1, "paused": 2, "joining": 4, "saving": 3}
"""What kills are drawn from, and how often. `recovering` and `stopped` take two ranks. `paused`: another rank stands
still while the others recover, goes on, and has been taken for lost by then or not."""
_TAKE_TWO = ("recovering", "stopped", "paused")
ONE_AT_A_TIME = {"anywhere": 6, "rank 0": 3, "joining": 4, "saving": 3}
_MANY_STEPS = 3
_QUIET_SECONDS = 60
"""So long without a step, and the job hangs."""


class Hung(AssertionError):
    """The job makes no progress; with the stacks of its ranks."""


class Campaign:
    """One job and its kills. `num_kills` are spread over `num_steps`; after so many `seconds` there are no more."""

    def __init__(
        self,
        out: Path,
        plan: str,
        loop: str,
        num_steps: int,
        num_kills: int,
        seed: int,
        seconds: float = float("inf"),
        situations: Mapping[str, int] = SITUATIONS,
    ) -> None:
        self.out = out
        self.draw = random.Random(f"{plan} {loop} {num_steps} {num_kills} {seed}")
        self.num_steps, self.num_kills, self.seconds = num_steps, num_kills, seconds
        self.dead: set[int] = set()
        self.situations: Counter[str] = Counter()
        self.drawn_from = situations
        self.allow(1)
        self.said = (out / "said").open("w+")
        launch = ["launch", "--nproc", str(NUM_RANKS), "--elastic", f"1:{NUM_RANKS}", "--retries", "100000:100000"]
        self.job = subprocess.Popen(
            [warm.python(), "-m", "shardwise", *launch, str(SCRIPT), str(out), plan, loop, str(num_steps)],
            env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"},
            stdout=self.said,
            stderr=subprocess.STDOUT,
        )

    def run(self) -> str:
        """What the job has printed, when it has ended."""
        most = self.num_steps * 9 // 10  # a rank that is to save takes more steps than a kill needs
        due = sorted(self.draw.sample(range(1, most), min(self.num_kills, most - 1)))
        until = time.monotonic() + self.seconds
        try:
            while len(self.dead) < self.num_kills and self.job.poll() is None:
                if time.monotonic() > until:
                    self.num_kills = len(self.dead)
                    break
                self.kill_in_some_situation(due[min(len(self.dead), len(due) - 1)])
            self.allow(FOREVER)
            self.await_or_hang(lambda: self.job.poll() is not None)
        finally:
            self.end()
        return self.text()

    def end(self) -> None:
        end(self.job)
        self.said.close()

    # -- what is known of the job -----------------------------------------------------------------------

    def text(self) -> str:
        return (self.out / "said").read_text()

    def step(self) -> int:
        """The last step that any member has noted."""
        return max((int(path.read_text()) for path in self.out.glob("taken-*")), default=-1)

    def pids(self) -> dict[int, int]:
        """The process of each living member that has begun its script."""
        paths = {int(path.name.partition("-")[2]): path for path in self.out.glob("pid-*")}
        return {
            member: int(path.read_text())
            for member, path in paths.items()
            if member not in self.dead and is_alive(path)
        }

    def ranks(self) -> dict[int, int]:
        """The ranks of living members that train in the generation of the newest."""
        found: dict[int, tuple[int, int]] = {}
        for member in self.pids():
            with contextlib.suppress(FileNotFoundError):
                rank, generation = map(int, (self.out / f"rank-{member}").read_text().split())
                found[member] = generation, rank
        newest = max((generation for generation, _ in found.values()), default=-1)
        return {member: rank for member, (generation, rank) in found.items() if generation == newest}

    def newest(self) -> int:
        """The newest generation in which any member has been about to take a step."""
        return max((int(path.read_text().split()[1]) for path in self.out.glob("rank-*")), default=-1)

    # -- what is done to it -----------------------------------------------------------------------------

    def allow(self, step: int) -> None:
        """Let `step` steps be taken; the last one only after the last kill."""
        if len(self.dead) < self.num_kills:
            step = min(step, self.num_steps - 1)
        draft = self.out / ".allowed"
        draft.write_text(str(step))
        draft.rename(self.out / "allowed")

    def kill_in_some_situation(self, step: int) -> None:
        """One or two kills, when `step` steps have been taken and others would go on."""
        situation = self.draw.choices(list(self.drawn_from), list(self.drawn_from.values()))[0]
        if situation in _TAKE_TWO and self.num_kills - len(self.dead) < 2:
            situation = "anywhere"
        least = 3 if situation in _TAKE_TWO else self.draw.choice([2, 2, 3, 4])
        self.allow(step)
        self.await_or_hang(lambda: self.step() >= step - 1 and len(self.ranks()) >= least)
        if self.job.poll() is not None:
            return
        if situation == "joining" and self.kill_who_comes():
            return
        if situation == "saving" and self.kill_who_saves():
            return
        self.allow(self.step() + 1 + self.draw.randrange(1, _MANY_STEPS))
        time.sleep(self.draw.uniform(0.0, 0.08))
        ranks = self.ranks()
        if len(ranks) < 2:
            return
        first = min(ranks, key=lambda member: ranks[member])
        victim = first if situation == "rank 0" else self.draw.choice(sorted(ranks))
        if situation == "stopped" and len(ranks) >= 3:
            stopped = self.draw.choice([one for one in sorted(ranks) if one != victim])
            self.kill(stopped, signal.SIGSTOP, situation)
        paused = [one for one in sorted(ranks) if one != victim] if situation == "paused" else []
        self.kill(victim, signal.SIGKILL, situation)
        if len(paused) >= 2:
            self.pause(self.draw.choice(paused))
        if situation == "recovering":
            time.sleep(self.draw.uniform(0.0, 0.25))
            if len(left := sorted(set(ranks) & set(self.pids()))) >= 2:
                self.kill(self.draw.choice(left), signal.SIGKILL, situation)

    def pause(self, member: int) -> None:
        """Stop it for as long as the launcher waits for it, or a little less or more."""
        path, before = self.out / f"pid-{member}", self.newest()
        try:
            os.kill(pid := int(path.read_text()), signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.0, 1.5))
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
        self.await_or_hang(lambda: not is_alive(path) or (self.newest() > before and member in self.ranks()))
        if not is_alive(path):
            self.note_dead(member, "SIGSTOP and SIGCONT", "paused")

    def kill_who_comes(self) -> bool:
        """Whether a member was killed that was about to join."""
        until = time.monotonic() + 3
        while time.monotonic() < until:
            known = {int(path.name.partition("-")[2]) for path in self.out.glob("rank-*")}
            if coming := sorted(set(self.pids()) - known):
                time.sleep(self.draw.uniform(0.0, 1.0))
                self.kill(coming[0], signal.SIGKILL, "joining")
                return True
            time.sleep(0.01)
        return False

    def kill_who_saves(self) -> bool:
        """Whether a member was killed that had begun to save, or was in it."""
        saved = max(self.step() + 1, 0) // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY
        if saved >= self.num_steps:
            return False
        self.allow(saved + 1)
        until = time.monotonic() + 10
        while time.monotonic() < until and self.job.poll() is None:
            if saving := [int(path.name.partition("-")[2]) for path in self.out.glob("saving-*")]:
                time.sleep(self.draw.uniform(0.0, 0.03))
                ranks = self.ranks()
                if (found := [one for one in saving if one in ranks]) and len(ranks) >= 2:
                    self.kill(self.draw.choice(found), signal.SIGKILL, "saving")
                    return True
            time.sleep(0.001)
        return False

    def kill(self, member: int, number: signal.Signals, situation: str) -> None:
        path = self.out / f"pid-{member}"
        if not is_alive(path):
            return
        try:
            os.kill(int(path.read_text()), number)
        except ProcessLookupError:
            return  # it has ended by itself: another one is killed instead
        self.note_dead(member, number.name, situation)

    def note_dead(self, member: int, by: str, situation: str) -> None:
        self.dead.add(member)
        self.situations[situation] += 1
        with (self.out / "kills").open("a") as stream:
            stream.write(f"{time.time():.3f} {situation}: member {member} {by} after {self.step() + 1} steps\n")
        (self.out / f"saving-{member}").unlink(missing_ok=True)

    def await_or_hang(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds`, or until the job has ended. Raises `Hung`."""
        last, since = self.progress(), time.monotonic()
        while not holds() and self.job.poll() is None:
            time.sleep(0.01)
            if (now := self.progress()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > _QUIET_SECONDS:
                raise Hung(f"nothing happens after step {self.step()}\n{self.stacks()}\n{self.text()[-5000:]}")

    def progress(self) -> tuple[object, ...]:
        return self.step(), sorted(self.ranks().items()), sorted(self.pids())

    def stacks(self) -> str:
        pids = self.pids()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(2)
        kept = {path.name: path.read_text() for path in (self.out / f"stacks-{member}" for member in pids)}
        return "\n".join(f"--- {name}\n{text}" for name, text in kept.items())

    def notes(self) -> dict[int, list[dict[str, object]]]:
        """The lines of each member, the last of which may be torn."""
        found: dict[int, list[dict[str, object]]] = {}
        for path in self.out.glob("steps-*.jsonl"):
            lines = path.read_text().split("\n")
            found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in lines[:-1]]
        return found


def is_alive(path: Path) -> bool:
    """Whether the member lives that has written its number into `path`. Another process, which began after that, may
    have the number of one that is gone: half an hour of kills uses them all up."""
    try:
        process = psutil.Process(int(path.read_text()))
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < path.stat().st_mtime + 1
    except psutil.NoSuchProcess:
        return False
