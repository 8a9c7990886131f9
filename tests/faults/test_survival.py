"""Real processes under `shardwise launch --elastic`, killed with `kill -9`: an unchanged loop ends where one does of
which nobody was killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import warm
from shardwise.observe import read_record
from tests.faults.survivor import ROWS, batch_of, build, data_for, loss_of, model_for
from tests.patience import PATIENCE, wait_until
from tests.thorough import drawn, sampled, soak

pytestmark = soak("kills many processes, some at any moment")
SCRIPT = Path(__file__).with_name("survivor.py")


Formed = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def oracle(num_steps: int, model: nn.Module | None = None, formed: Formed = lambda x, y: (x, y)) -> list[float]:
    """The losses of one process that has the whole model, and takes each batch as `formed`."""
    model = model or build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        x, y = batch_of(step, 0, 1)
        assert len(x) == ROWS
        x, y = formed(x, y)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
    return losses


def started(
    out: Path, plan: str, loop: str, num_steps: int, kills: list[str], retries: str, least: int = 2, hosts: str = ""
) -> subprocess.Popen[str]:
    launch = ["launch", "--nproc", "4", "--elastic", f"{least}:4", "--retries", retries]
    script = [str(SCRIPT), str(out), plan, loop, str(num_steps), *kills]
    environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1", **({"HOSTS": hosts} if hosts else {})}
    return subprocess.Popen(
        [warm.python(), "-m", "shardwise", *launch, *script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SPLIT = {"mesh": {"tp": 4}, "tensor": {"plan": {"0": "column", "2": "row"}}}


def check(said: str, job: subprocess.Popen[str], out: Path, num_steps: int, most_wrong: int, plan: str = "") -> None:
    assert job.returncode == 0, said
    losses = oracle(num_steps, model_for(plan), partial(data_for, plan))
    found = [json.loads(path.read_text()) for path in out.glob("member-*.json")]
    assert found, said
    for one in found:
        pairs = [(loss, losses[int(step)]) for step, loss in one["losses"].items()]
        wrong = [pair for pair in pairs if abs(pair[0] - pair[1]) > 1e-6 * pair[1]]
        assert len(wrong) <= most_wrong, (wrong, said)
        assert one["state"] == found[0]["state"]
        drawn, expected = one.get("drawn", ([], []))
        assert drawn == expected, "random numbers are put back"
        assert one["folder"].startswith("/dev/shm/")
        assert not Path(one["folder"]).exists(), "what outlives ranks goes with the job"
        if not one["losses"]:
            continue  # it came as the others ended: its one iteration was void
        assert max(map(int, one["losses"])) == num_steps - 1
        first = min(map(int, one["losses"]))
        assert one["resumed"] == ([first, {}] if first else None), "where the others are, though nobody has saved"


@sampled
@pytest.mark.parametrize(
    ("plan", "loop", "kills"),
    [
        ("zero3", "engine", ["0:3:backward", "2:6:9"]),
        ("zero1", "plain", ["0:3:step", "1:3:step"]),
        ("zero2", "train_step", ["3:0:forward", "0:5:4"]),
        ('{"preset": "hpz", "mesh": {"node": 2, "local": 2}}', "plain", ["1:4:backward", "2:5:forward"]),
        ("ddp", "engine", ["0:2:step", "1:4:2"]),
        ('{"preset": "infinity", "disk": "SCRATCH"}', "engine", ["0:3:step", "2:6:9"]),
        ('{"preset": "infinity", "rows": {"param": {"tier": "disk"}}, "disk": "SCRATCH"}', "plain", ["3:3:backward"]),
    ],
)
def test_two_ranks_are_killed(plan: str, loop: str, kills: list[str], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    job = started(tmp_path, plan.replace("SCRATCH", str(scratch)), loop, 10, kills, retries="0:10")
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=2)
    assert not [path for path in scratch.glob("*") if not path.name.endswith(".lock")], "files of lost ranks"


def test_a_disk_fails(tmp_path: Path) -> None:
    plan = json.dumps({"preset": "infinity", "disk": str(tmp_path / "scratch")})
    job = started(tmp_path, plan, "engine", 10, ["1:3:disk"], retries="0:10")
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=1)
    assert "TierError: The disk of rank 1 failed in a step. Writing" in said
    assert "rank 1 has a disk that is full or fails" in said
    assert "3 ranks continue after step 3" in said
    assert "restart" not in said
    assert not [path for path in (tmp_path / "scratch").glob("*") if not path.name.endswith(".lock")]


@sampled
@pytest.mark.parametrize(
    ("loop", "kill"),
    [
        *(
            (loop, kill)
            for loop in ("engine", "plain")
            for kill in ("1:3:forward", "0:4:backward", "3:4:step", "2:5:9")
        ),
        *(("train_step", kill) for kill in ("1:3:forward", "0:4:2", "2:5:9")),
    ],
)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_fewer_ranks_split_the_layers(preset: str, loop: str, kill: str, tmp_path: Path) -> None:
    job = started(tmp_path, json.dumps({"preset": preset, **SPLIT}), loop, 10, [kill], retries="0:10", least=1)
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=0)
    assert "2 ranks continue" in said
    assert "restart" not in said


@pytest.mark.parametrize(
    ("loop", "kill"), [("engine", "1:3:forward"), ("plain", "0:4:7"), ("train_step", "3:4:6"), ("engine", "2:5:step")]
)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_fewer_ranks_share_the_tokens(preset: str, loop: str, kill: str, tmp_path: Path) -> None:
    plan = json.dumps({"preset": preset, "mesh": {"sp": 4}, "sequence": {"attention": "ulysses"}})
    job = started(tmp_path, plan, loop, 10, [kill], retries="0:10", least=1)
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=0, plan=plan)
    assert "2 ranks continue" in said
    assert "restart" not in said


@sampled
@pytest.mark.parametrize(
    ("mesh", "loop", "kill"),
    [
        ({"ep": 4}, "engine", "1:3:backward"),
        ({"ep": 4}, "plain", "3:4:step"),
        ({"pp": 2, "tp": 2}, "train_step", "0:4:6"),
        ({"pp": 2, "tp": 2}, "train_step", "3:5:9"),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_fewer_ranks_have_the_experts_or_go_on_along_one_of_two_axes(
    preset: str, mesh: dict[str, int], loop: str, kill: str, tmp_path: Path
) -> None:
    more = {"accumulate": 2, "tensor": SPLIT["tensor"]} if "pp" in mesh else {}
    plan = json.dumps({"preset": preset, "mesh": mesh, **more})
    job = started(tmp_path, plan, loop, 10, [kill], retries="0:10", least=1)
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=0 if "pp" in mesh else 1, plan=plan)
    assert "2 ranks continue" in said
    assert "restart" not in said


@pytest.mark.parametrize(
    ("plan", "loop", "hosts", "kills"),
    [
        ("zero3", "engine", "aabb", ["0:3:backward"]),
        ("zero1", "plain", "aabb", ["3:4:copy2"]),
        ("zero2", "train_step", "aabb", ["1:4:copy7"]),
        ("zero3", "plain", "aabb", ["2:4:copy0"]),
        ("zero1", "engine", "abbc", ["0:3:step", "3:6:copy3"]),
        ("zero3", "train_step", "abcd", ["0:2:forward", "2:5:12"]),
        ("zero3", "engine", "aabb/rank", ["0:3:copy4", "3:6:9"]),
        ('{"preset": "hpz", "mesh": {"node": 2, "local": 2}}', "plain", "aabb", ["1:4:copy5"]),
        ('{"preset": "hsdp", "mesh": {"node": 2, "local": 2}}', "engine", "aabb", ["2:4:step"]),
        ("zero2", "engine", "aabb", ["0:5:0"]),
        ("zero2", "engine", "aabb", ["0:5:7"]),
        ("zero3", "plain", "aabb", ["2:5:13"]),
        ('{"preset": "infinity", "disk": "SCRATCH"}', "engine", "aabb", ["0:3:backward"]),
        ('{"preset": "infinity", "disk": "SCRATCH"}', "plain", "aabb", ["3:4:copy2"]),
    ],
)
def test_hosts_are_lost_with_their_memory(plan: str, loop: str, hosts: str, kills: list[str], tmp_path: Path) -> None:
    """All ranks of a host are killed at once, and its images removed; or one, whose host lives."""
    plan = plan.replace("SCRATCH", str(tmp_path / "scratch"))
    job = started(tmp_path, plan, loop, 10, kills, retries="0:10", hosts=hosts, least=1)
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=len(kills))
    assert "continue after step" in said or "continues after step" in said


def with_a_record(plan: str, out: Path) -> str:
    return json.dumps({"preset": plan, "run": str(out / "run")})


@pytest.mark.parametrize(("plan", "loop"), [("zero3", "engine"), ("zero1", "plain"), ("ddp", "train_step")])
def test_a_connection_breaks_and_nobody_is_lost(
    plan: str, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_SHARED_MEMORY", "0")
    cuts = ["1:3:cut3", "0:5:cut2"]
    job = started(tmp_path, with_a_record(plan, tmp_path), loop, 10, cuts, retries="0:10")
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=0)
    assert "Cause: network: Ranks 1 and 3 could not reach each other, though both are alive. The connection to" in said
    assert "The step is repeated. 4 ranks continue after step 3." in said
    faults = [line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "fault"]
    assert [(line["cause"], line["action"], line["ranks"], line["at_step"]) for line in faults] == [
        ("network", "retry", [1, 3], 3),
        ("network", "retry", [0, 2], 5),
    ]


def test_a_connection_that_breaks_again_and_again_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_SHARED_MEMORY", "0")
    cuts = [f"{1 + step % 2}:{step}:cut{2 - step % 2}" for step in (2, 4, 5)]
    job = started(tmp_path, with_a_record("zero2", tmp_path), "engine", 10, cuts, retries="0:600")
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0, said
    assert said.count("Cause: network: Ranks 1 and 2 could not reach each other") == 3, said
    assert "That is fault 3 of this connection within 600 s. The job is stopped, because a restart would not" in said
    faults = [line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "fault"]
    assert [line["action"] for line in faults] == ["retry", "retry", "stop"]


def test_too_few_wait_for_one_that_comes_and_take_no_step_before(tmp_path: Path) -> None:
    job = started(tmp_path, "zero3", "engine", 10, ["0:3:backward"], retries="1", least=4)
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=0)
    assert "3 ranks wait after step 3" in said
    assert "1 rank joined. 4 ranks continue after step 3." in said
    assert {json.loads(path.read_text())["world"] for path in tmp_path.glob("member-*.json")} == {4}


@pytest.mark.parametrize("plan", ["zero3", "ddp"])
def test_those_that_come_with_other_code_end_and_the_others_do_not(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many raise the same at once, or at one step: nothing is wrong with those that train."""
    monkeypatch.setenv("CHANGED_FROM", "4")
    monkeypatch.setenv("PAUSE_SECONDS", "0.05")
    kills = ["1:3:forward", "2:3:forward"]
    job = started(tmp_path, plan, "engine", 10**6, kills, retries="4:600", least=1)
    wait_until(lambda: job.poll() is not None or len(list(tmp_path.glob("changed-*"))) == 4)
    (tmp_path / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("member-*.json")]
    assert [one["world"] for one in found] == [2, 2], said
    check(said, job, tmp_path, max(int(step) for one in found for step in one["losses"]) + 1, most_wrong=2)
    assert "its script has made something else than theirs: parameter 5.bias is only here." in said
    assert "The job is stopped" not in said


