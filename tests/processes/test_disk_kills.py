"""States on a disk in real processes, of which one is killed in any phase of a step, of a save, or of a resume: the
others are told, the last checkpoint is good, and the next job finds the folder and cleans it."""

from __future__ import annotations

import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from shardwise.checkpoint import checkpoints_in
from tests.free_port import free_port
from tests.patience import PATIENCE
from tests.thorough import drawn, thorough_only, varies

SCRIPT = Path(__file__).with_name("disk_training_rank.py")
STEPS, NUM_LAYERS = 5, 6
PHASES = ("forward", "backward", "updating", "reading", "writing", "settling", "saving", "resuming")
ONCE = ("settling", "saving")


@dataclass
class Ended:
    """What became of one rank."""

    status: int
    out: str
    errors: str


class Job:
    """Ranks without a launcher, which would end the others when one dies."""

    def __init__(self, num_ranks: int, *words: str | Path) -> None:
        common = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_PORT": free_port(),
            "OMP_NUM_THREADS": 1,
        }
        self.ranks = [
            subprocess.Popen(
                [warm.python(), str(SCRIPT), *map(str, words)],
                env={
                    **os.environ,
                    "MASTER_ADDR": "127.0.0.1",
                    **{name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def end(self) -> list[Ended]:
        """Wait for all ranks, of which none is to read any more."""
        ended = []
        for rank in self.ranks:
            out, errors = rank.communicate(timeout=PATIENCE)
            ended.append(Ended(rank.returncode, out, errors))
        return ended


def job(num_ranks: int, *words: str | Path) -> list[Ended]:
    return Job(num_ranks, *words).end()


def succeeded(ranks: list[Ended]) -> list[str]:
    """What rank 0 has printed."""
    for rank in ranks:
        assert rank.status == 0, rank.errors
    return ranks[0].out.splitlines()


def a_fault(number: int) -> tuple[int, str, int]:
    """Ranks, the phase in which the last of them is killed, and at which of its events."""
    draw, phase = random.Random(number), PHASES[number % len(PHASES)]
    return (4 if number % 5 == 3 else 2), phase, 0 if phase in ONCE else draw.randrange(NUM_LAYERS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """What a job says of which no rank is killed, by its number of ranks."""
    told = {}
    for num_ranks in {a_fault(number)[0] for number in numbers()}:
        folder = tmp_path_factory.mktemp("whole")
        told[num_ranks] = succeeded(job(num_ranks, folder / "saved", folder / "scratch", str(STEPS)))
        assert not list((folder / "scratch").iterdir()), "every rank has cleaned what is its own"
    return told


def numbers() -> range:
    """Steps of three, so that half of them have phases of a step, of a save and of a resume."""
    return range(4, 4 + 3 * drawn(1, len(PHASES)), 3)


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
@pytest.mark.parametrize("number", numbers())
def test_a_kill_leaves_the_last_checkpoint_good(number: int, whole: dict[int, list[str]], tmp_path: Path) -> None:
    num_ranks, phase, event = a_fault(number)
    folder, scratch = tmp_path / "saved", tmp_path / "scratch"
    if phase == "resuming":
        succeeded(job(num_ranks, folder, scratch, "2"))
    *others, killed = job(num_ranks, folder, scratch, str(STEPS), phase, str(event))
    assert killed.status == -9, killed.errors
    for rank in others:
        assert rank.status == 1, rank.errors
        fault = rank.errors.rpartition("shardwise.errors.")[2]
        assert fault.startswith("FaultError"), rank.errors
        assert f"rank {num_ranks - 1} " in fault, "who it was, in the error that ends it"
    assert list(checkpoints_in(folder)) == [2]
    left = sorted(path.name for path in scratch.iterdir())
    assert left == [f"shardwise-rank-{num_ranks - 1}.lock"], "of the killed one, and nothing of the others"
    after = job(num_ranks, folder, scratch, str(STEPS))
    assert succeeded(after) == ["resumed 2", *whole[num_ranks][2:]]
    assert ["was killed; it is used again" in rank.errors for rank in after] == [False] * (num_ranks - 1) + [True]
    assert not list(scratch.iterdir())


@thorough_only("nine processes")
def test_two_jobs_in_one_folder_and_fewer_ranks_after_a_kill(tmp_path: Path) -> None:
    """The second job is refused on all ranks, and the first does not notice. A job of one rank cleans up after the
    second of two."""
    scratch = tmp_path / "scratch"
    first = Job(2, tmp_path / "first", scratch, "1", "waits", "0")
    assert first.ranks[0].stdout is not None
    assert first.ranks[0].stdout.readline() == "began\n"
    for rank in job(2, tmp_path / "second", scratch, "1"):
        assert rank.status == 1
        assert "Two jobs cannot share a folder" in rank.errors
    assert succeeded(first.end())[0].startswith("1 ")
    assert not list(scratch.iterdir())
    *_, killed = job(2, tmp_path / "third", scratch, "3", "updating", "1")
    assert killed.status == -9
    assert list(scratch.iterdir())
    succeeded(job(1, tmp_path / "third", scratch, "3"))
    assert not list(scratch.iterdir())
