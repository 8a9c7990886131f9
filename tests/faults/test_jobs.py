"""Real processes over real gloo, and something happens to one of them: `train.py` beside this file."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from tests.free_port import free_port
from tests.patience import PATIENCE, wait_until
from tests.thorough import SOAK, sampled, soak, thorough_only

TRAIN = Path(__file__).with_name("train.py")
SOON_SECONDS = 6 if SOAK else PATIENCE
"""Ten times what was measured (docs/faults.md), unless other work may stop a process for long."""


def run_plainly(num_ranks: int, fault: str, out: Path) -> list[int]:
    """Start ranks as `mpirun` would: nobody watches them, rank 0 keeps the store. Returns exit codes."""
    port = free_port()
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [warm.python(), str(TRAIN), fault, str(out)],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    try:
        return [rank.wait(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def launch(num_ranks: int, fault: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    patience = ["--timeout", str(PATIENCE)]  # for the others to raise
    command = [warm.python(), "-m", "shardwise", "launch", *patience, "--nproc", str(num_ranks), *options]
    return subprocess.run(
        [*command, str(TRAIN), fault, str(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def told(out: Path, rank: int) -> tuple[float, str, str]:
    """After how many seconds a rank raised, the kind and ranks of its error, and its text."""
    moment, kind, text = (out / f"told-{rank}").read_text().split("\n", 2)
    return float(moment) - float((out / "moment").read_text()), kind, text


def left_behind(before: set[Path]) -> list[Path]:
    """Names in /dev/shm that were not there `before`, and that nobody who lives uses: others have theirs there too."""
    new = set(Path("/dev/shm").glob("*")) - before
    used = "".join(text for process in Path("/proc").glob("[0-9]*") for text in in_use(process)) if new else ""
    return [path for path in new if path.exists() and str(path) not in used]


def nothing_is_left(before: set[Path]) -> None:
    """Jobs of other tests that end just now may take a moment to remove what they had."""
    wait_until(lambda: not left_behind(before), lambda: left_behind(before))


def in_use(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended
        yield (process / "maps").read_text(errors="replace")
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())


@sampled
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=soak("more ranks than cores"))])
def test_all_others_raise_soon_when_a_rank_is_killed(num_ranks: int, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("*"))
    codes = run_plainly(num_ranks, "kill", tmp_path)
    nothing_is_left(before)  # what ranks share has no name that could stay
    victim = num_ranks - 1
    assert codes[victim] == -9
    for rank in range(victim):
        seconds, kind, text = told(tmp_path, rank)
        assert kind == f"lost ({victim},)", text
        assert f"Rank {victim} is gone" in text
        assert seconds < SOON_SECONDS
        assert codes[rank] == 1


@sampled
@pytest.mark.parametrize("victim", [1, 2])
def test_a_stage_that_is_killed_in_the_middle_of_a_step_is_named(victim: int, tmp_path: Path) -> None:
    """Its neighbours wait for its messages, and the others for theirs."""
    before = set(Path("/dev/shm").glob("*"))
    codes = run_plainly(3, f"stage {victim}", tmp_path)
    nothing_is_left(before)
    assert codes[victim] == -9
    for rank in {0, 1, 2} - {victim}:
        seconds, kind, text = told(tmp_path, rank)
        assert kind == f"lost ({victim},)", text
        assert f"Rank {victim} is gone" in text
        assert seconds < SOON_SECONDS
        assert codes[rank] == 1


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_first_stage_that_is_killed_with_the_store_is_named(tmp_path: Path) -> None:
    """The last stage has no link to the first, and its neighbour ends because of it."""
    codes = run_plainly(3, "stage 0", tmp_path)
    assert codes == [-9, 1, 1]
    seconds, kind, text = told(tmp_path, 1)
    assert kind == "lost (0,)", text
    assert seconds < SOON_SECONDS
    seconds, kind, text = told(tmp_path, 2)
    assert kind == "lost (0,)", text
    assert "Rank 0 is gone" in text
    assert seconds < 2 * SOON_SECONDS


@sampled
@pytest.mark.parametrize(
    ("fault", "expected", "words"),
    [
        ("raise", "raised (2,)", "Rank 2 raised ValueError: a bad batch"),
        ("skip", "contradiction (2,)", "rank 2 waits in 'before step' for 'agree * verdict"),
    ],
)
def test_all_ranks_raise_what_one_did(fault: str, expected: str, words: str, tmp_path: Path) -> None:
    run_plainly(3, fault, tmp_path)
    messages = [told(tmp_path, rank) for rank in (range(3) if fault == "skip" else range(2))]
    for seconds, kind, text in messages:
        assert kind == expected, text
        assert words in text
        assert seconds < SOON_SECONDS
    assert len({text for _, _, text in messages}) == 1


def test_twenty_worlds_leave_nothing_behind(tmp_path: Path) -> None:
    """No thread, no socket, and of the keys only the one that counts the worlds."""
    port = free_port()
    rounds = Path(__file__).with_name("many_worlds.py")
    ranks = [subprocess.Popen([warm.python(), str(rounds), str(rank), str(port), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=PATIENCE) for rank in ranks] == [0, 0]
    for rank in range(2):
        counts = ast.literal_eval((tmp_path / f"counts-{rank}").read_text())
        assert {threads for threads, _, _ in counts} == {1}
        later = [sockets for _, sockets, _ in counts[-5:]]  # one may be counted while the other rank still closes it
        assert min(later) <= counts[2][1], counts
        assert {keys for _, _, keys in counts} == {1}


def test_the_report_has_the_last_status_of_a_killed_rank(tmp_path: Path) -> None:
    run = launch(4, "kill", tmp_path)
    ended = time.time() - float((tmp_path / "moment").read_text())
    assert run.returncode == 137
    assert run.stderr.count("Rank 3 is gone without a word") == 1, run.stderr
    assert "ranks 0 to 2 then raised" in run.stderr
    assert "rank 3 of 4 failed first: it was killed by SIGKILL" in run.stderr
    assert "Last status: rank 3 " in run.stderr
    assert ended < SOON_SECONDS


def test_a_restart_goes_on_from_the_checkpoint_to_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    assert launch(2, "none", tmp_path / "whole").returncode == 0
    run = launch(2, "restart", tmp_path / "broken", "--max-restarts", "1")
    assert run.returncode == 0, run.stderr
    assert "restart 1 of 1 begins" in run.stderr
    for step in range(8):
        losses = [(tmp_path / name / f"loss-{step}").read_text() for name in ("whole", "broken")]
        assert losses[0] == losses[1], f"step {step}"