@pytest.mark.parametrize("retries", [0, 1])
def test_a_stopped_rank_keeps_the_others_waiting_and_is_lost(
    retries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before it can go on, and replaced if the launcher may do so."""
    monkeypatch.setenv("TIMEOUT_SECONDS", "4")
    monkeypatch.setenv("PAUSE_SECONDS", "0.02")
    job = started(tmp_path, "zero3", "engine", 10**6, [], retries=f"{retries}:600")
    await_members(job, tmp_path, 4)
    stopped = int((tmp_path / "pid-1").read_text())
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: job.poll() is not None or not Path(f"/proc/{stopped}").exists())
    if retries:
        await_members(job, tmp_path, 5)
    (tmp_path / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("member-*.json")]
    assert {one["world"] for one in found} == {3 + retries}, said
    check(said, job, tmp_path, max(int(step) for one in found for step in one["losses"]) + 1, most_wrong=1)
    assert "Cause: network: Rank 1 could not be reached: kept the others waiting for more than 4 s." in said
    assert ("1 replacement starts" if retries else "No replacement starts") in said


def split(preset: str) -> str:
    return json.dumps({"preset": preset, "mesh": {"dp": 2, "tp": 2}, "tensor": {"plan": {"0": "column", "2": "row"}}})


def in_stages(preset: str, schedule: str) -> str:
    mesh = {"dp": 2, "pp": 2}
    return json.dumps({"preset": preset, "mesh": mesh, "accumulate": 2, "pipeline": {"schedule": schedule}})


def with_experts(preset: str) -> str:
    return json.dumps({"preset": preset, "mesh": {"dp": 2, "ep": 2}})


@pytest.mark.parametrize(
    ("plan", "loop", "kill"),
    [
        (split("zero2"), "engine", "1:3:backward"),
        (split("zero3"), "plain", "2:4:7"),
        (split("ddp"), "train_step", "0:2:forward"),
        (in_stages("zero1", "1f1b"), "train_step", "1:3:4"),
        (in_stages("zero3", "zb-h1"), "train_step", "2:4:8"),
        (with_experts("zero1"), "engine", "1:3:backward"),
        (with_experts("zero3"), "plain", "2:4:7"),
        (with_experts("zero2"), "train_step", "0:5:9"),
    ],
)
def test_a_replica_group_leaves(plan: str, loop: str, kill: str, tmp_path: Path) -> None:
    job = started(tmp_path, plan, loop, 10, [kill], retries="0:10")
    said, _ = job.communicate(timeout=PATIENCE)
    check(said, job, tmp_path, 10, most_wrong=1, plan=plan)
    assert "2 ranks continue after step" in said
    assert "1 rank waits as a spare until a replica group is complete." in said
    assert len(list(tmp_path.glob("member-*.json"))) == 2


@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        (split("zero1"), "engine"),
        (split("zero3"), "train_step"),
        (split("ddp"), "plain"),
        (in_stages("zero2", "gpipe"), "train_step"),
        (in_stages("zero3", "1f1b"), "train_step"),
        (with_experts("zero2"), "engine"),
    ],
)
def test_a_replica_group_comes_back(plan: str, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same process that was its spare; only the one that was killed is replaced."""
    monkeypatch.setenv("PAUSE_SECONDS", "0.02")
    job = started(tmp_path, plan, loop, 10**6, ["2:3:backward" if loop != "train_step" else "2:3:9"], "3:600")
    await_members(job, tmp_path, 5)
    (tmp_path / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("member-*.json")}
    assert found.keys() == {"member-0", "member-1", "member-3", "member-4"}, said
    assert {one["world"] for one in found.values()} == {4}
    num_steps = 1 + max(int(step) for one in found.values() for step in one["losses"])
    losses = oracle(num_steps, model_for(plan), partial(data_for, plan))
    for one in found.values():
        wrong = [step for step, loss in one["losses"].items() if loss != pytest.approx(losses[int(step)], rel=1e-5)]
        assert len(wrong) <= 1, said
        assert one["state"] == found["member-0"]["state"]
    assert "2 ranks joined. 4 ranks continue after step" in said


def await_members(job: subprocess.Popen[str], out: Path, number: int) -> None:
    """Until so many have begun to train, in all."""
    wait_until(lambda: job.poll() is not None or sum(bool(one.read_text()) for one in out.glob("pid-*")) >= number)
    time.sleep(0.5)  # some steps


@pytest.mark.timeout(7200)
def test_ranks_are_killed_at_random_and_come_back(tmp_path: Path) -> None:
    num_kills = 100 if os.environ.get("THOROUGH") == "all" else drawn(1, 3)
    draw = random.Random(0)
    job = started(tmp_path, "zero3", "engine", 10**6, [], retries="1000:100000")
    dead: set[Path] = set()
    until = time.monotonic() + 100 + 60 * num_kills
    while len(dead) < num_kills and time.monotonic() < until and job.poll() is None:
        living = [path for path in tmp_path.glob("pid-*") if path not in dead and path.read_text()]
        if len(living) >= 3:
            victim = draw.choice(living)
            dead.add(victim)
            os.kill(int(victim.read_text()), signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 1.0))
    (tmp_path / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert len(dead) == num_kills, said
    steps = max(int(step) for path in tmp_path.glob("member-*.json") for step in json.loads(path.read_text())["losses"])
    check(said, job, tmp_path, steps + 1, most_wrong=num_kills)


@pytest.mark.timeout(7200)
def test_hosts_are_killed_at_random_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ranks of them. Not two at once: a rank and its buddy would be lost together."""
    monkeypatch.setenv("PAUSE_SECONDS", "0.1")  # in many steps what is rounded otherwise would add up
    num_kills = 20 if os.environ.get("THOROUGH") == "all" else drawn(1, 3)
    draw = random.Random(1)
    names = "aabb" + "".join(draw.choice("ab") for _ in range(1000))
    job = started(tmp_path, "zero3", "engine", 10**6, [], retries="1000:100000", hosts=names, least=1)
    dead: set[Path] = set()
    until = time.monotonic() + 100 + 60 * num_kills
    num_killed = 0
    while num_killed < num_kills and time.monotonic() < until and job.poll() is None:
        time.sleep(draw.uniform(2.0, 3.0))
        living = [path for path in tmp_path.glob("pid-*") if path not in dead and path.read_text()]
        of = {path: names[int(path.name.partition("-")[2])] for path in living}
        if len(living) < 4 or len(set(of.values())) < 2:
            victims = [draw.choice(living)] if len(living) == 4 else []
        else:
            host = of[draw.choice(living)]
            victims = [path for path in living if of[path] == host]
            memory = Path((tmp_path / f"memory-{host}").read_text())
            while memory.exists():  # ranks of the host, not killed yet, may be making files there
                shutil.rmtree(memory, ignore_errors=True)
        for victim in victims:
            dead.add(victim)
            os.kill(int(victim.read_text()), signal.SIGKILL)
        num_killed += bool(victims)
    (tmp_path / "enough").touch()
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert num_killed == num_kills, said
    steps = max(int(step) for path in tmp_path.glob("member-*.json") for step in json.loads(path.read_text())["losses"])
    check(said, job, tmp_path, steps + 1, most_wrong=2 * num_kills)


TRAIN = Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "train.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--set", "precision=fp32"]


def losses_of(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def begun(out: Path, said: Path, *options: str) -> subprocess.Popen[bytes]:
    """The main job on three ranks, which somebody will have to stop."""
    launch = [warm.python(), "-m", "shardwise", "launch", "--nproc", "3", *options]
    script = [str(TRAIN), *SMALL, "--steps", "5000", "--save-every", "20", "--out", str(out)]
    environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"}
    with said.open("w") as log:
        return subprocess.Popen([*launch, *script], env=environment, stdout=log, stderr=subprocess.STDOUT)


def num_steps_of(out: Path) -> int:
    """As far as the run's record has them."""
    return len(losses_of(out)) if (out / "record.jsonl").exists() else 0


def stopped_after(job: subprocess.Popen[bytes], out: Path, said: Path, num_steps: int) -> dict[int, float]:
    """The losses of a job that is asked to stop after so many steps, and saves."""
    wait_until(lambda: job.poll() is not None or num_steps_of(out) >= num_steps)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=PATIENCE) == 130, said.read_text()
    assert "Stopped and saved after step" in said.read_text(), "whoever is rank 0 then says so"
    return losses_of(out)


