"""The main job, tiny, as a person runs it: two processes, artefacts, resume, Ctrl-C."""

from __future__ import annotations

import email
import os
import signal
import subprocess
from pathlib import Path

import pytest

import warm
from shardwise.checkpoint.lock import FolderLock
from shardwise.observe import Record, read_record
from tests.patience import PATIENCE, wait_until
from tests.thorough import sampled, thorough_only

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "stdlib_gpt" / "train.py"
TEXT = str(Path(email.__file__).parent)
"""Little to learn from: each rank encodes it, which takes three seconds of the standard library's."""
TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--text", TEXT)

pytestmark = pytest.mark.slow


def command(out: Path, *more: str, nproc: int = 2) -> list[str]:
    launcher = [warm.python(), "-m", "shardwise", "launch", "--nproc", str(nproc)]
    return [*launcher, str(SCRIPT), "--out", str(out), *TINY, *more]


def environment() -> dict[str, str]:
    return {**os.environ, **warm.RANKS_TOO, "PYTHONPATH": str(REPOSITORY / "src")}


def run(out: Path, *more: str, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, *more, nproc=nproc), env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )


def losses(out: Path) -> list[tuple[int, float]]:
    return record(out).column("loss")


def record(out: Path) -> Record:
    return read_record(out / "record.jsonl")


def test_a_run_leaves_its_artefacts_and_goes_on_at_another_size(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = run(out, "--steps", "6", "--save-every", "3")
    assert first.returncode == 0, first.stderr
    assert [step for step, _ in losses(out)] == [1, 2, 3, 4, 5, 6]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoints" / "step-00000006").is_dir()
    assert "a sample" in first.stdout
    assert "A bigram model of the same text" in first.stdout
    assert "promised" in first.stdout
    whole = record(out)
    assert {line["kind"] for line in whole.lines} == {"step", "validation", "ranks", "memory", "end"}
    assert {"tokens_per_second", "seconds", "norm", "lr"} <= {name for line in whole.lines for name in line}
    assert next(len(line["ranks"]) for line in whole.lines if "ranks" in line) == whole.header["world_size"] == 2

    second = run(out, "--steps", "8", nproc=1)
    assert second.returncode == 0, second.stderr
    assert "Continuing after step 6 of 8" in second.stdout
    assert [step for step, _ in losses(out)] == [1, 2, 3, 4, 5, 6, 7, 8]
    resumed = [line for line in record(out).lines if line["kind"] == "resume"]
    assert [(line["step"], line["world_size"]) for line in resumed] == [(6, 1)]


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(("plan", "nproc"), [("3d", 8), ("tp", 4), ("pp", 4)])
def test_the_plans_of_the_example_train_as_one_process_does(plan: str, nproc: int, tmp_path: Path) -> None:
    """As `make train PLAN=3d NPROC=8 STEPS=2` runs it, with a smaller model of as many heads, in fp32."""
    size = ("--steps", "2", "--heads", "4", "--width", "32", "--batch", "16", "--set", "precision=fp32")
    split = run(tmp_path / plan, *size, "--plan", str(SCRIPT.with_name(f"{plan}.yaml")), nproc=nproc)
    assert split.returncode == 0, split.stderr
    alone = run(tmp_path / "alone", *size, "--plan", "ddp", nproc=1)
    assert alone.returncode == 0, alone.stderr
    expected = losses(tmp_path / "alone")
    assert [step for step, _ in expected] == [1, 2]
    assert losses(tmp_path / plan) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]


def test_a_second_job_in_the_same_folder_touches_nothing(tmp_path: Path) -> None:
    """This process has the folder, as an earlier job would."""
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    (out / "record.jsonl").write_text("the first job's record\n")
    lock = FolderLock(out / "checkpoints")
    lock.acquire()
    second = run(out, "--steps", "2", "--fresh", nproc=1)
    assert second.returncode == 1
    assert f"is being written to by process {os.getpid()} on" in second.stderr
    assert (out / "record.jsonl").read_text() == "the first job's record\n"
    lock.check()
    lock.release()


@thorough_only("slow; smaller tests beside it cover the same code")
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    many = ("--steps", "5000", "--save-every", "100000", "--validate-every", "100000")
    job = subprocess.Popen(
        command(out, *many), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _wait_for_steps(out, 5, job)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=PATIENCE)
    finally:
        job.kill()
    assert job.returncode == 130, output
    assert "Stopped and saved after step" in output
    stopped = losses(out)[-1][0]

    after = run(out, "--steps", str(stopped + 2))
    assert after.returncode == 0, after.stderr
    assert f"Continuing after step {stopped}" in after.stdout
    assert [step for step, _ in losses(out)] == list(range(1, stopped + 3))


def test_a_batch_that_does_not_divide_is_refused_in_one_error(tmp_path: Path) -> None:
    refused = run(tmp_path, "--batch", "3")
    assert refused.returncode != 0
    assert "--batch 3 does not divide among 2 ranks" in refused.stderr
    assert "Traceback" not in refused.stderr


def _wait_for_steps(out: Path, steps: int, job: subprocess.Popen[str]) -> None:
    def has_come() -> bool:
        return (out / "record.jsonl").exists() and len(losses(out)) >= steps

    try:
        wait_until(lambda: job.poll() is not None or has_come())
        assert has_come()
    except AssertionError:
        job.kill()
        pytest.fail(f"no {steps} steps: {job.communicate()[0]}")


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_pipeline_trains_it_to_the_same_losses_and_another_plan_goes_on(tmp_path: Path) -> None:
    plan = tmp_path / "pp.yaml"
    plan.write_text("preset: zero1\nmesh: {pp: 2}\naccumulate: 2\n")
    same = ("--set", "precision=fp32", "--steps", "4", "--save-every", "4")
    staged = run(tmp_path / "staged", "--plan", str(plan), *same)
    assert staged.returncode == 0, staged.stderr
    assert "No sample" in staged.stdout
    alone = run(tmp_path / "alone", "--plan", "ddp", "--set", "accumulate=2", *same, nproc=1)
    assert alone.returncode == 0, alone.stderr
    for (step, loss), (_, expected) in zip(losses(tmp_path / "staged"), losses(tmp_path / "alone"), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step
    more = run(tmp_path / "staged", "--plan", "zero3", "--steps", "5")
    assert more.returncode == 0, more.stderr
    assert "Continuing after step 4 of 5" in more.stdout