def test_the_main_job_loses_a_rank_lets_one_in_and_has_the_losses_of_one_that_did_not(tmp_path: Path) -> None:
    """Loaders, a scheduler, checkpoints, validation and a record, as in any script, which knows nothing of it."""
    killed, whole, said = tmp_path / "killed", tmp_path / "whole", tmp_path / "said"
    job = begun(killed, said, "--elastic", "1:3", "--log-dir", str(tmp_path / "logs"))
    wait_until(lambda: job.poll() is not None or num_steps_of(killed) > 40)
    os.kill(read_record(killed / "record.jsonl").header["process"]["pid"], signal.SIGKILL)  # rank 0, which writes it
    wait_until(lambda: job.poll() is not None or "3 ranks continue after step" in said.read_text())
    assert "2 ranks continue after step" in said.read_text()
    losses = stopped_after(job, killed, said, len(losses_of(killed)) + 60)
    undisturbed = tmp_path / "said by the other"
    wanted = stopped_after(begun(whole, undisturbed), whole, undisturbed, len(losses))
    assert losses.keys() == set(range(1, len(losses) + 1))
    wrong = [step for step, loss in losses.items() if abs(loss - wanted[step]) > 1e-6 * wanted[step]]
    assert len(wrong) <= 1, wrong  # a rank that dies while it tells its loss is not in the mean of it


def test_the_main_job_loses_its_launcher_and_a_rank_and_has_the_losses_of_one_that_did_not(tmp_path: Path) -> None:
    killed, whole, said, logs = (tmp_path / name for name in ("killed", "whole", "said", "logs"))
    job = begun(killed, said, "--elastic", "1:3", "--log-dir", str(logs))

    def wait_for(is_so: Callable[[], object]) -> None:
        wait_until(is_so, said.read_text)

    def wait_for_steps(num_steps: int) -> None:
        wait_for(lambda: num_steps_of(killed) > num_steps)

    wait_for_steps(20)
    job.kill()
    job.wait()
    wait_for(lambda: "has taken over" in said.read_text())
    launcher = int(said.read_text().partition("has taken over")[0].split()[-1])
    wait_for_steps(len(losses_of(killed)) + 20)
    assert "continue after step" not in said.read_text(), "nobody has noticed"
    os.kill(read_record(killed / "record.jsonl").header["process"]["pid"], signal.SIGKILL)  # rank 0, which writes it
    wait_for(lambda: "3 ranks continue after step" in said.read_text())
    wait_for_steps(len(losses_of(killed)) + 20)
    os.kill(launcher, signal.SIGINT)
    wait_for((logs / "exit-status").exists)
    assert (logs / "exit-status").read_text() == "130\n"
    assert "Stopped and saved after step" in said.read_text()
    losses, undisturbed = losses_of(killed), tmp_path / "said by the other"
    wanted = stopped_after(begun(whole, undisturbed), whole, undisturbed, len(losses))
    assert losses.keys() == set(range(1, len(losses) + 1))
    wrong = [step for step, loss in losses.items() if abs(loss - wanted[step]) > 1e-6 * wanted[step]]
    assert len(wrong) <= 1, wrong  # a rank that dies while it tells its loss is not in the mean of it
